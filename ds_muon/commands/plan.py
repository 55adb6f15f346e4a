# SPDX-License-Identifier: Apache-2.0
"""`ds_muon plan`: what a run would do.

Never does: compute what it shows (preview/record.py and sweep.py do).
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import asdict
from pathlib import Path

from ds_muon.diagnose.acceptance import require_accepted
from ds_muon.plan.plan import Plan
from ds_muon.preview import show
from ds_muon.preview.model import build_model
from ds_muon.preview.record import placed, preview
from ds_muon.preview.subject import read_subject
from ds_muon.preview.sweep import GIB, Cluster, sweep_shard_sizes
from ds_muon.preview.traffic import Rates


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    plan.add_argument("--config", type=Path, required=True, help="ds_config.json")
    plan.add_argument(
        "--model",
        required=True,
        help="a folder with a Hugging Face config.json, or module:callable that builds a model",
    )
    plan.add_argument("--world-size", type=int, required=True, help="ranks")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.add_argument("--plot", type=Path, help="write the owners' Newton-Schulz load as an image")
    plan.add_argument("--matrices", action="store_true", help="list holders and owner of each")
    plan.add_argument("--sweep-shard-size", action="store_true", help="compare HSDP shard sizes")
    plan.add_argument(
        "--ranks-per-node", type=int, default=8, help="default 8, for --sweep-shard-size"
    )
    plan.add_argument(
        "--link-ratio",
        type=float,
        default=8.0,
        help="bandwidth inside a node over that between nodes, default 8, for --sweep-shard-size",
    )
    plan.add_argument("--memory-gib", type=float, help="per rank, for --sweep-shard-size")
    plan.add_argument("--tflops", type=float, help="Newton-Schulz rate of a rank, for times")
    plan.add_argument("--gb-per-s", type=float, help="bandwidth into a rank, for times")
    plan.add_argument("--latency-us", type=float, default=10.0, help="per collective, for times")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if args.world_size < 1:
        raise ValueError(f"--world-size must be at least 1, got {args.world_size}")
    if args.plot is not None:
        show.require_plot(args.plot)
    rates, cluster = _rates(args), _cluster(args)
    config = require_accepted(args.config).read
    model = build_model(args.model)
    started = time.perf_counter()
    # A plan is some hundred thousand small records; collecting in between would double the time.
    gc.disable()
    try:
        subject = read_subject(model, config)
        found, planned = preview(subject, world_size=args.world_size, rates=rates)
    finally:
        gc.enable()
    seconds = time.perf_counter() - started
    matrices = placed(planned) if args.matrices else []
    sizes = []
    if args.sweep_shard_size:
        sizes = sweep_shard_sizes(subject, world_size=args.world_size, cluster=cluster)
    if args.json:
        shown = found.as_dict()
        if args.matrices:
            shown["matrices"] = [asdict(m) for m in matrices]
        if args.sweep_shard_size:
            shown["shard_sizes"] = [size.as_dict() for size in sizes]
        print(json.dumps(shown, indent=1))
    else:
        print(subject.table.report())
        show.print_preview(found, seconds)
        if matrices:
            show.print_matrices(matrices)
        if sizes:
            show.print_sweep(sizes, cluster)
    if args.plot:
        loads = planned.per_rank(Plan.owner_flops)
        show.plot_loads([sum(of_rank) for of_rank in loads], args.plot)
    return 0


def _rates(args: argparse.Namespace) -> Rates | None:
    if (args.tflops is None) != (args.gb_per_s is None):
        raise ValueError("predicted times need both --tflops and --gb-per-s")
    if args.tflops is None:
        return None
    for name in ("tflops", "gb_per_s", "latency_us"):
        if not getattr(args, name) > 0:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be above 0, got {getattr(args, name)}")
    return Rates(
        flops=args.tflops * 1e12,
        bandwidth=args.gb_per_s * 1e9,
        latency=args.latency_us * 1e-6,
    )


def _cluster(args: argparse.Namespace) -> Cluster:
    for name in ("ranks_per_node", "link_ratio", "memory_gib"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
    memory = None if args.memory_gib is None else round(args.memory_gib * GIB)
    return Cluster(
        ranks_per_node=args.ranks_per_node, link_ratio=args.link_ratio, memory_bytes=memory
    )
