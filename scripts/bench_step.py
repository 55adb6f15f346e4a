# SPDX-License-Identifier: Apache-2.0
"""Time the optimizer step, backward with it, and whole iterations of AdamW, the built-in and DMuon.

python -m scripts.bench_step --save docs/benchmarks/step.md

The optimizers' engines live in the same ranks and take turns (step_timing.py), so that ratios hold
on a busy machine. All stages are run at the most ranks and the first width; fewer ranks and other
widths at the last stage, without the built-in's standard form, which takes long on a CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from scripts.byte_lm import CONTEXT
from scripts.step_timing import (
    ADAMW,
    BUILT_IN,
    CLOCK,
    DMUON,
    GRAM,
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
    "of which the first is not counted. Processor time is a rank's own, with the threads of its "
    "collectives: others' work hardly inflates it, and waiting does not count. Model flops "
    "utilisation is the flops of forward and backward (three times two per weight and token, and "
    "attention) over time and over the rate of the model's own product, tokens x width by width x "
    "4 width in bf16, measured between turns while all ranks form theirs; Newton-Schulz is "
    "compared likewise with products of DMuon's matrices in the arithmetic it runs in. Memory is "
    "the most on any rank; ZeRO's buckets are set to 2^20 elements. Launches are torch's operators "
    "of `engine.step()` that are no views.\n\n"
    "On a CPU nothing is compiled and AdamW is torch's fused one. The built-in's default is the "
    "Gram form in fp16, and in fp32 where a CPU has no fp16 instructions; `standard` is the "
    "function that DMuon's default computes, in the device's own bf16 products, and has one turn. "
    "DMuon forms bf16 products in fp32 and rounds them, where a CPU has no bf16 instructions. "
    "`Gram form` computes in the form and dtype of the built-in's default; `hidden gather` is "
    "`hide_param_gather`."
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
        return [str(self.stage), str(self.ranks), str(self.size.width)]


KINDS = [ADAMW, BUILT_IN, SLOW, DMUON, GRAM, HIDDEN]
PLACE = ("stage", "ranks", "width")


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
    """All stages at the most ranks; fewer ranks and other widths at the last stage."""
    most, first, last = max(args.ranks), args.widths[0], args.stages[-1]
    places = [(most, stage, first) for stage in args.stages]
    growth = [(n, last, first) for n in sorted(args.ranks) if n != most]
    growth += [(most, last, width) for width in args.widths[1:]]
    cells = []
    for world, stage, width in places + growth:
        size = Size(width=width, layers=args.layers, batch=args.batch, length=args.length)
        left_out = {HIDDEN} if stage == 3 else set()
        left_out |= {SLOW} if (world, stage, width) in growth else set()
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
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 384])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--length", type=int, default=16, help=f"bytes, at most {CONTEXT}")
    parser.add_argument("--turns", type=int, default=8, help="of each optimizer; two counted each")
    parser.add_argument(
        "--optimizers",
        nargs="+",
        default=KINDS,
        choices=KINDS,
    )
    parser.add_argument("--save", type=Path, help="write the tables as a page of docs/")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        # Compiling takes longer than all that is measured.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    cells = run_cells(args)
    parameters = cells[0].results[0].parameters
    about = (
        f"{args.layers} layers, {args.batch} sequence(s) of {args.length} bytes of Python's "
        "standard library per rank, GPT-2's initialisation"
    )
    if args.save is None:
        return
    numbers = [("ranks", args.ranks), ("widths", args.widths), ("stages", args.stages)]
    command = "python -m scripts.bench_step " + " ".join(
        f"--{name} {' '.join(map(str, values))}" for name, values in numbers
    )
    command += f" --layers {args.layers} --batch {args.batch} --length {args.length}"
    command += f" --turns {args.turns}"
    if args.optimizers != KINDS:
        command += "".join([" --optimizers", *(f" '{kind}'" for kind in args.optimizers)])
    lines = [
        "# The step, timed",
        "",
        f"`{command} --save {args.save}` wrote this page: bf16, {parameters:,} parameters at width "
        f"{args.widths[0]}, on {accelerator or f'a CPU of {os.cpu_count()} cores'}, "
        f"torch {torch.__version__}.",
        "",
        TEXT,
    ]
    for table in tables_of(cells):
        lines += ["", f"{table.title}. {about}.", "", *table.markdown()]
    write_page(args.save, lines)


if __name__ == "__main__":
    main()
