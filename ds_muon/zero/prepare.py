# SPDX-License-Identifier: Apache-2.0
"""Prepare: build the base optimizer for an engine, before DeepSpeed wraps it.

Owns: what is decided then, and its agreement over all ranks, so that a problem on one rank stops
every rank with a clear error instead of a hang.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_muon.attention.find import Attention, find_attention
from ds_muon.comm.agreement import require_agreement
from ds_muon.config import DMuonConfig, parse
from ds_muon.groups import RoutedGroup, build_groups, group_tags, incoming_groups
from ds_muon.log import say
from ds_muon.optimizer import MUON, MatrixOwnerOptimizer
from ds_muon.ortho.arithmetic import arithmetic_for
from ds_muon.ortho.backends import Backend, choose_backend
from ds_muon.ortho.recipes import OrthoSpec, resolve
from ds_muon.routing import Route, RoutingTable, clean_name, route_parameters
from ds_muon.zero.hsdp.mesh import Mesh, make_mesh, require_own_groups, require_shard_size
from ds_muon.zero.offload import require_offload
from ds_muon.zero.seams import parsed_config, require_instances, user_config, version_warning
from ds_muon.zero.support import refuse_unsupported
from ds_muon.zero.transport import DeepSpeedTransport

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
        backend: how Newton-Schulz runs.
        transport: over all ranks.
        mesh: rows and columns of HSDP.
        attention: modules whose heads QK-clip scales.
    """

    config: DMuonConfig
    spec: OrthoSpec
    backend: Backend
    groups: tuple[RoutedGroup, ...]
    transport: DeepSpeedTransport
    mesh: Mesh | None = None
    attention: tuple[Attention, ...] = ()

    @property
    def row(self) -> DeepSpeedTransport:
        """Transport over the ranks that ZeRO partitions over."""
        return self.transport if self.mesh is None else self.mesh.row

    def row_transport(self, purpose: str) -> DeepSpeedTransport:
        """A transport like `row` on a communicator of its own."""
        rows = None if self.mesh is None else self.mesh.rows
        return DeepSpeedTransport(purpose, rows)

    @property
    def hides_gather(self) -> bool:
        """Whether ZeRO-1/2's gather moves into the next forward; one rank gathers nothing."""
        return self.config.hide_param_gather and self.row.world_size > 1

    def matrices(self) -> list[tuple[torch.nn.Parameter, Route]]:
        """Parameters that Muon trains."""
        return [
            pair
            for group in self.groups
            if group.kind == MUON
            for pair in zip(group.parameters, group.routes, strict=True)
        ]


def build_optimizer(engine: Any, model_parameters: Iterable[Any]) -> MatrixOwnerOptimizer:
    """Parse, refuse, route and group; then agree with all ranks.

    Raises:
        ValueError: the configuration, the model or the regime cannot be honoured.
        RuntimeError: another rank failed, or ranks differ.
    """
    transport = DeepSpeedTransport()
    facts: dict[str, str] = {}
    problem, prepared = None, None
    try:
        prepared, table = _prepare(engine, model_parameters, transport, facts)
    except Exception as error:  # shown to every rank, then raised
        problem = error
    require_agreement(transport, facts, problem=problem)
    if prepared is None:
        raise AssertionError("agreement passed a rank with a problem")
    warnings = [table.require_matrices(), version_warning(version("deepspeed"))]
    say(f"routing, recipe {prepared.config.recipe}\n{table.report()}", rank=transport.rank)
    if prepared.backend.name != Backend.name:
        name = prepared.backend.name
        say(f"ns_backend {name}: updates of every shape are eager's", rank=transport.rank)
    if prepared.spec.compute_dtype != prepared.spec.update_dtype:
        lacking = str(prepared.spec.update_dtype).removeprefix("torch.")
        say(f"Newton-Schulz in fp32: no {lacking} products on this CPU", rank=transport.rank)
    for warning in filter(None, warnings):
        say(warning, rank=transport.rank, level=logging.WARNING)
    optimizer = MatrixOwnerOptimizer([g.as_param_group() for g in prepared.groups], prepared.config)
    mesh = make_mesh(prepared.config.hsdp, transport.world_size)
    optimizer.preparation = replace(prepared, mesh=mesh)
    return optimizer


def _prepare(
    engine: Any,
    model_parameters: Iterable[Any],
    transport: DeepSpeedTransport,
    facts: dict[str, str],
) -> tuple[Preparation, RoutingTable]:
    require_instances(engine, parsed_config(engine))
    for package in ("ds_muon", "deepspeed", "torch"):
        facts[f"{package} version"] = version(package)
    config = parse(engine.optimizer_params())
    facts.update((f"optimizer.params.{k}", repr(v)) for k, v in config)
    written = user_config(engine)
    facts.update((key, repr(written.get(key))) for key in _COMPARED_SECTIONS)
    refuse_unsupported(engine, config)
    require_shard_size(config.hsdp, transport.world_size)
    require_own_groups(config.hsdp, int(engine.zero_optimization_stage()))
    require_offload(engine)
    device = torch.device(get_accelerator().current_device_name())
    spec = resolve(config, device)
    facts["products of this hardware (unequal ones agree on ns_dtype fp32)"] = repr(
        arithmetic_for(spec, device)
    )
    incoming = incoming_groups(model_parameters)
    table = route_parameters(engine.module, config, group_tags(incoming))
    table.require_matrices()
    facts["routing"] = _digest(table)
    matrices = [p.matrix for r in table.routes.values() for p in r.placements]
    backend = choose_backend(
        config.ns_backend,
        spec,
        device,
        {(m.rows, m.cols) for m in matrices},
        keeps_memory=config.preallocate_workspace,
    )
    names = {id(p): clean_name(name) for name, p in engine.module.named_parameters()}
    groups = build_groups(incoming, names, table, config)
    attention = () if config.qk_clip is None else find_attention(engine.module)
    facts["attention heads"] = str([(a.heads.name, a.heads.heads, a.heads.keys) for a in attention])
    prepared = Preparation(
        config=config,
        spec=spec,
        backend=backend,
        groups=groups,
        transport=transport,
        attention=attention,
    )
    return prepared, table


def _digest(table: RoutingTable) -> str:
    text = repr(sorted((r.name, r.shape, r.placements) for r in table.routes.values()))
    muon = sum(r.is_muon for r in table.routes.values())
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{muon} of {len(table.routes)} parameters on Muon, {digest}"
