# SPDX-License-Identifier: Apache-2.0
"""Time Newton-Schulz per shape beside a GEMM of the same dtype in the same run.

python scripts/bench_newton_schulz.py --shapes 512x512 512x2048
python scripts/bench_newton_schulz.py --config ds_config.json --model PATH --save costs.json

--save writes the table that `owner_costs` reads: seconds of one orthogonalisation per shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ds_muon.ortho.newton_schulz import arithmetic_for, orthogonalize_into, scratch_numel
from ds_muon.ortho.recipes import OrthoSpec, resolve
from ds_muon.plan.costs import CostModel
from ds_muon.preview.config_file import read_config
from ds_muon.preview.model import build_model
from ds_muon.preview.subject import read_subject

Shape = tuple[int, int]


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of several runs after one that warms up."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def newton_schulz_seconds(shape: Shape, spec: OrthoSpec, device: torch.device, n: int) -> float:
    storage = arithmetic_for(spec, device).storage
    matrix = torch.randn(shape, device=device, dtype=storage)
    x = torch.empty_like(matrix)
    scratch = torch.empty(scratch_numel(*shape, spec), device=device, dtype=storage)
    return median_seconds(lambda: orthogonalize_into(x, matrix, spec, scratch), device, n)


def gemm_flops_per_second(shape: Shape, spec: OrthoSpec, device: torch.device, n: int) -> float:
    """Rate of the product that an iteration spends most in: (short, short) @ (short, long)."""
    storage = arithmetic_for(spec, device).storage
    short, long = shape
    a = torch.randn(short, short, device=device, dtype=storage)
    b = torch.randn(short, long, device=device, dtype=storage)
    out = torch.empty_like(b)
    seconds = median_seconds(lambda: torch.mm(a, b, out=out), device, n)
    return 2 * short * short * long / seconds


def shapes_of(args: argparse.Namespace) -> tuple[list[Shape], OrthoSpec]:
    """(short, long side) of what is timed, and the recipe."""
    config = read_config(args.config or {"optimizer": {"type": "DMuon"}})
    if args.model:
        subject = read_subject(build_model(args.model), config)
        matrices = [p.matrix for route in subject.muon for p in route.placements]
        found = {tuple(sorted((m.rows, m.cols))) for m in matrices}
        return sorted(found), subject.spec
    spec = resolve(config.params)
    return sorted(tuple(sorted(map(int, s.split("x")))) for s in args.shapes), spec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["512x512", "512x2048"], metavar="RxC")
    parser.add_argument("--model", help="as for `ds_muon plan`; its matrices' shapes are timed")
    parser.add_argument("--config", type=Path, help="ds_config.json, for the recipe")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", type=Path, help="write the cost table for owner_costs")
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    shapes, spec = shapes_of(args)
    model = CostModel(
        steps=len(spec.triples),
        gram_from=spec.gram_from,
        gram_restarts=len(spec.gram_restarts),
        iterate_bytes=lambda rows, cols: 0,
    )
    table = Table(
        title=f"Newton-Schulz on {device}, {spec.compute_dtype}, median of {args.repeats}"
    )
    for column in ("short x long", "ms", "Gflop/s", "of the GEMM's rate"):
        table.add_column(column, justify="right")
    rows = []
    for shape in shapes:
        seconds = newton_schulz_seconds(shape, spec, device, args.repeats)
        rate = model.flops(*shape) / seconds
        ceiling = gemm_flops_per_second(shape, spec, device, args.repeats)
        rows.append([*shape, seconds])
        table.add_row(
            f"{shape[0]} x {shape[1]}",
            f"{1e3 * seconds:.2f}",
            f"{rate / 1e9:.1f}",
            f"{rate / ceiling:.2f}",
        )
    Console().print(table)
    if args.save:
        about = {
            "device": str(device),
            "dtype": str(spec.compute_dtype),
            "torch": torch.__version__,
        }
        args.save.write_text(json.dumps({**about, "seconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
