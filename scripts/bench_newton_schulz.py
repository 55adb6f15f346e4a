# SPDX-License-Identifier: Apache-2.0
"""Time Newton-Schulz per shape and dtype beside other routines and a GEMM, in the same run.

python -m scripts.bench_newton_schulz --shapes 512x512 512x2048 --dtypes default fp32
python -m scripts.bench_newton_schulz --config ds_config.json --model PATH --save costs.json

--save writes the table that `owner_costs` reads: seconds of one orthogonalisation per shape.
--batches compares matrices of one shape one by one with one batch of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ds_muon.config import parse
from ds_muon.ortho.backends import Backend
from ds_muon.ortho.recipes import DTYPES, OrthoSpec, resolve
from ds_muon.plan.costs import CostModel
from ds_muon.preview.config_file import read_config
from ds_muon.preview.model import build_model
from ds_muon.preview.subject import read_subject
from scripts.arguments import pair, positive, writable
from scripts.tables import show

Shape = tuple[int, int]
SHAPES = (
    "128x128 128x512 512x128 256x256 256x1024 1024x256 512x512 512x2048 2048x512 "
    "1024x1024 1024x4096 4096x1024"
)
COLUMNS = (
    "rows x cols",
    "dtype",
    "ours, ms",
    "form",
    "torch.optim.Muon, ms",
    "DeepSpeed standard, ms",
    "DeepSpeed gram, ms",
    "best other / ours",
    "GEMM, Gflop/s",
    "ours / GEMM",
)
# What everyone takes on the device.
DEFAULT = "default"
# Seconds that a candidate runs at a time, so that it does not only meet the caches of the others.
_TURN = 0.01
PEERS = ("torch.optim.Muon", "DeepSpeed standard", "DeepSpeed gram")
TEXT = """Medians of runs that take turns; with `--clock cpu` of the process's own time, for a
machine that others use too. Ours is what the step engine runs with the default recipe,
in the form that it takes. In rows of `default` everyone runs in the dtype that it takes on
this device (ours is named): torch and DeepSpeed's standard form take bf16, DeepSpeed's gram
form fp16, and fp32 on a CPU; we take bf16, and fp32 on a CPU without bf16 instructions, where
bf16 products take 10 to 100 times longer. In rows of fp32 all run in fp32: torch's with its
one cast replaced, DeepSpeed's with its choice of dtype replaced. A `~` is one run, and `>` was
not run because its rate on smaller shapes foretold more than the limit. The GEMM is the
faster of `mm` and `baddbmm` of (short, short) and (short, long) in the dtype that our
iterates are stored in; "ours / GEMM" is the flops of the standard or gram formula per
second over that rate, and exceeds 1 where half of a symmetric product was not computed."""


class Clock:
    """Wall time of a device, or the processor's time of this process on a shared machine."""

    def __init__(self, device: torch.device, kind: str) -> None:
        self._synchronize = device.type != "cpu"
        self._read = time.process_time if kind == "cpu" else time.perf_counter

    def seconds(self, run: Callable[[], object]) -> float:
        """Time one run."""
        started = self._read()
        run()
        if self._synchronize:
            torch.accelerator.synchronize()
        return self._read() - started


class Turns:
    """Candidates that are timed in turns.

    Args:
        limit: seconds of one run of a peer; one that takes a quarter of it is run once, and one
            that would take longer, by its rate on what was timed before, is not run.
    """

    def __init__(self, clock: Clock, limit: float) -> None:
        self._clock, self._limit = clock, limit
        self._rates: dict[str, float] = {}

    def medians(
        self, runs: Mapping[str, Callable[[], object]], flops: float, seconds: float
    ) -> dict[str, str | float]:
        """Name -> median seconds, or what is known of a candidate that is too slow, as a text."""
        found: dict[str, str | float] = {}
        times: dict[str, list[float]] = {}
        turns: dict[str, int] = {}
        round_ = 0.0
        for name, run in runs.items():
            foretold = flops / self._rates.get(name, float("inf"))
            limit = self._limit if name in PEERS else float("inf")
            if foretold > limit:
                found[name] = f"> {1e3 * self._limit:,.0f}"
                continue
            first = self._clock.seconds(run)
            self._rates[name] = flops / first
            if first > limit / 4:
                found[name] = f"~ {1e3 * first:,.0f}"
                continue
            if first < 10 * _TURN:  # it also warmed up
                first = self._clock.seconds(run)
            times[name], turns[name] = [], max(1, round(_TURN / max(first, 1e-6)))
            round_ += turns[name] * first
        for _ in range(max(3, min(100, round(seconds / max(round_, 1e-6))))):
            for name, list_ in times.items():
                spent = self._clock.seconds(lambda n=name: [runs[n]() for _ in range(turns[n])])
                list_.append(spent / turns[name])
        return found | {name: statistics.median(list_) for name, list_ in times.items()}


def ours(
    shape: Shape, spec: OrthoSpec, device: torch.device, backend: Backend | None = None
) -> Callable[[], object]:
    """Our orthogonalisation of a random matrix, as the steps run it."""
    backend = Backend(spec, device) if backend is None else backend
    x, matrix, scratch = backend.new_memory(shape)
    source = torch.randn(shape, device=device).to(spec.wire_dtype)

    @torch.no_grad()
    def once() -> None:
        matrix.copy_(source)  # what arrives; the others copy theirs too
        backend.ready(x, matrix, scratch)()

    return once


def gemms(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, Callable]:
    """The products that an iteration spends most in, one matrix and four at a time."""
    n, m = sorted(shape)
    a, b = (torch.randn(4, n, k, device=device, dtype=dtype) for k in (n, m))
    out = torch.empty_like(b)
    return {
        "mm": lambda: torch.mm(a[0], b[0], out=out[0]),
        "baddbmm": lambda: torch.baddbmm(b, a, b, beta=0.5, out=out),
    }


def row(shape: Shape, dtype: str, device: torch.device, turns: Turns, seconds: float) -> list[str]:
    """Time one shape in one dtype."""
    from scripts.newton_schulz_peers import peers

    spec = resolve(parse({} if dtype == DEFAULT else {"ns_dtype": dtype}), device)
    source = torch.randn(shape, device=device)
    theirs = peers(None if dtype == DEFAULT else spec.compute_dtype)
    others = {name: lambda f=f: f(source.clone()) for name, f in theirs.items()}
    products = gemms(shape, Backend(spec, device).storage, device)
    flops = cost_model(spec).flops(*shape)
    found = turns.medians({"ours": ours(shape, spec, device), **others, **products}, flops, seconds)
    best, bound = min(_at_least(found[name]) for name in PEERS)
    names = {value: key for key, value in DTYPES.items()}
    one = 2 * min(shape) ** 2 * max(shape)
    ceiling = max(one / found["mm"], 4 * one / found["baddbmm"])
    return [
        f"{shape[0]} x {shape[1]}",
        f"{dtype}, {names[spec.compute_dtype]}" if dtype == DEFAULT else dtype,
        shown(found["ours"]),
        "gram" if spec.uses_gram(*shape) else "standard",
        *(shown(found[name]) for name in PEERS),
        f"{bound}{best / found['ours']:.2f}",
        f"{ceiling / 1e9:,.1f}",
        f"{flops / found['ours'] / ceiling:.2f}",
    ]


def _at_least(value: str | float) -> tuple[float, str]:
    """Seconds, and ">" where they are a lower bound."""
    if isinstance(value, float):
        return value, ""
    sign, milliseconds = value.split()
    return float(milliseconds.replace(",", "")) / 1e3, ">" if sign == ">" else ""


def shown(value: str | float) -> str:
    return value if isinstance(value, str) else f"{1e3 * value:,.2f}"


def cost_model(spec: OrthoSpec) -> CostModel:
    return CostModel(
        steps=len(spec.triples),
        gram_from=spec.gram_from,
        gram_restarts=len(spec.gram_restarts),
        iterate_bytes=lambda rows, cols: 0,
    )


class Batch:
    """Matrices of one shape that are iterated alone or together, without normalisation."""

    def __init__(self, shape: Shape, count: int, device: torch.device, dtype: torch.dtype) -> None:
        n, m = sorted(shape)
        self._triples = resolve(parse({})).triples
        start = torch.randn(count, n, m, generator=torch.Generator().manual_seed(0))
        self._start = (start / (n * m) ** 0.5).to(device, dtype)
        self._x, self._other = self._start.clone(), torch.empty_like(self._start)
        self._gram, self._factor = (self._start.new_empty(count, n, n) for _ in range(2))

    def alone(self, i: int) -> Tensor:
        """Iterate matrix i."""
        self._x[i].copy_(self._start[i])
        parts = (self._x[i], self._other[i], self._gram[i], self._factor[i])
        return self._iterate(*parts, torch.mm, torch.addmm)

    def together(self, count: int) -> Tensor:
        """Iterate the first matrices."""
        self._x[:count].copy_(self._start[:count])
        parts = (t[:count] for t in (self._x, self._other, self._gram, self._factor))
        return self._iterate(*parts, torch.bmm, torch.baddbmm)

    def _iterate(
        self,
        x: Tensor,
        other: Tensor,
        gram: Tensor,
        factor: Tensor,
        product: Callable[..., Tensor],
        added: Callable[..., Tensor],
    ) -> Tensor:
        for a, b, c in self._triples:
            product(x, x.mT, out=gram)
            added(gram, gram, gram, beta=b, alpha=c, out=factor)
            added(x, factor, x, beta=a, out=other)
            x, other = other, x
        return x


def batch_bits(shape: Shape, count: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a matrix gets the same bits alone and in batches of 1, 2, 3 and `count`."""
    batch = Batch(shape, count, device, dtype)
    alone = [batch.alone(i).clone() for i in range(count)]
    return all(
        torch.equal(batch.together(k)[i], alone[i]) for k in (1, 2, 3, count) for i in range(k)
    )


def batch_row(shape: Shape, count: int, device: torch.device, turns: Turns) -> list[str]:
    """Time matrices of a shape one by one and as a batch, in fp32."""
    batch = Batch(shape, count, device, torch.float32)
    runs = {
        "loop": lambda: [batch.alone(i) for i in range(count)],
        "batch": lambda: batch.together(count),
    }
    found = turns.medians(runs, 1.0, 2.0)
    same = batch_bits(shape, count, device, torch.float32)
    return [
        f"{min(shape)} x {max(shape)}",
        str(count),
        *(shown(found[name]) for name in runs),
        f"{found['loop'] / found['batch']:.2f}",
        "equal" if same else "differ",
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = [pair(text) for text in SHAPES.split()]
    parser.add_argument("--shapes", type=pair, nargs="+", default=shapes, metavar="RxC")
    parser.add_argument(
        "--dtypes", nargs="+", default=[DEFAULT, "fp32"], choices=[DEFAULT, *DTYPES]
    )
    parser.add_argument("--model", help="as for `ds_muon plan`; its matrices' shapes are timed")
    parser.add_argument("--config", type=Path, help="ds_config.json, for the recipe of --save")
    parser.add_argument("--seconds", type=float, default=4.0, help="per shape and dtype")
    parser.add_argument("--peer_limit", type=float, default=20.0, help="seconds of one run")
    parser.add_argument("--threads", type=positive, help="of the CPU")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--compile_peers", action="store_true", help="as DeepSpeed ships its own")
    parser.add_argument("--batches", type=positive, nargs="?", const=8, help="matrices in a batch")
    parser.add_argument("--save", type=writable, help="write the cost table for owner_costs")
    parser.add_argument("--markdown", type=writable, help="write the table as a page of docs/")
    return parser.parse_args()


def shapes_of(args: argparse.Namespace, device: torch.device) -> tuple[list[Shape], OrthoSpec]:
    """What is timed, by size, and the recipe of --save."""
    config = read_config(args.config or {"optimizer": {"type": "DMuon"}})
    if args.model:
        subject = read_subject(build_model(args.model), config)
        matrices = [p.matrix for route in subject.muon for p in route.placements]
        shapes = {(m.rows, m.cols) for m in matrices}
    else:
        shapes = set(args.shapes)
    spec = resolve(config.params, device)
    return sorted(shapes, key=lambda s: (min(s) ** 2 * max(s), s)), spec


def save_costs(
    path: Path,
    shapes: list[Shape],
    spec: OrthoSpec,
    device: torch.device,
    turns: Turns,
    seconds: float,
) -> None:
    """Write seconds of one orthogonalisation per (short, long side)."""
    sides = sorted({tuple(sorted(shape)) for shape in shapes})
    rows = []
    for n, m in sides:
        [median] = turns.medians({f"{n}x{m}": ours((n, m), spec, device)}, 1.0, seconds).values()
        rows.append([n, m, median])
    about = {"device": str(device), "dtype": str(spec.compute_dtype), "torch": torch.__version__}
    path.write_text(json.dumps({**about, "seconds": rows}, indent=1) + "\n")


def _said(args: argparse.Namespace) -> list[str]:
    """What shapes the figures, for the page."""
    threads = [f"--threads {args.threads}"] if args.threads else []
    return [
        f"--shapes {' '.join(f'{rows}x{cols}' for rows, cols in args.shapes)}",
        f"--dtypes {' '.join(args.dtypes)}",
        *threads,
        f"--clock {args.clock} --seconds {args.seconds:g} --peer_limit {args.peer_limit:g}",
    ]


def main() -> None:
    args = arguments()
    if not args.compile_peers:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    shapes, spec = shapes_of(args, device)
    turns = Turns(Clock(device, args.clock), args.peer_limit)
    title = f"{device}, torch {torch.__version__}, {torch.get_num_threads()} thread(s)"
    if args.save:
        turns = Turns(Clock(device, args.clock), float("inf"))
        save_costs(args.save, shapes, spec, device, turns, args.seconds)
        print(f"{len(shapes)} shapes timed; {args.save} is for owner_costs")
        return
    if args.batches:
        show(
            title,
            ("short x long", "matrices", "one by one, ms", "batch, ms", "gain", "bits"),
            [batch_row(s, args.batches, device, turns) for s in shapes],
            save=args.markdown,
            heading="Matrices of one shape in a batch",
            command="",
            text="",
        )
        return
    rows = []
    for dtype in args.dtypes:
        rows += [row(shape, dtype, device, turns, args.seconds) for shape in shapes]
        turns = Turns(Clock(device, args.clock), args.peer_limit)
    show(
        title,
        COLUMNS,
        rows,
        save=args.markdown,
        heading="Newton-Schulz per shape",
        command=" ".join(["python -m scripts.bench_newton_schulz", *_said(args)]),
        text=TEXT,
        option="--markdown",
    )


if __name__ == "__main__":
    main()
