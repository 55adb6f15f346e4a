# SPDX-License-Identifier: Apache-2.0
"""Preview: what a run would do, from a ds_config and a model on the meta device; no ranks, no GPU.

Owns: the numbers of `ds_muon plan` as one record; show.py prints them.
Never does: import DeepSpeed, or hold weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ds_muon.config import DMuonConfig
from ds_muon.ortho.recipes import OrthoSpec, resolve
from ds_muon.plan.layout import Layout
from ds_muon.plan.plan import Plan
from ds_muon.plan.predict import PlannedParameter, ZeroSettings, predict_layouts
from ds_muon.plan.traffic import PERSONAL, Leg, Load
from ds_muon.planning import plan_layout
from ds_muon.preview.config_file import ConfigFile
from ds_muon.routing import Route, RoutingTable, route_parameters

_FP32 = 4
# What NCCL allocates per peer and direction for sends and receives: one channel's NCCL_BUFFSIZE.
_CONNECTION_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What predicted times follow from; None: no times.

    Attributes:
        flops: Newton-Schulz flops per second of one rank.
        bandwidth: bytes per second that one rank receives.
        latency: seconds per collective or message.
    """

    flops: float
    bandwidth: float
    latency: float = 10e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Elements that a rank receives per optimizer step, without accumulation.

    Attributes:
        gradients, parameters: ZeRO's own legs, from the stage's formulas.
        exchange_mean, exchange_busiest: pieces of matrices, counted from the plan.
        seconds: predicted, of gradients, parameters and exchange at the given rates.
    """

    optimizer: str
    gradients: float
    parameters: float
    exchange_mean: float
    exchange_busiest: float
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One matrix: who holds it, who owns it and when it is its turn."""

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
        workspace_bytes: exchange buffers and iteration at their peak, per rank.
        communicator_bytes: estimate of what NCCL allocates for the exchange's connections.
        ns_seconds, exchange_seconds: predicted, on the critical path, at the given rates;
            Newton-Schulz by the measured table where there is one.
    """

    world_size: int
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
    adamw_state_bytes: int
    workspace_bytes: tuple[int, ...]
    communicator_bytes: int
    ns_seconds: float | None
    exchange_seconds: float | None
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is planned: a model's parameters under a configuration.

    Attributes:
        warning: what the routing says of itself, as a run would log it.
    """

    config: DMuonConfig
    spec: OrthoSpec
    settings: ZeroSettings
    table: RoutingTable
    low_precision: bool
    warning: str | None

    @property
    def muon(self) -> list[Route]:
        """Parameters that Muon trains."""
        return [r for r in self.table.routes.values() if r.is_muon]

    @property
    def matrix_numel(self) -> int:
        """Elements that Muon trains."""
        return sum(r.numel for r in self.muon)

    @property
    def rest_numel(self) -> int:
        """Elements that AdamW trains."""
        return sum(r.numel for r in self.table.routes.values()) - self.matrix_numel

    @property
    def momentum_bytes(self) -> int:
        """Bytes per element of momentum."""
        return {"fp32": 4, "bf16": 2}[self.config.momentum_dtype]

    def layouts(self, world_size: int) -> list[Layout]:
        """Predict ZeRO's layouts on `world_size` ranks."""
        group = [PlannedParameter(numel=r.numel, placements=r.placements) for r in self.muon]
        return predict_layouts([group] if group else [], self.settings, world_size=world_size)

    def plan(self, layout: Layout) -> Plan:
        """Plan a layout, for a device that has the compute dtype's instructions."""
        return plan_layout(layout, self.config, self.spec, storage=self.spec.compute_dtype)


def read_subject(model: nn.Module, ds_config: ConfigFile) -> Subject:
    """Route the model.

    Raises:
        ValueError: the configuration or the routing is invalid.
    """
    config = ds_config.params
    table = route_parameters(model, config)
    return Subject(
        config=config,
        spec=resolve(config),
        settings=ds_config.zero_settings,
        table=table,
        low_precision=ds_config.low_precision,
        warning=table.require_matrices(),
    )


def preview(
    subject: Subject, *, world_size: int, rates: Rates | None = None
) -> tuple[Preview, list[Plan]]:
    """Plan a run on `world_size` ranks."""
    plans = [subject.plan(layout) for layout in subject.layouts(world_size)]
    costs = sorted((c for p in plans for c in p.costs), reverse=True)
    mean = sum(costs) / world_size
    shared = costs[world_size - 1] + costs[world_size] if len(costs) > world_size else 0
    bound_terms = (mean, costs[0] if costs else 0, shared)
    span = sum(p.makespan() for p in plans)
    parts = world_size if subject.settings.stage else 1
    matrix_numel, rest_numel = subject.matrix_numel, subject.rest_numel
    # Counting the pieces of a large world takes a second; everything below reads these.
    loads = [plan.loads() for plan in plans]
    legs = [leg for plan, own in zip(plans, loads, strict=True) for leg in plan.legs(own)]
    per_rank = [max(b) for b in zip(*(p.peak_bytes() for p in plans), strict=True)]
    return Preview(
        world_size=world_size,
        stage=subject.settings.stage,
        num_matrices=len(costs),
        matrix_numel=matrix_numel,
        rest_numel=rest_numel,
        num_straddlers=sum(len(m.holders) > 1 for m in placed(plans)),
        num_buckets=sum(len(p.routes) for p in plans),
        exchange=tuple(sorted({p.exchange for p in plans})),
        padding_numel=max(sum(leg.padding[r] for leg in legs) for r in range(world_size)),
        makespan_over_mean=span / mean if mean else 1.0,
        makespan_over_bound=span / max(bound_terms) if max(bound_terms) else 1.0,
        bound_terms=bound_terms,
        traffic=traffic(subject, world_size, legs, rates),
        state_bytes=math.ceil(
            (matrix_numel * subject.momentum_bytes + rest_numel * 2 * _FP32) / parts
        ),
        adamw_state_bytes=math.ceil((matrix_numel + rest_numel) * 2 * _FP32 / parts),
        workspace_bytes=tuple(per_rank),
        communicator_bytes=communicator_bytes(plans, loads),
        ns_seconds=ns_seconds(plans, rates),
        exchange_seconds=exchange_seconds(subject, legs, rates) if rates else None,
        warnings=tuple(_warnings(subject, plans)),
    ), plans


def placed(plans: Sequence[Plan]) -> list[Placed]:
    """List all matrices; one that every rank holds whole has no holders to bring it together."""
    found = []
    for plan in plans:
        bucket = {i: n for n, route in enumerate(plan.routes) for i in route.matrices}
        for i, matrix in enumerate(plan.layout.matrices):
            holders = () if plan.layout.is_replicated(i) else plan.layout.holders(i)
            found.append(
                Placed(
                    name=matrix.name,
                    rows=matrix.rows,
                    cols=matrix.cols,
                    holders=holders,
                    owner=plan.owners[i],
                    bucket=bucket[i],
                )
            )
    return found


def ns_seconds(plans: Sequence[Plan], rates: Rates | None) -> float | None:
    """Predict Newton-Schulz on the critical path, if anything says how fast it runs."""
    if not plans:
        return None
    total = 0.0
    for plan in plans:
        unit = plan.unit_seconds or (1 / rates.flops if rates else None)
        if unit is None:
            return None
        total += plan.makespan() * unit
    return total


def communicator_bytes(plans: Sequence[Plan], loads: Sequence[Sequence[Load]]) -> int:
    """Estimate a rank's connections: to all it exchanges with, or to two in a ring."""
    peers = 0
    for plan, own in zip(plans, loads, strict=True):
        others = plan.layout.world_size - 1
        if plan.exchange in PERSONAL:
            busiest = max((n for load in own for n in load.peers_out), default=0)
            peers = max(peers, min(others, busiest))
        elif any(route.moving(way_in=False) for route in plan.routes):
            peers = max(peers, min(others, 2))
    return peers * 2 * _CONNECTION_BYTES


def exchange_seconds(subject: Subject, legs: Sequence[Leg], rates: Rates) -> float:
    """Predict the exchange of the busiest rank in each bucket and way; legs alternate in, out."""
    total = 0.0
    sizes = (subject.spec.wire_dtype.itemsize, subject.spec.compute_dtype.itemsize)
    for number, leg in enumerate(legs):
        nbytes = max(leg.received, default=0) * sizes[number % 2]
        total += nbytes / rates.bandwidth + max(leg.calls, default=0) * rates.latency
    return total


def traffic(
    subject: Subject, world_size: int, legs: Sequence[Leg], rates: Rates | None
) -> tuple[Traffic, ...]:
    """Elements per rank and step with U = (N - 1) / N of all parameters, DeepSpeed's defaults.

    Under accumulation ZeRO-3 gathers parameters, and ZeRO-2 and 3 reduce gradients, once per
    micro-batch; `reshard_after_forward: false` gathers matrices once per step.

    ZeRO-1/2 reduces gradients by all-reduce (2U) unless use_multi_rank_bucket_allreduce is false.
    The built-in Muon all-reduces whole gradients at stage 3 (2U), and gathers momentum and updates.
    """
    stage, share = subject.settings.stage, (world_size - 1) / world_size
    everything = share * (subject.matrix_numel + subject.rest_numel)
    matrices = share * subject.matrix_numel
    gradients = {0: 2, 1: 2, 2: 2, 3: 1}[stage] * everything
    parameters = {0: 0, 1: 1, 2: 1, 3: 2}[stage] * everything
    if stage == 3 and subject.config.reshard_after_forward is False:
        parameters -= matrices
    received = [sum(leg.received[r] for leg in legs) for r in range(world_size)]
    mean, busiest = sum(received) / world_size, float(max(received))
    others = 2 * everything if stage == 3 else parameters
    rows = [("AdamW", gradients, others, 0.0, 0.0)]
    rows.append(("DMuon", gradients, parameters, mean, busiest))
    if stage == 3:
        rows.append(("built-in Muon", 2 * everything, others, 2 * matrices, 2 * matrices))
    elif stage:
        rows.append(("built-in Muon", gradients, others, 0.0, 0.0))
    element = 2 if subject.low_precision else 4

    def zero_seconds(numel: float) -> float:
        return numel * element / rates.bandwidth if rates else 0.0

    steps = {"AdamW": 0.0, "built-in Muon": zero_seconds(rows[-1][-1])}
    steps["DMuon"] = exchange_seconds(subject, legs, rates) if rates else 0.0
    return tuple(
        Traffic(
            optimizer=name,
            gradients=g,
            parameters=p,
            exchange_mean=mean,
            exchange_busiest=busiest,
            seconds=zero_seconds(g + p) + steps[name] if rates else None,
        )
        for name, g, p, mean, busiest in rows
    )


def _warnings(subject: Subject, plans: Sequence[Plan]) -> list[str]:
    workspace_mb = subject.config.workspace_mb
    found = [subject.warning] if subject.warning else []
    found += [w for w in (p.oversize_warning(workspace_mb) for p in plans) if w]
    settings = subject.settings
    if settings.stage == 3 and len(plans) > 1:
        costs = [sum(p.costs) for p in plans]
        span = sum(p.makespan() for p in plans)
        world = plans[0].layout.world_size
        found.append(
            f"sub_group_size = {settings.sub_group_size:,} cuts the matrices into {len(plans)} "
            "sub-groups, each planned and exchanged by itself; owners balance within one only: "
            f"makespan {span * world / sum(costs):.3f} x the mean; a larger one makes one sub-group"
        )
    return found
