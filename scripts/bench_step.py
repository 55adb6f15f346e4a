# SPDX-License-Identifier: Apache-2.0
"""Time the optimizer step, backward with it, and whole iterations of AdamW, the built-in and DMuon.

python -m scripts.bench_step --save docs/benchmarks/step.md

The optimizers' engines live in the same ranks and take turns (step_timing.py), so that ratios hold
on a busy machine. All sizes and stages are run at the most ranks, the first size and the last stage
at fewer. The built-in's standard form takes long on a CPU and is run at the smallest size only.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scripts.arguments import pair, positive, writable
from scripts.byte_lm import CONTEXT, HEADS
from scripts.step_timing import (
    ADAMW,
    BUILT_IN,
    CLOCK,
    DMUON,
    HIDDEN,
    PROCESSOR,
    SLOW,
    Measured,
    RankResult,
    Size,
    measure,
)
from scripts.tables import Measurements, print_table, write_page
from tests.harness import ranks

TEXT = (
    "A time is the median over counted iterations of the mean over ranks. An iteration lasts from "
    "its start to the start of the next one, so that nothing hidden is free. Ratios are medians "
    "over iterations of the same turn. Engines take turns of four iterations in the same ranks, "
    "of which the second and the third are counted. Processor time is a rank's own, with the "
    "threads of its collectives: others' work hardly inflates it, and waiting does not count. "
    "Model flops utilisation is the flops of forward and backward (three times two per weight and "
    "token, and attention) over time and over the rate of the model's own product, tokens x width "
    "by width x 4 width in bf16, measured between turns while all ranks form theirs; "
    "Newton-Schulz is compared likewise with products of DMuon's matrices in the arithmetic it "
    "runs in. Memory is the most on any rank; ZeRO's buckets are set to 2^20 elements. Launches "
    "are torch's operators of `engine.step()` that are no views.\n\n"
    "On a CPU nothing is compiled and AdamW is torch's fused one. The built-in's default is the "
    "Gram form in fp16, and in fp32 where a CPU has no fp16 instructions; DMuon's is the standard "
    "form in bf16, and where a CPU has no bf16 instructions fp32, in the Gram form where it pays. "
    "`standard` is the built-in with the device's own bf16 products in the standard form, at the "
    "smallest size only, with one turn. `hidden gather` is `hide_param_gather`; its gather is in "
    "the next forward, so iterations show it. Few tokens make the optimizer's part of an "
    "iteration large: with real batches all ratios of whole iterations come closer to 1.\n\n"
    "Under ZeRO-1 and 2 the built-in iterates a matrix on every rank that holds a part of it, "
    "during backward; the table of Newton-Schulz says how often that is on all ranks. F is the "
    "plain flops of DMuon's Newton-Schulz; a rate above 1 forms half of each symmetric product "
    "only, and the model's rate exceeds 1 where its other products run faster than the one that is "
    "timed. The last column is what an iteration would take if Newton-Schulz ran at a GEMM's rate "
    "and all else cost 1.15 times AdamW's."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run: engines of all kinds at one stage, size and world."""

    ranks: int
    stage: int
    size: Size
    results: Sequence[RankResult]

    def of(self, kind: str) -> list[Measured]:
        """One optimizer's measurements, by rank."""
        return [m for result in self.results for m in result.measured if m.kind == kind]

    @property
    def kinds(self) -> list[str]:
        """Optimizers that took part."""
        return [m.kind for m in self.results[0].measured]

    def means(self, kind: str, what: str, clock: str) -> list[float]:
        """Seconds per counted iteration, the mean over ranks."""
        by_rank = [getattr(m, what)[clock] for m in self.of(kind)]
        return [statistics.fmean(values) for values in zip(*by_rank, strict=True)]

    def seconds(self, kind: str, what: str, clock: str) -> float:
        """The median over iterations."""
        return statistics.median(self.means(kind, what, clock))

    def ratio(self, kind: str, other: str, what: str, clock: str) -> str:
        """The median over iterations of the same turn; "-" where one did not take part."""
        if not {kind, other} <= set(self.kinds):
            return "-"
        pairs = zip(self.means(kind, what, clock), self.means(other, what, clock), strict=False)
        return f"{statistics.median(a / b for a, b in pairs):.2f}"

    def rate(self, which: str, clock: str) -> float:
        """Flops per second of a rank, the mean over ranks."""
        return statistics.fmean(getattr(r, which)[clock] for r in self.results)

    @property
    def place(self) -> list[str]:
        """The cells that say where a row belongs."""
        return [str(n) for n in (self.stage, self.ranks, self.size.width, self.size.layers)]


KINDS = [ADAMW, BUILT_IN, SLOW, DMUON, HIDDEN]
PLACE = ("stage", "ranks", "width", "layers")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def times(cells: Sequence[Cell], clock: str) -> Measurements:
    """What everything took."""
    columns = (
        *PLACE,
        "optimizer",
        "step, ms",
        "backward + step, ms",
        "iteration, ms",
        "iteration / AdamW's",
        f"step / {BUILT_IN}'s",
        "step / its standard form's",
        f"backward + step / {BUILT_IN}'s",
        "backward + step / its standard form's",
        "tokens/s",
        "model flops utilisation",
    )
    rows = []
    for cell in cells:
        for kind in cell.kinds:
            iteration = cell.seconds(kind, "iteration", clock)
            model = cell.size.flops() / iteration / cell.rate("model_rate", clock)
            rows.append(
                [
                    *cell.place,
                    kind,
                    _ms(cell.seconds(kind, "step", clock)),
                    _ms(cell.seconds(kind, "backward_and_step", clock)),
                    _ms(iteration),
                    cell.ratio(kind, ADAMW, "iteration", clock),
                    cell.ratio(kind, BUILT_IN, "step", clock),
                    cell.ratio(kind, SLOW, "step", clock),
                    cell.ratio(kind, BUILT_IN, "backward_and_step", clock),
                    cell.ratio(kind, SLOW, "backward_and_step", clock),
                    f"{cell.ranks * cell.size.tokens / iteration:,.0f}" if clock == CLOCK else "-",
                    f"{model:.2f}",
                ]
            )
    return Measurements(title=f"Times, {clock}", columns=columns, rows=rows)


def resources(cells: Sequence[Cell]) -> Measurements:
    """Memory of iterations, and calls of steps."""
    columns = (
        *PLACE,
        "optimizer",
        "between iterations, MiB",
        "peak of an iteration, MiB",
        "peak / AdamW's",
        "launches in a step",
        "views",
        "collectives",
    )
    rows = []
    for cell in cells:
        peaks = {
            kind: max(m.memory.left + m.memory.peak for m in cell.of(kind)) for kind in cell.kinds
        }
        for kind, peak in peaks.items():
            found = cell.of(kind)
            rows.append(
                [
                    *cell.place,
                    kind,
                    f"{max(m.memory.left for m in found) / 2**20:.2f}",
                    f"{peak / 2**20:.2f}",
                    f"{peak / peaks[ADAMW]:.2f}",
                    f"{max(m.launches for m in found):,}",
                    f"{max(m.views for m in found):,}",
                    str(max(m.collectives for m in found)),
                ]
            )
    return Measurements(title="Memory and launches", columns=columns, rows=rows)


def newton_schulz(cells: Sequence[Cell], clock: str) -> Measurements:
    """DMuon's Newton-Schulz beside products of the same run, and what an iteration may take."""
    columns = (
        *PLACE,
        "matrices",
        "iterations of the built-in",
        "Gflop, all ranks",
        "busiest / mean",
        "ms, mean of ranks",
        "of the product's rate",
        "share of the iteration",
        "floor F/(rate N), ms",
        "iteration, ms",
        "1.15 AdamW's + floor, ms",
    )
    rows = []
    for cell in cells:
        flops = [m.flops for m in cell.of(DMUON)]
        mean, rate = statistics.fmean(flops), cell.rate("matrix_rate", clock)
        spent = cell.seconds(DMUON, "orthogonalising", clock)
        iteration = cell.seconds(DMUON, "iteration", clock)
        allowed = 1.15 * cell.seconds(ADAMW, "iteration", clock) + mean / rate
        rows.append(
            [
                *cell.place,
                str(cell.results[0].matrices),
                str(cell.results[0].built_in_iterations),
                f"{sum(flops) / 1e9:.2f}",
                f"{max(flops) / mean:.2f}",
                _ms(spent),
                f"{mean / spent / rate:.2f}",
                f"{spent / iteration:.2f}",
                _ms(mean / rate),
                _ms(iteration),
                _ms(allowed),
            ]
        )
    return Measurements(title=f"Newton-Schulz, {clock}", columns=columns, rows=rows)


def tables_of(cells: Sequence[Cell]) -> list[Measurements]:
    """All tables; processor time only where it is the ranks' own."""
    clocks = (CLOCK,) if torch.accelerator.current_accelerator() else (CLOCK, PROCESSOR)
    return [
        *(times(cells, clock) for clock in clocks),
        *(newton_schulz(cells, clock) for clock in clocks),
        resources(cells),
    ]


def run_cells(args: argparse.Namespace) -> list[Cell]:
    """All sizes and stages at the most ranks; the first size and the last stage at fewer."""
    most, last = max(args.ranks), args.stages[-1]
    places = [(most, stage, size) for size in args.sizes for stage in args.stages]
    places += [(n, last, args.sizes[0]) for n in sorted(args.ranks) if n != most]
    smallest = min(args.sizes)
    cells = []
    for world, stage, (width, layers) in places:
        size = Size(width=width, layers=layers, batch=args.batch, length=args.length)
        left_out = {HIDDEN} if stage == 3 else set()
        left_out |= set() if (world, (width, layers)) == (most, smallest) else {SLOW}
        kinds = [k for k in args.optimizers if k not in left_out]
        results = ranks.run(
            world,
            measure,
            timeout_s=3600.0,
            kinds=kinds,
            stage=stage,
            size=size,
            turns=args.turns,
        )
        cells.append(Cell(ranks=world, stage=stage, size=size, results=results))
        for table in tables_of(cells[-1:]):
            print_table(table)
    return cells


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--sizes",
        type=pair,
        nargs="+",
        default=[(512, 2), (256, 2), (256, 16)],
        help="width x layers, such as 512x2",
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3], choices=[1, 2, 3])
    parser.add_argument("--batch", type=positive, default=1, help="sequences per rank")
    parser.add_argument("--length", type=positive, default=4, help=f"bytes, at most {CONTEXT}")
    parser.add_argument(
        "--turns", type=positive, default=4, help="of each optimizer; two counted each"
    )
    parser.add_argument(
        "--optimizers",
        nargs="+",
        default=KINDS,
        choices=KINDS,
    )
    parser.add_argument("--save", type=writable, help="write the tables as a page of docs/")
    args = parser.parse_args()
    if not {ADAMW, DMUON} <= set(args.optimizers):
        parser.error(f"--optimizers must name {ADAMW} and {DMUON}, which the tables compare with")
    if args.length > CONTEXT or any(width % HEADS for width, _ in args.sizes):
        parser.error(f"--length is at most {CONTEXT}, and widths are multiples of {HEADS}")
    return args


def main() -> None:
    args = parse_arguments()
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        # Compiling takes longer than all that is measured.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    cells = run_cells(args)
    parameters = cells[0].results[0].parameters
    about = (
        f"{args.batch} sequence(s) of {args.length} bytes of Python's "
        "standard library per rank, GPT-2's initialisation"
    )
    if args.save is None:
        return
    sizes = [f"{width}x{layers}" for width, layers in args.sizes]
    numbers = [("ranks", args.ranks), ("sizes", sizes), ("stages", args.stages)]
    command = "python -m scripts.bench_step " + " ".join(
        f"--{name} {' '.join(map(str, values))}" for name, values in numbers
    )
    command += f" --batch {args.batch} --length {args.length} --turns {args.turns}"
    if args.optimizers != KINDS:
        command += "".join([" --optimizers", *(f" '{kind}'" for kind in args.optimizers)])
    lines = [
        "# The step, timed",
        "",
        f"`{command} --save {args.save}` wrote this page: bf16, {parameters:,} parameters at "
        f"{sizes[0]}, on {accelerator or f'a CPU of {os.cpu_count()} cores'}, "
        f"torch {torch.__version__}.",
        "",
        TEXT,
    ]
    for table in tables_of(cells):
        lines += ["", f"{table.title}. {about}.", "", *table.markdown()]
    write_page(args.save, lines)


if __name__ == "__main__":
    main()
