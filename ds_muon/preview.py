# SPDX-License-Identifier: Apache-2.0
"""Preview: what a run would do, from a ds_config and a model on the meta device; no ranks, no GPU.

Owns: the numbers of `ds_muon plan` as one record; cli.py prints them.
Never does: import DeepSpeed, or hold weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ds_muon.config import DMuonConfig, parse
from ds_muon.ortho.recipes import resolve
from ds_muon.plan.plan import Plan
from ds_muon.plan.predict import PlannedParameter, ZeroSettings, predict_layouts
from ds_muon.planning import plan_layout
from ds_muon.routing import Route, RoutingTable, route_parameters

_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Elements that a rank receives per optimizer step, without accumulation.

    Attributes:
        gradients, parameters: ZeRO's own legs, from the stage's formulas.
        exchange_mean, exchange_busiest: pieces of matrices, counted from the plan.
    """

    optimizer: str
    gradients: float
    parameters: float
    exchange_mean: float
    exchange_busiest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The plan of a run in numbers.

    Attributes:
        makespan_over_mean: sum over buckets of the busiest owner's flops, over the mean.
        bound_terms: lower bounds of the same for whole matrices: the mean, the largest matrix, and
            the two that must share a rank when there are more matrices than ranks.
        state_bytes: optimizer state per rank: momentum, and AdamW's two moments.
        workspace_bytes: exchange buffers and iteration at their peak, largest over ranks.
    """

    world_size: int
    stage: int
    num_matrices: int
    matrix_numel: int
    rest_numel: int
    num_straddlers: int
    num_buckets: int
    exchange: tuple[str, ...]
    makespan_over_mean: float
    makespan_over_bound: float
    bound_terms: tuple[float, float, float]
    traffic: tuple[Traffic, ...]
    state_bytes: int
    adamw_state_bytes: int
    workspace_bytes: int
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, for JSON."""
        return asdict(self)


def preview(
    model: nn.Module, ds_config: Mapping[str, Any], *, world_size: int
) -> tuple[Preview, RoutingTable, list[Plan]]:
    """Plan a run of `model` on `world_size` ranks.

    Raises:
        ValueError: the configuration or the routing is invalid.
    """
    config = parse(ds_config.get("optimizer", {}).get("params"))
    spec = resolve(config)
    table = route_parameters(model, config)
    table.require_matrices()
    settings = zero_settings(ds_config)
    muon = [r for r in table.routes.values() if r.is_muon]
    group = [PlannedParameter(numel=r.numel, placements=r.placements) for r in muon]
    layouts = predict_layouts([group] if group else [], settings, world_size=world_size)
    plans = [plan_layout(layout, config, spec, storage=spec.compute_dtype) for layout in layouts]
    return _summary(config, table, muon, settings, plans, world_size), table, plans


def zero_settings(ds_config: Mapping[str, Any]) -> ZeroSettings:
    """Read what decides the layout from ds_config.json."""
    zero = ds_config.get("zero_optimization", {})
    low = any(ds_config.get(k, {}).get("enabled") for k in ("bf16", "fp16"))
    aligned = 16 // (2 if low else 4) if zero.get("parameter_alignment") else 1
    size = zero.get("sub_group_size", 10**9)
    return ZeroSettings(
        stage=int(zero.get("stage", 0)),
        round_robin_gradients=bool(zero.get("round_robin_gradients", False)),
        parameter_alignment=aligned,
        sub_group_size=int(float(size)) if size != "auto" else 10**9,
    )


def _summary(
    config: DMuonConfig,
    table: RoutingTable,
    muon: Sequence[Route],
    settings: ZeroSettings,
    plans: Sequence[Plan],
    world_size: int,
) -> Preview:
    matrix_numel = sum(r.numel for r in muon)
    rest_numel = sum(r.numel for r in table.routes.values()) - matrix_numel
    flops = sorted((f for p in plans for f in p.flops), reverse=True)
    mean = sum(flops) / world_size
    shared = flops[world_size - 1] + flops[world_size] if len(flops) > world_size else 0
    bound_terms = (mean, flops[0] if flops else 0, shared)
    span = sum(p.makespan() for p in plans)
    parts = world_size if settings.stage else 1
    momentum = {"fp32": 4, "bf16": 2}[config.momentum_dtype]
    straddlers = sum(
        len(p.layout.holders(i)) > 1 and not p.layout.is_replicated(i)
        for p in plans
        for i in range(len(p.owners))
    )
    return Preview(
        world_size=world_size,
        stage=settings.stage,
        num_matrices=len(flops),
        matrix_numel=matrix_numel,
        rest_numel=rest_numel,
        num_straddlers=straddlers,
        num_buckets=sum(len(p.routes) for p in plans),
        exchange=tuple(sorted({p.exchange for p in plans})),
        makespan_over_mean=span / mean if mean else 1.0,
        makespan_over_bound=span / max(bound_terms) if max(bound_terms) else 1.0,
        bound_terms=bound_terms,
        traffic=traffic(settings.stage, world_size, matrix_numel, rest_numel, plans),
        state_bytes=math.ceil((matrix_numel * momentum + rest_numel * 2 * _FP32) / parts),
        adamw_state_bytes=math.ceil((matrix_numel + rest_numel) * 2 * _FP32 / parts),
        workspace_bytes=max((max(p.peak_bytes()) for p in plans), default=0),
        warnings=tuple(_warnings(config, settings, plans)),
    )


def traffic(
    stage: int, world_size: int, matrix_numel: int, rest_numel: int, plans: Sequence[Plan]
) -> tuple[Traffic, ...]:
    """Elements per rank and step with U = (N - 1) / N of all parameters, DeepSpeed's defaults.

    ZeRO-1/2 reduces gradients by all-reduce (2U) unless use_multi_rank_bucket_allreduce is false.
    The built-in Muon all-reduces whole gradients at stage 3 (2U), and gathers momentum and updates.
    """
    share = (world_size - 1) / world_size
    everything, matrices = share * (matrix_numel + rest_numel), share * matrix_numel
    gradients = {0: 2, 1: 2, 2: 2, 3: 1}[stage] * everything
    parameters = {0: 0, 1: 1, 2: 1, 3: 2}[stage] * everything
    received = [sum(n) for n in zip(*(p.received_numel() for p in plans), strict=True)] or [0]
    rows = [
        ("AdamW", gradients, parameters, 0.0, 0.0),
        (
            "DMuon",
            gradients,
            parameters,
            sum(received) / world_size,
            float(max(received)),
        ),
    ]
    if stage:
        built_in = (2 * everything, parameters, 2 * matrices, 2 * matrices)
        rows.append(("built-in Muon", *(built_in if stage == 3 else (gradients, parameters, 0, 0))))
    return tuple(
        Traffic(
            optimizer=name,
            gradients=g,
            parameters=p,
            exchange_mean=mean,
            exchange_busiest=busiest,
        )
        for name, g, p, mean, busiest in rows
    )


def _warnings(config: DMuonConfig, settings: ZeroSettings, plans: Sequence[Plan]) -> list[str]:
    found = [w for w in (p.oversize_warning(config.workspace_mb) for p in plans) if w]
    if settings.stage == 3 and len(plans) > 1:
        found.append(
            f"sub_group_size = {settings.sub_group_size:,} cuts the matrices into {len(plans)} "
            "sub-groups, each planned and exchanged by itself; owners balance within one only"
        )
    return found
