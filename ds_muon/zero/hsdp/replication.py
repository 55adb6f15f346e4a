# SPDX-License-Identifier: Apache-2.0
"""HSDP: replicas of one ZeRO partitioning, put together from plans, reductions and publishing.

Owns: what one rank of the mesh needs beside its row's step engine, and its hooks in DeepSpeed:
mesh.py partitions over rows, step.py overrides the step, publication.py says who waits, state.py
keeps checkpoints and accessors whole, gathered.py keeps replicas equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch.nn import Parameter

from ds_muon.comm.transport import Transport
from ds_muon.config import DMuonConfig, HsdpConfig
from ds_muon.optimizer import MOMENTUM_DTYPES, MUON, MatrixOwnerOptimizer
from ds_muon.ortho.recipes import OrthoSpec
from ds_muon.plan.plan import Plan
from ds_muon.plan.replicas import held, messages, reductions
from ds_muon.planning import MIB
from ds_muon.routing import Route
from ds_muon.run.momentum import SpreadMomentum
from ds_muon.run.publish import Publisher
from ds_muon.zero.hsdp import gathered
from ds_muon.zero.hsdp.mesh import Mesh
from ds_muon.zero.hsdp.publication import low_precision_copies, settle_before_reads
from ds_muon.zero.hsdp.state import (
    offload_with_states,
    pieces_of,
    share_flat_accessors,
    share_zero3_accessors,
    write_one_replica,
)
from ds_muon.zero.hsdp.step import ReplicatedStep
from ds_muon.zero.leaves import LeafSet
from ds_muon.zero.seams import override, private
from ds_muon.zero.wrapping import after, before

_FP32 = 4


class Replication:
    """This rank's part in the replication of one engine.

    Args:
        hsdp: as configured.
        sets: leaves of ZeRO's optimizer, in its order.
        rows: per leaf set of the matrix half, every replica's plan.
    """

    def __init__(
        self,
        engine: Any,
        mesh: Mesh,
        config: DMuonConfig,
        hsdp: HsdpConfig,
        spec: OrthoSpec,
        sets: Sequence[LeafSet],
        rows: Sequence[Sequence[Plan]],
        *,
        device: torch.device,
    ) -> None:
        self._engine, self._mesh, self._rows, self._sets = engine, mesh, rows, sets
        self._config = config
        muon = [(n, s.tensors[0]) for n, s in enumerate(sets) if s.kind == MUON]
        self.spread = SpreadMomentum(
            mesh.column,
            mesh.shard,
            rows,
            [leaf.numel() for _, leaf in muon],
            dtype=MOMENTUM_DTYPES[config.momentum_dtype],
            device=muon[0][1].device if muon else device,
        )
        self.publisher = Publisher(
            mesh.publishing,
            spec,
            [messages(of_leaf, mesh.shard) for of_leaf in rows],
            device=device,
            arrived=low_precision_copies(engine.optimizer, muon, mesh.shard),
            hidden=hsdp.publish == "async",
        )

    def install(
        self,
        optimizer: MatrixOwnerOptimizer,
        world: Transport,
        parameters: Sequence[tuple[Parameter, Route]],
    ) -> None:
        """Hook the engine.

        Args:
            parameters: that Muon trains, each with its route.
        """
        engine, zero = self._engine, self._engine.optimizer
        ReplicatedStep(
            zero,
            self._mesh,
            [parameter for parameter, _ in parameters],
            reductions=self._reductions(),
            publisher=self.publisher,
            world=world,
        )
        slices = [s.leaves[0].slices for s in self._sets if s.kind == MUON]
        pieces = pieces_of(self.spread, slices, {id(p): route.name for p, route in parameters})
        offload_with_states(engine, self.spread)
        if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            share_zero3_accessors(zero, world, pieces)
            gathered.install()
        else:
            hook = self._flat_hook(world, pieces)
            hook()
            # Reloading offloaded states binds the accessors anew.
            link = private(zero, "_link_all_hp_params")
            override(zero, "_link_all_hp_params", after(link, hook))
        matrices = {
            id(p): frozenset(placement.matrix.name for placement in route.placements)
            for p, route in parameters
        }
        settle_before_reads(engine, self.publisher, matrices)
        write_one_replica(engine, self._mesh, optimizer)

    @property
    def hidden(self) -> bool:
        """See hidden_gather.Publication."""
        return self.publisher.hidden

    def awaited(self, group: int, source: int, start: int, numel: int) -> frozenset[str]:
        """See hidden_gather.Publication; `start` is in ZeRO-1/2's flat buffer of a group."""
        leaf_set = self._sets[group]
        if leaf_set.kind != MUON:
            return frozenset()
        rows = self._rows[sum(s.kind == MUON for s in self._sets[:group])]
        first = start - source * leaf_set.tensors[0].numel()
        return frozenset(
            row.layout.matrices[index].name
            for replica, row in enumerate(rows)
            if replica != self._mesh.replica
            for index, piece in held(row, source)
            if piece.place.start < first + numel and first < piece.place.stop
        )

    def settle(self, names: frozenset[str]) -> None:
        """See hidden_gather.Publication."""
        self.publisher.settle(names)

    def _reductions(self) -> list[Any]:
        rows = iter(self._rows)
        return [
            reductions(
                next(rows) if s.kind == MUON else None,
                self._mesh.shard,
                leaf_numel=s.tensors[0].numel(),
                # Two chunks are under way at a time.
                chunk_numel=self._config.workspace_mb * MIB // (2 * _FP32),
            )
            for s in self._sets
        ]

    def _flat_hook(self, world: Transport, pieces: Any) -> Callable[[], None]:
        def hook() -> None:
            for parameter in self._engine.module.parameters():
                if not hasattr(parameter, "get_full_hp_param"):
                    continue
                share_flat_accessors(parameter, world, pieces)
                for name in ("get_full_hp_param", "set_full_hp_param"):
                    reader = before(getattr(parameter, name), self.publisher.settle)
                    setattr(parameter, name, reader)

        return hook


class SettledSteps:
    """Observes steps of the base optimizer, and applies all updates at the end of each.

    For ZeRO-1/2, which gathers all weights after the last leaf, and for observers that hash them.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def begin(self) -> None:
        """See Observer."""

    def finish(self) -> None:
        """See Observer."""
        self._publisher.settle()
