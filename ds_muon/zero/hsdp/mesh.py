# SPDX-License-Identifier: Apache-2.0
"""Mesh: the process groups of HSDP, and ZeRO partitioning over a row of them.

Rank = replica * shard_size + shard: a row is `shard_size` consecutive ranks, usually one node.

Owns: which group ZeRO is handed while an engine builds its optimizer, and the move of parameters
that deepspeed.zero.Init has already partitioned over all ranks. Until that move every rank of the
world takes part in whatever is loaded into them, so replicas start from equal weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus, is_zero_param
from torch import nn

from ds_muon.config import HsdpConfig
from ds_muon.zero.seams import available, override, private
from ds_muon.zero.transport import DeepSpeedTransport, own_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """This rank's place among `replicas` x `shard_size` ranks, and its row and column.

    Attributes:
        rows: ranks of every row.
        zero_group: the process group that ZeRO partitions over.
        row: transport of the exchange, over the ranks of this replica.
        column: transport over the ranks that hold the same pieces, one per replica.
        publishing: the same as `column`, on a communicator of its own.
    """

    shard_size: int
    replicas: int
    rows: tuple[tuple[int, ...], ...]
    zero_group: Any
    row: DeepSpeedTransport
    column: DeepSpeedTransport
    publishing: DeepSpeedTransport

    @property
    def replica(self) -> int:
        """This rank's row."""
        return self.column.rank

    @property
    def shard(self) -> int:
        """This rank's place in its row."""
        return self.row.rank


def mesh_of(parameter: Any) -> Mesh | None:
    """The mesh over whose rows ZeRO-3 partitions a parameter, if it does."""
    return getattr(parameter, "ds_muon_mesh", None)


def require_shard_size(hsdp: HsdpConfig | None, world_size: int) -> None:
    """Check that rows of `shard_size` ranks fill the world.

    Raises:
        ValueError: they do not.
    """
    if hsdp is None or world_size % hsdp.shard_size == 0:
        return
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    raise ValueError(
        f"optimizer.params.hsdp.shard_size = {hsdp.shard_size} must divide the number of ranks, "
        f"which is {world_size}; use one of {sizes}"
    )


def require_own_groups(hsdp: HsdpConfig | None, stage: int) -> None:
    """Check that ZeRO-3 can partition over another group than the world.

    Raises:
        ValueError: this DeepSpeed cannot.
    """
    if hsdp is not None and stage == 3 and not available(Init, "_partition_world_size"):
        raise ValueError(
            "optimizer.params.hsdp at zero_optimization.stage 3 needs deepspeed 0.19.3 or newer, "
            "where a parameter can have a group of its own; install it, or use stage 1 or 2"
        )


def make_mesh(hsdp: HsdpConfig | None, world_size: int) -> Mesh | None:
    """Make the groups; a collective. One replica needs none."""
    if hsdp is None or hsdp.shard_size == world_size:
        return None
    size = hsdp.shard_size
    rows = tuple(tuple(range(r, r + size)) for r in range(0, world_size, size))
    columns = tuple(zip(*rows, strict=True))
    return Mesh(
        shard_size=size,
        replicas=len(rows),
        rows=rows,
        zero_group=own_group("zero", rows),
        row=DeepSpeedTransport("exchange", rows),
        column=DeepSpeedTransport("reduction", columns),
        publishing=DeepSpeedTransport("publish", columns),
    )


@contextmanager
def partitioned_over(engine: Any, mesh: Mesh) -> Iterator[None]:
    """Let ZeRO partition over this rank's row while the engine builds its optimizer.

    The engine keeps its own groups and sizes, so that batches count all ranks; checkpoints hold one
    replica, so they are of a world of `shard_size` ranks.
    """
    if int(engine.zero_optimization_stage()) == 3:
        _partition_parameters(engine.module, mesh)
    world = private(engine, "seq_data_parallel_group")
    override(engine, "seq_data_parallel_group", mesh.zero_group)
    try:
        yield
    finally:
        override(engine, "seq_data_parallel_group", world)
    override(engine, "seq_dp_world_size", mesh.shard_size)


def _partition_parameters(module: nn.Module, mesh: Mesh) -> None:
    """Tell parameters their group; those that are partitioned already are gathered and cut anew."""
    for parameter in module.parameters():
        parameter.ds_muon_mesh = mesh
        parameter.ds_zero_partition_process_group = mesh.zero_group
        if not is_zero_param(parameter):
            continue
        if parameter.ds_status is not ZeroParamStatus.AVAILABLE:
            parameter.all_gather([parameter])
        parameter.ds_process_group = mesh.zero_group
        parameter.ds_zero_partition_rank = mesh.shard
        parameter.ds_zero_partition_world_size = mesh.shard_size
        parameter.ds_tensor = None
        with torch.no_grad():
            parameter.partition([parameter], has_been_updated=True)
        # Equal already, unless zero.Init was given a group of its own.
        mesh.column.broadcast(parameter.ds_tensor.data, source=0).wait()
