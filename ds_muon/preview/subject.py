# SPDX-License-Identifier: Apache-2.0
"""Subject: what is planned, a model's parameters under a configuration, laid out and planned.

Owns: the plans of a run on a number of ranks, in one row or in the rows of HSDP.
Never does: import DeepSpeed, or hold weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from ds_muon.config import DMuonConfig
from ds_muon.ortho.recipes import OrthoSpec, resolve
from ds_muon.plan.layout import Layout
from ds_muon.plan.plan import Plan
from ds_muon.plan.predict import PlannedParameter, ZeroSettings, predict_layouts
from ds_muon.planning import plan_run
from ds_muon.preview.config_file import ConfigFile, Offload
from ds_muon.routing import Route, RoutingTable, route_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """The plans of one run; rank = replica * shard_size + place in the row.

    Attributes:
        shard_size: ranks that ZeRO partitions over.
        hidden: whether rows meet in the next step only; otherwise at every set of leaves.
        sets: per set of leaves that is stepped together, the plan of every replica.
    """

    shard_size: int
    replicas: int
    hidden: bool
    sets: tuple[tuple[Plan, ...], ...]

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.shard_size * self.replicas

    @property
    def plans(self) -> list[Plan]:
        """All plans."""
        return [plan for rows in self.sets for plan in rows]

    def row(self, replica: int) -> list[Plan]:
        """Plans that one replica runs, one after another."""
        return [rows[replica] for rows in self.sets]

    def per_rank(self, numbers: Callable[[Plan], Sequence[int]]) -> list[list[int]]:
        """Numbers of every rank, one for each plan it runs."""
        found: list[list[int]] = [[] for _ in range(self.world_size)]
        for rows in self.sets:
            for replica, plan in enumerate(rows):
                for place, number in enumerate(numbers(plan)):
                    found[replica * self.shard_size + place].append(number)
        return found

    def makespan(self) -> int:
        """Cost on the critical path; rows run beside each other."""
        spans = [[plan.makespan() for plan in rows] for rows in self.sets]
        if self.hidden:
            return max((sum(of_row) for of_row in zip(*spans, strict=True)), default=0)
        return sum(max(of_set) for of_set in spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is planned: a model's parameters under a configuration.

    Attributes:
        gradient_legs: U that DMuon's gradients cost at this stage.
        warning: what the routing says of itself, as a run would log it.
    """

    config: DMuonConfig
    spec: OrthoSpec
    settings: ZeroSettings
    gradient_legs: int
    table: RoutingTable
    low_precision: bool
    gradient_bytes: int
    offload: Offload
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
    def weight_bytes(self) -> int:
        """Bytes per element of the model's weights."""
        return 2 if self.low_precision else 4

    @property
    def momentum_bytes(self) -> int:
        """Bytes per element of momentum."""
        return {"fp32": 4, "bf16": 2}[self.config.momentum_dtype]

    def layouts(self, world_size: int) -> list[Layout]:
        """Predict ZeRO's layouts on `world_size` ranks."""
        group = [PlannedParameter(numel=r.numel, placements=r.placements) for r in self.muon]
        return predict_layouts([group] if group else [], self.settings, world_size=world_size)

    def shard_size(self, world_size: int) -> int:
        """Ranks that ZeRO partitions over, as the configuration says.

        Raises:
            ValueError: rows of that size do not fill the world.
        """
        size = world_size if self.config.hsdp is None else self.config.hsdp.shard_size
        if world_size % size:
            raise ValueError(
                f"optimizer.params.hsdp.shard_size = {size} must divide --world-size {world_size}"
            )
        return size

    def plan(self, world_size: int, shard_size: int) -> PlannedRun:
        """Plan a run, for a device that has the compute dtype's instructions."""
        replicas = world_size // shard_size
        sets = plan_run(
            self.layouts(shard_size),
            self.config,
            self.spec,
            storage=self.spec.compute_dtype,
            replicas=replicas,
        )
        hidden = self.config.hsdp is None or self.config.hsdp.publish == "async"
        return PlannedRun(shard_size=shard_size, replicas=replicas, hidden=hidden, sets=sets)


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
        gradient_legs=_gradient_legs(ds_config),
        table=table,
        low_precision=ds_config.low_precision,
        gradient_bytes=ds_config.gradient_bytes,
        offload=ds_config.offload,
        warning=table.require_matrices(),
    )


def _gradient_legs(ds_config: ConfigFile) -> int:
    """One where every gradient goes to its rank only, two where all ranks receive it."""
    stage = ds_config.zero_optimization.stage
    to_its_rank = stage == 3 or (stage in (1, 2) and ds_config.own_reduction is None)
    return 1 if to_its_rank else 2
