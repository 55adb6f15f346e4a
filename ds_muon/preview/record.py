# SPDX-License-Identifier: Apache-2.0
"""Preview: what a run would do, from a ds_config and a model on the meta device; no ranks, no GPU.

Owns: the numbers of `ds_muon plan` as one record; show.py prints them.
Never does: import DeepSpeed, or hold weights.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ds_muon.plan.plan import Plan
from ds_muon.plan.replicas import held
from ds_muon.preview.subject import PlannedRun, Subject
from ds_muon.preview.traffic import (
    Rates,
    Traffic,
    communicator_bytes,
    count,
    exchange_seconds,
    ns_seconds,
    traffic,
)

_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One matrix: who holds it, who owns it and when it is its turn.

    With HSDP the holders are those in the owner's row; the other rows hold it alike.
    """

    name: str
    rows: int
    cols: int
    holders: tuple[int, ...]
    owner: int
    bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The plan of a run in numbers.

    Attributes:
        makespan_over_mean: sum over buckets of the busiest owner's cost, over the mean.
        bound_terms: lower bounds of the same for whole matrices: the mean, the largest matrix, and
            the two that must share a rank when there are more matrices than ranks.
        state_bytes: optimizer state per rank: momentum, and AdamW's two moments.
        state_on_host: whether it stands on the host (`offload_optimizer`).
        host_bytes: all that offload keeps on the host, per rank.
        workspace_bytes: exchange buffers and iteration at their peak, per rank.
        shard_size: ranks that ZeRO partitions over; fewer than world_size: HSDP.
        publish_bytes: updates under way to and from other replicas at most, per rank (HSDP).
        communicator_bytes: estimate of what NCCL allocates for the exchange's connections.
        ns_seconds, exchange_seconds: predicted, on the critical path, at the given rates;
            Newton-Schulz by the measured table where there is one.
    """

    world_size: int
    shard_size: int
    stage: int
    num_matrices: int
    matrix_numel: int
    rest_numel: int
    num_straddlers: int
    num_buckets: int
    exchange: tuple[str, ...]
    padding_numel: int
    makespan_over_mean: float
    makespan_over_bound: float
    bound_terms: tuple[float, float, float]
    traffic: tuple[Traffic, ...]
    state_bytes: int
    state_on_host: bool
    host_bytes: int
    adamw_state_bytes: int
    workspace_bytes: tuple[int, ...]
    publish_bytes: int
    communicator_bytes: int
    ns_seconds: float | None
    exchange_seconds: float | None
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, for JSON."""
        return asdict(self)


def preview(
    subject: Subject,
    *,
    world_size: int,
    shard_size: int | None = None,
    rates: Rates | None = None,
) -> tuple[Preview, PlannedRun]:
    """Plan a run on `world_size` ranks.

    Args:
        shard_size: ranks that ZeRO partitions over; None: as the configuration says.

    Raises:
        ValueError: rows of the shard size do not fill the world.
    """
    size = subject.shard_size(world_size) if shard_size is None else shard_size
    run = subject.plan(world_size, size)
    counted = count(run)
    costs = sorted((c for p in run.plans for c in p.costs), reverse=True)
    mean = sum(costs) / world_size
    shared = costs[world_size - 1] + costs[world_size] if len(costs) > world_size else 0
    bound_terms = (mean, costs[0] if costs else 0, shared)
    span = run.makespan()
    stage, everyone = subject.settings.stage, subject.settings.stage > 0
    matrix_numel, rest_numel = subject.matrix_numel, subject.rest_numel
    momentum = matrix_numel * subject.momentum_bytes / (world_size if everyone else 1)
    state = math.ceil(momentum + rest_numel * 2 * _FP32 / (size if everyone else 1))
    return Preview(
        world_size=world_size,
        shard_size=size,
        stage=stage,
        num_matrices=len(costs),
        matrix_numel=matrix_numel,
        rest_numel=rest_numel,
        num_straddlers=sum(len(m.holders) > 1 for m in placed(run)),
        num_buckets=sum(len(p.routes) for p in run.plans),
        exchange=tuple(sorted({p.exchange for p in run.plans})),
        padding_numel=max(counted.padding(), default=0),
        makespan_over_mean=span / mean if mean else 1.0,
        makespan_over_bound=span / max(bound_terms) if max(bound_terms) else 1.0,
        bound_terms=bound_terms,
        traffic=traffic(subject, counted, rates),
        state_bytes=state,
        state_on_host=subject.offload.optimizer,
        host_bytes=_host_bytes(subject, size, state),
        adamw_state_bytes=math.ceil(
            (matrix_numel + rest_numel) * 2 * _FP32 / (world_size if everyone else 1)
        ),
        workspace_bytes=tuple(max(b, default=0) for b in run.per_rank(Plan.peak_bytes)),
        publish_bytes=_publish_bytes(subject, run),
        communicator_bytes=communicator_bytes(counted),
        ns_seconds=ns_seconds(run, rates),
        exchange_seconds=exchange_seconds(subject, counted, rates) if rates else None,
        warnings=tuple(_warnings(subject, run)),
    ), run


def _host_bytes(subject: Subject, size: int, state: int) -> int:
    """Masters and their gradients in fp32, state, and what ZeRO keeps beside them.

    ZeRO-1/2 bring updated weights to the device through a copy in their own dtype; ZeRO-3 keeps
    gradient shards there, and weights' shards if they are offloaded.
    """
    offload, per_element = subject.offload, 0
    if offload.optimizer:
        beside = subject.gradient_bytes if subject.settings.stage == 3 else subject.weight_bytes
        per_element += 2 * _FP32 + beside
    if offload.parameters:
        per_element += subject.weight_bytes
    numel = subject.matrix_numel + subject.rest_numel
    return math.ceil(per_element * numel / size) + (state if offload.optimizer else 0)


def _publish_bytes(subject: Subject, run: PlannedRun) -> int:
    """Updates under way at most, own ones and others' (HSDP), on the rank that has most.

    Hidden, all of a step are; otherwise those of one set of leaves.
    """
    if run.replicas == 1:
        return 0
    totals = []
    for shard in range(run.shard_size):
        per_set = [
            sum(piece.numel for row in rows for _, piece in held(row, shard)) for rows in run.sets
        ]
        totals.append(sum(per_set) if run.hidden else max(per_set, default=0))
    return max(totals) * subject.spec.update_dtype.itemsize


def placed(run: PlannedRun) -> list[Placed]:
    """List all matrices; one that every rank holds whole has no holders to bring it together."""
    found = []
    for rows in run.sets:
        for replica, plan in enumerate(rows):
            first = replica * run.shard_size
            bucket = {i: n for n, route in enumerate(plan.routes) for i in route.matrices}
            for i, matrix in enumerate(plan.layout.matrices):
                holders = () if plan.layout.is_replicated(i) else plan.layout.holders(i)
                found.append(
                    Placed(
                        name=matrix.name,
                        rows=matrix.rows,
                        cols=matrix.cols,
                        holders=tuple(first + holder for holder in holders),
                        owner=first + plan.owners[i],
                        bucket=bucket[i],
                    )
                )
    return found


def _warnings(subject: Subject, run: PlannedRun) -> list[str]:
    workspace_mb = subject.config.workspace_mb
    found = [subject.warning] if subject.warning else []
    found += [w for w in (p.oversize_warning(workspace_mb) for p in run.plans) if w]
    settings = subject.settings
    if settings.stage == 3 and len(run.sets) > 1:
        costs = sum(sum(p.costs) for p in run.plans)
        found.append(
            f"sub_group_size = {settings.sub_group_size:,} cuts the matrices into {len(run.sets)} "
            "sub-groups, each planned and exchanged by itself; owners balance within one only: "
            f"makespan {run.makespan() * run.world_size / costs:.3f} x the mean; a larger one "
            "makes one sub-group"
        )
    return found
