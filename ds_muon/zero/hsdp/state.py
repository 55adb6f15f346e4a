# SPDX-License-Identifier: Apache-2.0
"""Spread state: checkpoints and DeepSpeed's state accessors, where replicas share the momentum.

Owns: who writes which file (one replica, whose files are those of a run without HSDP on as many
ranks), whole momentum for `safe_get_full_optimizer_state`, and momentum that is offloaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor

from ds_muon.checkpoint import ParameterSlice
from ds_muon.comm.transport import Transport
from ds_muon.optimizer import MOMENTUM, MatrixOwnerOptimizer
from ds_muon.plan.blocks import Block
from ds_muon.run.momentum import SpreadMomentum
from ds_muon.run.views import view
from ds_muon.zero.hsdp.mesh import Mesh
from ds_muon.zero.seams import override

# (block of the parameter, view of its momentum) of all that this rank keeps of one parameter.
Pieces = list[tuple[Block, Tensor]]
PiecesOf = Callable[[Any], Pieces | None]


def pieces_of(
    spread: SpreadMomentum,
    slices: Sequence[Sequence[ParameterSlice]],
    names: Mapping[int, str],
) -> PiecesOf:
    """Return what finds this rank's momentum of a parameter, or None for one of AdamW's.

    Args:
        slices: per leaf of the matrix half, what it holds of which parameter.
        names: id(parameter) -> name, of the parameters that Muon trains.
    """

    def find(parameter: Any) -> Pieces | None:
        name = names.get(id(parameter))
        if name is None:
            return None
        return [
            (block.moved(item.parameter_offset - item.leaf_offset), momentum)
            for index, in_leaf in enumerate(slices)
            for item in in_leaf
            if item.name == name
            for block, momentum in spread.pieces(index)
            if item.leaf_offset <= block.start < item.leaf_offset + item.numel
        ]

    return find


def write_one_replica(engine: Any, mesh: Mesh, optimizer: MatrixOwnerOptimizer) -> None:
    """Let replica 0 alone write files, with all momentum in them."""
    save = engine.save_checkpoint

    @functools.wraps(save)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        with optimizer.whole_state():
            return save(*args, **kwargs)

    engine.save_checkpoint = save_checkpoint
    if int(engine.zero_optimization_stage()) == 3:
        # ZeRO-3's model files carry the rank in a row, which replicas share.
        override(engine, "is_first_weights_partition_group", lambda: mesh.replica == 0)


def offload_with_states(engine: Any, spread: SpreadMomentum) -> None:
    """Let the compact momentum go where DeepSpeed's offload_states puts optimizer states."""
    offload, reload = engine.offload_states, engine.reload_states

    @functools.wraps(offload)
    def offload_states(include: Any = None, *args: Any, **kwargs: Any) -> None:
        offload(include, *args, **kwargs)
        if include is None or OffloadStateTypeEnum.optim_states in include:
            spread.move("cpu")

    @functools.wraps(reload)
    def reload_states(*args: Any, **kwargs: Any) -> None:
        reload(*args, **kwargs)
        spread.move(get_accelerator().current_device_name())

    engine.offload_states, engine.reload_states = offload_states, reload_states


def share_zero3_accessors(zero: Any, world: Transport, pieces: PiecesOf) -> None:
    """Let ZeRO-3's accessors of one optimizer see whole momentum."""
    get_full, set_full = zero.get_full_hp_param, zero.set_full_hp_param
    get_local, set_local = zero.get_local_fp32_param, zero.set_local_hp_param

    def own(parameter: Any, key: str | None) -> Pieces | None:
        return pieces(parameter) if key == MOMENTUM else None

    def get_full_hp_param(parameter: Any, optim_state_key: str | None = None) -> Tensor:
        found = own(parameter, optim_state_key)
        if found is None:
            return get_full(parameter, optim_state_key)
        return _whole(world, found, parameter.ds_shape, zero.device)

    def set_full_hp_param(
        value: Tensor, parameter: Any, optim_state_key: str | None = None
    ) -> None:
        found = own(parameter, optim_state_key)
        if found is None:
            set_full(value, parameter, optim_state_key)
        else:
            _set(found, value)

    def get_local_fp32_param(parameter: Any, optim_state_key: str | None = None) -> Tensor:
        _require_full(own(parameter, optim_state_key))
        return get_local(parameter, optim_state_key)

    def set_local_hp_param(
        value: Tensor, parameter: Any, optim_state_key: str | None = None
    ) -> None:
        _require_full(own(parameter, optim_state_key))
        set_local(value, parameter, optim_state_key)

    zero.get_full_hp_param, zero.set_full_hp_param = get_full_hp_param, set_full_hp_param
    zero.get_local_fp32_param, zero.set_local_hp_param = get_local_fp32_param, set_local_hp_param


def share_flat_accessors(parameter: Any, world: Transport, pieces: PiecesOf) -> None:
    """Let the accessors that ZeRO-1/2 binds to a parameter see whole momentum."""
    get_full, set_full = parameter.get_full_hp_param, parameter.set_full_hp_param
    if pieces(parameter) is None:
        return

    def get_full_hp_param(optim_state_key: str | None = None) -> Tensor:
        if optim_state_key != MOMENTUM:
            return get_full(optim_state_key)
        return _whole(world, pieces(parameter) or [], parameter.shape, parameter.device)

    def set_full_hp_param(value: Tensor, optim_state_key: str | None = None) -> None:
        if optim_state_key != MOMENTUM:
            set_full(value, optim_state_key)
        else:
            _set(pieces(parameter) or [], value)

    parameter.get_full_hp_param = get_full_hp_param
    parameter.set_full_hp_param = set_full_hp_param


def _require_full(spread: Pieces | None) -> None:
    if spread is not None:
        raise ValueError(
            "DMuon: with hsdp a rank may keep no momentum of its own partition; use "
            "safe_get_full_optimizer_state or safe_set_full_optimizer_state"
        )


@torch.no_grad()
def _whole(
    world: Transport, own: Pieces, shape: Sequence[int], device: torch.device | str
) -> Tensor:
    """Momentum of one parameter, fp32; every element stands on one rank of the world."""
    whole = torch.zeros(torch.Size(shape).numel(), dtype=torch.float32, device=device)
    for block, momentum in own:
        view(whole, block).copy_(momentum)
    world.all_reduce(whole).wait()
    return whole.view(torch.Size(shape))


@torch.no_grad()
def _set(own: Pieces, value: Tensor) -> None:
    flat = value.reshape(-1)
    for block, momentum in own:
        momentum.copy_(view(flat, block))
