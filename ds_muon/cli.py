# SPDX-License-Identifier: Apache-2.0
"""Command line: `ds_muon plan` and `ds_muon check`.

Owns: arguments, where a model comes from, and how a preview is shown.
Never does: compute what it shows (preview.py does).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_muon.config import parse
from ds_muon.ortho.recipes import resolve
from ds_muon.preview import Preview, preview


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="ds_muon", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="what a run would do: routing, owners, traffic, memory")
    plan.add_argument("--config", type=Path, required=True, help="ds_config.json")
    plan.add_argument(
        "--model",
        required=True,
        help="a folder with a Hugging Face config.json, or module:callable that builds a model",
    )
    plan.add_argument("--world-size", type=int, required=True, help="ranks")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.add_argument("--plot", type=Path, help="write the owners' Newton-Schulz load as an image")
    check = commands.add_parser("check", help="validate optimizer.params of a ds_config.json")
    check.add_argument("config", type=Path)
    args = parser.parse_args(arguments)
    try:
        return _check(args) if args.command == "check" else _plan(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"ds_muon {args.command}: {error}", file=sys.stderr)
        return 1


def _check(args: argparse.Namespace) -> int:
    config = _read(args.config)
    kind = config.get("optimizer", {}).get("type")
    if str(kind).lower() != "dmuon":
        raise ValueError(f'optimizer.type of {args.config} is {kind!r}, not "DMuon"')
    spec = resolve(parse(config["optimizer"].get("params")))
    print(f"{args.config}: valid; {len(spec.triples)} steps in {spec.compute_dtype}")
    return 0


def _plan(args: argparse.Namespace) -> int:
    if args.world_size < 1:
        raise ValueError(f"--world-size must be at least 1, got {args.world_size}")
    model, config = build_model(args.model), _read(args.config)
    started = time.perf_counter()
    # A plan is some hundred thousand small records; collecting in between would double the time.
    gc.disable()
    try:
        found, table, plans = preview(model, config, world_size=args.world_size)
    finally:
        gc.enable()
    seconds = time.perf_counter() - started
    if args.json:
        print(json.dumps(found.as_dict(), indent=1))
    else:
        print(table.report())
        _print(found, seconds)
    if args.plot:
        loads = [sum(f) for f in zip(*(p.owner_flops() for p in plans), strict=True)]
        _plot(loads, args.plot)
    return 0


def build_model(source: str) -> nn.Module:
    """Build a model on the meta device.

    Args:
        source: a folder (or file) with a Hugging Face config.json, or module:callable.

    Raises:
        ValueError: neither of both.
    """
    path = Path(source)
    with torch.device("meta"):
        if path.exists():
            from transformers import AutoConfig, AutoModelForCausalLM

            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        module, _, name = source.partition(":")
        if not name:
            raise ValueError(
                f"--model {source!r} is neither an existing folder with a config.json nor "
                "module:callable"
            )
        sys.path.insert(0, "")
        return getattr(importlib.import_module(module), name)()


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def _print(found: Preview, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    facts = Table(title=f"ZeRO-{found.stage}, {found.world_size} ranks", show_header=False)
    mean, largest, shared = found.bound_terms
    for name, value in (
        ("matrices", f"{found.num_matrices:,}, of which {found.num_straddlers:,} on several ranks"),
        ("buckets, exchange", f"{found.num_buckets}, by {', '.join(found.exchange) or 'nothing'}"),
        ("makespan over sum/N", f"{found.makespan_over_mean:.3f}"),
        ("makespan over the bound", f"{found.makespan_over_bound:.3f}"),
        ("bound: sum/N, largest, two that share", f"{mean:.3g}, {largest:.3g}, {shared:.3g} flops"),
        ("optimizer state per rank", f"{found.state_bytes / 2**20:,.1f} MiB"),
        ("the same for AdamW", f"{found.adamw_state_bytes / 2**20:,.1f} MiB"),
        ("exchange and iteration at peak", f"{found.workspace_bytes / 2**20:,.1f} MiB"),
    ):
        facts.add_row(name, value)
    console.print(facts)
    console.print(f"planned in {seconds:.1f} s")
    traffic = Table(title="millions of elements received per rank and step")
    for column in ("", "gradients", "parameters", "exchange, mean", "exchange, busiest", "total"):
        traffic.add_column(column, justify="right", no_wrap=not column)
    for row in found.traffic:
        numbers = (row.gradients, row.parameters, row.exchange_mean, row.exchange_busiest)
        total = row.gradients + row.parameters + row.exchange_mean
        traffic.add_row(row.optimizer, *(_millions(n) for n in (*numbers, total)))
    console.print(traffic)
    for warning in found.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)


def _millions(numel: float) -> str:
    return f"{numel / 1e6:,.3f}" if numel < 1e8 else f"{numel / 1e6:,.0f}"


def _plot(loads: Sequence[int], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.bar(range(len(loads)), loads)
    axes.axhline(sum(loads) / len(loads), color="black", lw=1, label="mean")
    axes.set(xlabel="rank", ylabel="Newton-Schulz flops per step", title="owners' load")
    axes.legend()
    figure.savefig(path, dpi=120)
