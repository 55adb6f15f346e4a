# SPDX-License-Identifier: Apache-2.0
"""Count what AdamW, the built-in Muon and DMuon move and compute, on gloo ranks, in one run.

python -m scripts.bench_comm --ranks 4 --save docs/benchmarks/comm.md

Per rank and optimizer step, after one step that warms up: elements received by forward and
backward and by the step, collectives issued, Newton-Schulz flops, and live bytes at the step's
peak beyond what lives between steps. Reductions count what a ring moves. Nothing is timed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

import ds_muon.run.step
from scripts.tables import read_arguments, show
from tests.harness import models, ranks
from tests.harness.memory import peak_allocated
from tests.harness.training import counting_collectives, ds_config, start_engine

TEXT = (
    "Elements are what a rank receives from others, reductions as in a ring, on average over "
    "ranks unless it says busiest. The step is `engine.step()`; under ZeRO-1/2 it includes the "
    "gather of parameters, and the reduction of gradients comes before it: DeepSpeed's all-reduce "
    "(2U, U = 3/4 P) or DMuon's, to the ranks that keep them (U). The peak is live tensor bytes "
    "beyond those between steps, of the rank that has most; DMuon's preallocated "
    "workspace lives between steps. Gloo receives an all-gather into a copy of its own. At "
    "stage 3 a model this small stays gathered between forward and backward (ZeRO's reuse "
    "distance), so its parameters cost U there, not 2U."
)
COLUMNS = (
    "optimizer",
    "stage",
    "exchange",
    "forward and backward",
    "step, mean",
    "step, busiest",
    "calls in the step",
    "Newton-Schulz Mflop, sum of ranks",
    "step's peak, KiB",
)
STRATEGIES = ("all_to_all", "all_gather", "broadcast", "p2p")


@contextmanager
def counting_newton_schulz_flops() -> Iterator[list[int]]:
    """Collect the flops of every orthogonalisation, DMuon's and the built-in's."""
    from deepspeed.runtime.zero.muon import original_muon

    flops: list[int] = []

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                result = real(*args, **kwargs)
            flops.append(counter.get_total_flops())
            return result

        return call

    with (
        mock.patch.object(
            ds_muon.run.step, "orthogonalize_into", counted(ds_muon.run.step.orthogonalize_into)
        ),
        mock.patch.object(original_muon, "muon_update", counted(original_muon.muon_update)),
    ):
        yield flops


def optimizer_section(kind: str, exchange: str) -> dict[str, Any]:
    """One optimizer, all with the standard Newton-Schulz form."""
    if kind == "AdamW":
        return {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    if kind == "built-in Muon":
        params = {"lr": 1e-3, "ns_method": "standard", "torch_adam": True}
        return {"type": "Muon", "params": params}
    return {"type": "DMuon", "params": {"lr": 1e-3, "exchange": exchange, "ns_method": "standard"}}


def measure(*, kind: str, stage: int, exchange: str, width: int, layers: int) -> dict[str, Any]:
    """Run on a rank: three steps; the second is counted, the third watched for memory."""
    zero: dict[str, Any] = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    if kind == "built-in Muon":
        zero["reduce_scatter"] = False
    config = ds_config(stage, params={}, dtype="bf16", zero=zero)
    config["optimizer"] = optimizer_section(kind, exchange)
    original = models.LlamaLike

    def sized() -> Any:
        return original(width=width, heads=4, hidden=width * 8 // 3, layers=layers)

    with mock.patch.object(models, "LlamaLike", sized):
        engine = start_engine(config)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batches = [b.chunk(world)[rank] for b in models.global_batches(3)]

    def forward_and_backward(batch: torch.Tensor) -> None:
        engine.backward(engine(batch))

    forward_and_backward(batches[0])
    engine.step()
    with counting_newton_schulz_flops() as flops:
        with counting_collectives() as before:
            forward_and_backward(batches[1])
        with counting_collectives() as step:
            engine.step()
    forward_and_backward(batches[2])
    return {
        "parameters": sum(p.numel() for p in models_parameters(width, layers)),
        "before": sum(before["elements"].values()),
        "step": sum(step["elements"].values()),
        "calls": sum(step["calls"].values()),
        "flops": sum(flops),
        "peak": peak_allocated(engine.step),
    }


def models_parameters(width: int, layers: int) -> list[torch.Tensor]:
    """Parameters of the measured model."""
    with torch.device("meta"):
        model = models.LlamaLike(width=width, heads=4, hidden=width * 8 // 3, layers=layers)
    return list(model.parameters())


def main() -> None:
    args = read_arguments(__doc__, stages=[1, 2, 3])
    # Compiled functions hide their products from the flop counter.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    rows = []
    for stage in args.stages:
        cells = [("AdamW", ""), ("built-in Muon", ""), *(("DMuon", s) for s in STRATEGIES)]
        for kind, exchange in cells:
            out = ranks.run(
                args.ranks,
                measure,
                kind=kind,
                stage=stage,
                exchange=exchange,
                width=args.width,
                layers=args.layers,
            )
            parameters = out[0]["parameters"]
            rows.append(
                [
                    kind,
                    str(stage),
                    exchange or "-",
                    f"{sum(o['before'] for o in out) / args.ranks / parameters:.3f} P",
                    f"{sum(o['step'] for o in out) / args.ranks / parameters:.3f} P",
                    f"{max(o['step'] for o in out) / parameters:.3f} P",
                    str(max(o["calls"] for o in out)),
                    f"{sum(o['flops'] for o in out) / 1e6:,.0f}",
                    f"{max(o['peak'] for o in out) / 1024:,.0f}",
                ]
            )
    title = f"{args.ranks} ranks, {parameters:,} parameters (P), bf16, one optimizer step"
    stages = " ".join(map(str, args.stages))
    show(
        title,
        COLUMNS,
        rows,
        save=args.save,
        heading="Elements, calls, flops and memory, counted",
        command=f"python -m scripts.bench_comm --ranks {args.ranks} --width {args.width} "
        f"--layers {args.layers} --stages {stages}",
        text=TEXT,
    )


if __name__ == "__main__":
    main()
