# SPDX-License-Identifier: Apache-2.0
"""Sweep: balance, elements and memory of a run per HSDP shard size, as `ds_muon plan` prints them.

A shard group of G ranks is what ZeRO partitions over; R = N / G of them are replicas. Each matrix
has one owner in the world: a replica, and a rank in it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ds_muon.plan.replicas import restrict, split_over_replicas
from ds_muon.preview.record import Subject

_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSize:
    """One shard size; elements are received per rank and step, bytes are per rank.

    Attributes:
        makespan_over_mean: busiest owner of the world over the mean, buckets included.
        shard_axis: ZeRO's own legs with N = G, and the exchange's mean.
        replicate_axis: gradients reduced and updates published between replicas.
        state_bytes: weights, master weights and optimizer state.
    """

    shard_size: int
    replicas: int
    makespan_over_mean: float
    shard_axis: float
    replicate_axis: float
    state_bytes: int
    workspace_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, for JSON."""
        return asdict(self)


def sweep_shard_sizes(subject: Subject, *, world_size: int) -> list[ShardSize]:
    """Plan every shard size that divides the world.

    Raises:
        ValueError: the stage does not partition anything.
    """
    if not subject.settings.stage:
        raise ValueError("--sweep-shard-size needs zero_optimization.stage 1, 2 or 3")
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return [_plan_size(subject, size, world_size // size) for size in sizes]


def _plan_size(subject: Subject, shard_size: int, replicas: int) -> ShardSize:
    stage, world_size = subject.settings.stage, shard_size * replicas
    span, total, received, workspace = 0, 0, 0, 0
    for layout in subject.layouts(shard_size):
        costs = subject.plan(layout).costs
        rows = [
            subject.plan(restrict(layout, indices))
            for indices in split_over_replicas(layout, costs, replicas)
        ]
        span += max(row.makespan() for row in rows)
        total += sum(costs)
        received += sum(sum(row.received_numel()) for row in rows)
        workspace = max(workspace, *(max(row.peak_bytes()) for row in rows))
    matrices, rest = subject.matrix_numel, subject.rest_numel
    share, copies = (shard_size - 1) / shard_size, (replicas - 1) / replicas
    legs = {1: 3, 2: 3, 3: 3}[stage] * share * (matrices + rest)
    weights = 2 if subject.low_precision else 4
    masters = _FP32 if subject.low_precision or stage < 3 else 0
    held = (matrices + rest) * (weights / (shard_size if stage == 3 else 1) + masters / shard_size)
    return ShardSize(
        shard_size=shard_size,
        replicas=replicas,
        makespan_over_mean=span * world_size / total if total else 1.0,
        shard_axis=legs + received / world_size,
        replicate_axis=2 * copies * (matrices + rest) / shard_size,
        state_bytes=round(
            held + matrices * subject.momentum_bytes / world_size + rest * 2 * _FP32 / shard_size
        ),
        workspace_bytes=workspace,
    )
