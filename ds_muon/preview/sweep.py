# SPDX-License-Identifier: Apache-2.0
"""Sweep: balance, elements and memory of a run per HSDP shard size, and which one to take.

A shard group of G ranks is what ZeRO partitions over; R = N / G of them are replicas. Each matrix
has one owner in the world: a replica, and a rank in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ds_muon.preview.record import Preview, preview
from ds_muon.preview.subject import Subject

_FP32 = 4
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What the choice of a shard size depends on.

    Attributes:
        ranks_per_node: consecutive ranks that share a node.
        link_ratio: bandwidth inside a node over that between nodes, per rank.
        memory_bytes: of a rank, for weights, state and workspace; None: any amount.
    """

    ranks_per_node: int = 8
    link_ratio: float = 8.0
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSize:
    """One shard size; elements are received per rank and step, bytes are per rank.

    Attributes:
        makespan_over_mean: busiest owner of the world over the mean, buckets included.
        shard_axis: ZeRO's own legs with N = G, and the exchange's mean.
        replicate_axis: gradients reduced and updates published between replicas.
        weighted: elements, those between nodes times the link ratio.
        state_bytes: weights, master weights, gradients and optimizer state.
        workspace_bytes: exchange, iteration, and updates under way.
        fits: whether these fit the memory given.
        recommended: the least weighted elements of those that fit, the largest size among equals.
    """

    shard_size: int
    replicas: int
    makespan_over_mean: float
    shard_axis: float
    replicate_axis: float
    weighted: float
    state_bytes: int
    workspace_bytes: int
    fits: bool
    recommended: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, for JSON."""
        return asdict(self)


def sweep_shard_sizes(subject: Subject, *, world_size: int, cluster: Cluster) -> list[ShardSize]:
    """Plan every shard size that divides the world; one that fits best is recommended.

    Raises:
        ValueError: the stage does not partition anything, or what it does is offloaded.
    """
    if not subject.settings.stage:
        raise ValueError("--sweep-shard-size needs zero_optimization.stage 1, 2 or 3")
    if subject.offload.optimizer or subject.offload.parameters:
        raise ValueError(
            "--sweep-shard-size compares hsdp's shard sizes, and DMuon has no hsdp with "
            "zero_optimization.offload_optimizer or offload_param; remove these"
        )
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    rows = [
        _row(subject, preview(subject, world_size=world_size, shard_size=size)[0], cluster)
        for size in sizes
    ]
    return _recommend(rows)


def _recommend(rows: Sequence[ShardSize]) -> list[ShardSize]:
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return list(rows)
    best = min(fitting, key=lambda row: (row.weighted, -row.shard_size))
    return [
        ShardSize(**{**row.as_dict(), "recommended": row.shard_size == best.shard_size})
        for row in rows
    ]


def _row(subject: Subject, found: Preview, cluster: Cluster) -> ShardSize:
    size, replicas = found.shard_size, found.world_size // found.shard_size
    dmuon = next(row for row in found.traffic if row.optimizer == "DMuon")
    shard_axis = dmuon.gradients + dmuon.parameters + dmuon.exchange_mean
    one_node = found.world_size <= cluster.ranks_per_node
    row_in_node = cluster.ranks_per_node % size == 0 or one_node
    weighted = shard_axis * (1 if row_in_node else cluster.link_ratio)
    weighted += dmuon.replicate * (1 if one_node else cluster.link_ratio)
    state = _state_bytes(subject, found)
    workspace = max(found.workspace_bytes, default=0) + found.publish_bytes
    fits = cluster.memory_bytes is None or state + workspace <= cluster.memory_bytes
    return ShardSize(
        shard_size=size,
        replicas=replicas,
        makespan_over_mean=found.makespan_over_mean,
        shard_axis=shard_axis,
        replicate_axis=dmuon.replicate,
        weighted=weighted,
        state_bytes=state,
        workspace_bytes=workspace,
        fits=fits,
    )


def _state_bytes(subject: Subject, found: Preview) -> int:
    """Weights and gradients as the stage shards them, fp32 masters, and optimizer state.

    Matrices that are held until the step (Z2), or whole on their owners, are held beside shards.
    """
    stage, size, config = subject.settings.stage, found.shard_size, subject.config
    numel = subject.matrix_numel + subject.rest_numel
    element = subject.weight_bytes
    weights = element * numel / (size if stage == 3 else 1)
    if stage == 3 and config.reshard_after_forward is False:
        weights += element * subject.matrix_numel
    if config.param_source == "owner_broadcast":
        weights += element * subject.matrix_numel / size
    gradients = subject.gradient_bytes * numel / (size if stage >= 2 else 1)
    return round(weights + gradients + _FP32 * numel / size) + found.state_bytes
