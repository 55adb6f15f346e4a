# SPDX-License-Identifier: Apache-2.0
"""Count what HSDP, lifetimes and parameter sources move and hold, on gloo ranks, in one run.

python -m scripts.bench_hsdp --ranks 4 --save docs/benchmarks/hsdp.md

Per rank and iteration (forward, backward and step; one micro-batch), after two that warm up:
elements received inside rows and down columns, by the ranks of each collective's group, and what a
rank holds for the matrices. Reductions count what a ring moves. Nothing is timed.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from scripts.bench_comm import models_parameters
from scripts.tables import read_arguments, show
from tests.harness import models, ranks
from tests.harness.training import counting_collectives, ds_config, start_engine

TEXT = (
    "Elements that a rank receives from others, mean over ranks, by the collective's group: "
    "inside its row (ZeRO's gradients and parameters, and the exchange) and down its column "
    "(gradients reduced, updates published). Momentum is what a rank keeps between steps; "
    "updates are the elements of own and other replicas' updates under way at their most; live "
    "matrices are counted between forward and backward. ZeRO-3's reuse, prefetch and "
    "persistence are at 0."
)
COLUMNS = (
    "stage",
    "replicas x shard",
    "settings",
    "rows",
    "columns",
    "momentum held",
    "most updates under way",
    "matrices live after forward",
)
BARE = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
SETTINGS: dict[int, list[dict[str, Any]]] = {
    2: [{}, {"hide_param_gather": True}],
    3: [
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"reshard_after_forward": True, "param_source": "owner_broadcast"},
        {"reshard_after_forward": False, "param_source": "owner_broadcast"},
    ],
}


def measure(
    *, stage: int, shard_size: int, settings: dict[str, Any], width: int, layers: int
) -> dict[str, float]:
    """Run on a rank: three iterations, the last one counted."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    params = {"lr": 1e-3, **settings, "hsdp": {"shard_size": shard_size}}
    config = ds_config(stage, params=params, dtype="bf16", zero=BARE if stage == 3 else {})
    original = models.LlamaLike

    def sized() -> Any:
        return original(width=width, heads=4, hidden=width * 8 // 3, layers=layers)

    with mock.patch.object(models, "LlamaLike", sized):
        engine = start_engine(config)
    batches = [b.chunk(world)[rank] for b in models.global_batches(3)]
    for batch in batches[:2]:
        engine.backward(engine(batch))
        engine.step()
    live = 0
    with counting_collectives() as counts:
        loss = engine(batches[2])
        named = engine.module.named_parameters()
        matrices = [p for n, p in named if models.is_matrix(n)]
        if stage == 3:
            live = sum(p.ds_numel for p in matrices if p.ds_status is ZeroParamStatus.AVAILABLE)
        engine.backward(loss)
        engine.step()
    binding = engine.basic_optimizer.binding
    publisher = binding.engine.publisher
    start = rank - rank % shard_size
    row = tuple(range(start, start + shard_size))
    column = tuple(range(rank % shard_size, world, shard_size))
    held = binding.spread.buffers if binding.spread else [leaf for [leaf] in binding.leaf_sets]
    return {
        "parameters": sum(p.numel() for p in models_parameters(width, layers)),
        "row": counts["groups"][row],
        "column": counts["groups"][column] if len(column) > 1 else 0,
        "momentum": sum(buffer.numel() for buffer in held),
        "updates": 0 if publisher is None else publisher.peak_numel,
        "live": live,
    }


def main() -> None:
    args = read_arguments(__doc__, stages=[2, 3])
    sizes = [size for size in range(1, args.ranks + 1) if args.ranks % size == 0]
    rows = []
    for stage in args.stages:
        for size in reversed(sizes):
            for settings in SETTINGS[stage]:
                out = ranks.run(
                    args.ranks,
                    measure,
                    stage=stage,
                    shard_size=size,
                    settings=settings,
                    width=args.width,
                    layers=args.layers,
                )
                shown = ", ".join(f"{k} {str(v).lower()}" for k, v in settings.items())
                mean = {key: sum(o[key] for o in out) / args.ranks for key in out[0]}
                keys = ("row", "column", "momentum", "updates", "live")
                cells = [f"{mean[key] / mean['parameters']:.3f} P" for key in keys]
                rows.append([str(stage), f"{args.ranks // size} x {size}", shown or "-", *cells])
    title = f"{args.ranks} ranks, {int(mean['parameters']):,} parameters (P), bf16, one iteration"
    stages = " ".join(map(str, args.stages))
    show(
        title,
        COLUMNS,
        rows,
        save=args.save,
        heading="HSDP, lifetimes and parameter sources, counted",
        command=f"python -m scripts.bench_hsdp --ranks {args.ranks} --width {args.width} "
        f"--layers {args.layers} --stages {stages}",
        text=TEXT,
    )


if __name__ == "__main__":
    main()
