# SPDX-License-Identifier: Apache-2.0
"""Attach: build the base optimizer for an engine, and bind it to the leaves ZeRO made of it.

Owns: the two moments around DeepSpeed's own wrapping. Both end in an agreement of all ranks, so
that a problem on one rank stops every rank with a clear error instead of a hang.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_muon.checkpoint import CheckpointHeader
from ds_muon.comm.agreement import require_agreement
from ds_muon.comm.strategies import warm_up
from ds_muon.config import DMuonConfig, parse
from ds_muon.groups import RoutedGroup, build_groups, group_tags, incoming_groups
from ds_muon.log import say
from ds_muon.optimizer import MUON, Binding, MatrixOwnerOptimizer
from ds_muon.ortho.newton_schulz import arithmetic_for
from ds_muon.ortho.recipes import OrthoSpec, resolve
from ds_muon.plan.plan import Plan
from ds_muon.planning import MIB, plan_layout, plan_replicas
from ds_muon.routing import RoutingTable, clean_name, route_parameters
from ds_muon.run.step import StepEngine
from ds_muon.zero import seams
from ds_muon.zero.hidden_gather import HiddenGather
from ds_muon.zero.hsdp import Replication, SettledSteps
from ds_muon.zero.leaves import Leaf, LeafSet, read_leaf_sets
from ds_muon.zero.lifetime import set_lifetime
from ds_muon.zero.mesh import Mesh, make_mesh, require_shard_size
from ds_muon.zero.observe import recorder_for, verifier_for
from ds_muon.zero.support import refuse_unsupported

_COMPARED_SECTIONS = (
    "zero_optimization",
    "fp16",
    "bf16",
    "data_types",
    "gradient_clipping",
    "gradient_accumulation_steps",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What was decided before DeepSpeed wrapped the optimizer.

    Attributes:
        transport: over all ranks.
        mesh: rows and columns of HSDP.
    """

    config: DMuonConfig
    spec: OrthoSpec
    groups: tuple[RoutedGroup, ...]
    transport: seams.DeepSpeedTransport
    mesh: Mesh | None = None

    @property
    def row(self) -> seams.DeepSpeedTransport:
        """Transport over the ranks that ZeRO partitions over."""
        return self.transport if self.mesh is None else self.mesh.row

    def matrices(self) -> list[torch.nn.Parameter]:
        """Parameters that Muon trains."""
        return [p for p, _ in self.named_matrices().values()]

    def named_matrices(self) -> dict[str, tuple[torch.nn.Parameter, frozenset[str]]]:
        """Parameters that Muon trains, by name, each with the names of its matrices."""
        return {
            route.name: (parameter, frozenset(p.matrix.name for p in route.placements))
            for group in self.groups
            if group.kind == MUON
            for parameter, route in zip(group.parameters, group.routes, strict=True)
        }


def build_optimizer(engine: Any, model_parameters: Iterable[Any]) -> MatrixOwnerOptimizer:
    """Parse, refuse, route and group; then agree with all ranks.

    Raises:
        ValueError: the configuration, the model or the regime cannot be honoured.
        RuntimeError: another rank failed, or ranks differ.
    """
    transport = seams.DeepSpeedTransport()
    facts: dict[str, str] = {}
    problem, prepared = None, None
    try:
        prepared, table = _prepare(engine, model_parameters, transport, facts)
    except Exception as error:  # shown to every rank, then raised
        problem = error
    require_agreement(transport, facts, problem=problem)
    if prepared is None:
        raise AssertionError("agreement passed a rank with a problem")
    warning = table.require_matrices()
    say(f"routing, recipe {prepared.config.recipe}\n{table.report()}", rank=transport.rank)
    if warning:
        say(warning, rank=transport.rank, level=logging.WARNING)
    optimizer = MatrixOwnerOptimizer([g.as_param_group() for g in prepared.groups], prepared.config)
    mesh = make_mesh(prepared.config.hsdp, transport.world_size)
    optimizer.preparation = replace(prepared, mesh=mesh)
    return optimizer


def _prepare(
    engine: Any,
    model_parameters: Iterable[Any],
    transport: seams.DeepSpeedTransport,
    facts: dict[str, str],
) -> tuple[Preparation, RoutingTable]:
    for package in ("ds_muon", "deepspeed", "torch"):
        facts[f"{package} version"] = version(package)
    config = parse(engine.optimizer_params())
    facts.update((f"optimizer.params.{k}", repr(v)) for k, v in config)
    written = seams.user_config(engine)
    facts.update((key, repr(written.get(key))) for key in _COMPARED_SECTIONS)
    refuse_unsupported(engine, config)
    require_shard_size(config.hsdp, transport.world_size)
    spec = resolve(config)
    device = torch.device(get_accelerator().current_device_name())
    facts["arithmetic"] = repr(arithmetic_for(spec, device))
    incoming = incoming_groups(model_parameters)
    table = route_parameters(engine.module, config, group_tags(incoming))
    table.require_matrices()
    facts["routing"] = _digest(table)
    names = {id(p): clean_name(name) for name, p in engine.module.named_parameters()}
    groups = build_groups(incoming, names, table, config)
    prepared = Preparation(config=config, spec=spec, groups=groups, transport=transport)
    return prepared, table


def bind_optimizer(engine: Any, optimizer: MatrixOwnerOptimizer) -> None:
    """Read the leaves that DeepSpeed made, plan, agree with all ranks, and bind.

    Raises:
        RuntimeError: a layout that is not what it should be, on this rank or another.
    """
    prepared: Preparation = optimizer.preparation
    config, mesh, problem = prepared.config, prepared.mesh, None
    sets: tuple[LeafSet, ...] = ()
    rows: list[tuple[Plan, ...]] = []
    try:
        sets = read_leaf_sets(engine, prepared.groups, prepared.row)
        rows = [_plan(s, prepared) for s in sets if s.kind == MUON]
    except Exception as error:  # shown to every rank, then raised
        problem = error
    digests = {str(i): "".join(p.digest() for p in row) for i, row in enumerate(rows)}
    facts = {f"plan of leaf set {i}": digest for i, digest in digests.items()}
    require_agreement(prepared.transport, {"plans": str(len(rows)), **facts}, problem=problem)
    plans = [row[0 if mesh is None else mesh.replica] for row in rows]
    device = torch.device(get_accelerator().current_device_name())
    free = seams.free_bytes(device)
    for exchange in sorted({plan.exchange for plan in plans}):
        warm_up(exchange, prepared.row, device)
    communicator = free - seams.free_bytes(device)
    replication = None
    if mesh is not None and config.hsdp is not None:
        replication = Replication(
            engine, mesh, config, config.hsdp, prepared.spec, sets, rows, device=device
        )
    step_engine = StepEngine(
        prepared.row,
        prepared.spec,
        plans,
        device=device,
        inflight=config.max_inflight_buckets,
        keep_buffers=config.preallocate_workspace,
        publisher=None if replication is None else replication.publisher,
    )
    optimizer.bind(_binding(engine, prepared, sets, step_engine, replication))
    _correct_wrapper(engine)
    if replication is not None:
        replication.install(optimizer, prepared.transport, prepared.named_matrices())
    _schedule_parameters(engine, prepared)
    say(_describe(plans, step_engine, prepared, communicator), rank=prepared.transport.rank)
    for plan in plans:
        warning = plan.oversize_warning(config.workspace_mb)
        if warning:
            say(warning, rank=prepared.transport.rank, level=logging.WARNING)


def _binding(
    engine: Any,
    prepared: Preparation,
    sets: Sequence[LeafSet],
    step_engine: StepEngine,
    replication: Replication | None,
) -> Binding:
    config = prepared.config
    masters = {_contents(leaf): leaf.tensor for s in sets for leaf in s.leaves}
    settling: tuple[SettledSteps, ...] = ()
    gathers_in_step = int(engine.zero_optimization_stage()) < 3 and not config.hide_param_gather
    if replication is not None and (gathers_in_step or config.verify_every):
        settling = (SettledSteps(replication.publisher),)
    return Binding(
        engine=step_engine,
        leaf_sets=tuple(s.tensors for s in sets if s.kind == MUON),
        adamw_leaves=tuple(t for s in sets if s.kind != MUON for t in s.tensors),
        header=_header(engine, prepared, sets),
        spread=None if replication is None else replication.spread,
        recorder=recorder_for(engine, step_engine, prepared.transport, config),
        verifier=verifier_for(
            engine, step_engine, prepared.transport, config, prepared.spec, masters
        ),
        observers=settling,
    )


def _contents(leaf: Leaf) -> str:
    """Name a leaf by the parameters in it on this rank."""
    names = list(dict.fromkeys(piece.name for piece in leaf.slices)) or ["padding only"]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} (a leaf of {leaf.tensor.numel():,} elements)"


def _plan(leaf_set: LeafSet, prepared: Preparation) -> tuple[Plan, ...]:
    """Plan a leaf set for every replica; there is one without HSDP."""
    if leaf_set.layout is None:
        raise AssertionError("a Muon leaf set without a layout")
    device = torch.device(get_accelerator().current_device_name())
    storage = arithmetic_for(prepared.spec, device).storage
    layout, config, spec = leaf_set.layout, prepared.config, prepared.spec
    if prepared.mesh is None:
        return (plan_layout(layout, config, spec, storage=storage),)
    replicas = prepared.mesh.replicas
    return plan_replicas(layout, config, spec, storage=storage, replicas=replicas)


def _correct_wrapper(engine: Any) -> None:
    wrapper = engine.optimizer
    if wrapper is engine.basic_optimizer:
        seams.record_clipped_norm(engine)
        return
    if engine.fp16_enabled():
        seams.update_loss_scale_after_step(wrapper)
        if isinstance(wrapper, FP16_UnfusedOptimizer):
            seams.scale_loss_without_zero(engine)
    if isinstance(wrapper, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        seams.link_states(wrapper)


def _schedule_parameters(engine: Any, prepared: Preparation) -> None:
    """Give parameters the lifetimes and the gather that the configuration asks for."""
    config = prepared.config
    if config.reshard_after_forward is not None:
        set_lifetime(engine.optimizer, prepared.matrices(), reshard=config.reshard_after_forward)
    if config.hide_param_gather and prepared.transport.world_size > 1:
        if not isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
            raise ValueError(
                "optimizer.params.hide_param_gather hides the gather of ZeRO-1/2's own optimizer, "
                f"and this configuration makes a {type(engine.optimizer).__name__}; remove the key "
                "or data_types.grad_accum_dtype"
            )
        HiddenGather(engine, seams.DeepSpeedTransport("parameters"))


def _header(engine: Any, prepared: Preparation, sets: Sequence[LeafSet]) -> CheckpointHeader:
    wrapper = engine.optimizer
    spec = prepared.spec
    return CheckpointHeader(
        world_size=prepared.row.world_size,
        rank=prepared.row.rank,
        stage=int(engine.zero_optimization_stage()),
        wrapper="BF16_Optimizer"
        if isinstance(wrapper, BF16_Optimizer)
        else "ZeRO"
        if engine.zero_optimization()
        else "none",
        recipe={
            "name": prepared.config.recipe,
            "momentum_dtype": prepared.config.momentum_dtype,
            "compute_dtype": str(spec.compute_dtype),
            "wire_dtype": str(spec.wire_dtype),
            "nesterov": spec.nesterov,
            "lr_scale": spec.lr_scale,
            "steps": len(spec.triples),
        },
        slices={id(leaf.tensor): leaf.slices for s in sets for leaf in s.leaves},
    )


def _describe(
    plans: Sequence[Plan], engine: StepEngine, prepared: Preparation, communicator: int
) -> str:
    """Say in a few words what the matrix half will do per step."""
    world_size = prepared.row.world_size
    matrices = sum(len(p.layout.matrices) for p in plans)
    loads = [sum(flops) for flops in zip(*(p.owner_flops() for p in plans), strict=True)]
    received = [sum(numels) for numels in zip(*(p.received_numel() for p in plans), strict=True)]
    balance = max(loads) * world_size / sum(loads) if sum(loads) else 1.0
    chosen = ", ".join(sorted({p.exchange for p in plans})) or "nothing"
    why = "least predicted bytes and calls" if prepared.config.exchange == "auto" else "as asked"
    return (
        f"plan: {matrices} matrices in {sum(len(p.routes) for p in plans)} buckets, exchange by "
        f"{chosen} ({why}), busiest owner {balance:.2f} x the mean; per step a rank receives "
        f"{sum(received) / world_size:,.0f} elements on average, {max(received, default=0):,} at "
        f"most; exchange and iteration hold {engine.arena.nbytes / MIB:.1f} MiB here"
        + (f", the communicator {communicator / MIB:.0f} MiB" if communicator else "")
    )


def _digest(table: RoutingTable) -> str:
    text = repr(sorted((r.name, r.shape, r.placements) for r in table.routes.values()))
    muon = sum(r.is_muon for r in table.routes.values())
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{muon} of {len(table.routes)} parameters on Muon, {digest}"
