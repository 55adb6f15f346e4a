# SPDX-License-Identifier: Apache-2.0
"""Header: what this run's checkpoints say about it and its leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from ds_muon.checkpoint import CheckpointHeader
from ds_muon.zero.leaves import LeafSet
from ds_muon.zero.prepare import Preparation


def header_of(engine: Any, prepared: Preparation, sets: Sequence[LeafSet]) -> CheckpointHeader:
    """Describe a run whose optimizer DeepSpeed has wrapped."""
    spec = prepared.spec
    return CheckpointHeader(
        world_size=prepared.row.world_size,
        rank=prepared.row.rank,
        stage=int(engine.zero_optimization_stage()),
        wrapper=_wrapper(engine),
        precision=_precision(engine),
        recipe={
            "name": prepared.config.recipe,
            "momentum_dtype": prepared.config.momentum_dtype,
            "compute_dtype": str(spec.compute_dtype),
            "update_dtype": str(spec.update_dtype),
            "wire_dtype": str(spec.wire_dtype),
            "nesterov": spec.nesterov,
            "lr_scale": spec.lr_scale,
            "steps": len(spec.triples),
        },
        slices={id(leaf.tensor): leaf.slices for s in sets for leaf in s.leaves},
    )


def _wrapper(engine: Any) -> str:
    if isinstance(engine.optimizer, BF16_Optimizer):
        return "BF16_Optimizer"
    return "ZeRO" if engine.zero_optimization() else "none"


def _precision(engine: Any) -> str:
    if engine.fp16_enabled():
        return "fp16"
    return "bf16" if engine.bfloat16_enabled() else "fp32"
