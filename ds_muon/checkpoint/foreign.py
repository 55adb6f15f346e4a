# SPDX-License-Identifier: Apache-2.0
"""Foreign: shards of ZeRO checkpoints of other optimizers, AdamW's and the built-in Muon's.

Their optimizer states have no names; what stands where follows from ZeRO's own mappings:
`param_slice_mappings` of flat partitions (ZeRO-1/2, BF16_Optimizer), `param_shapes` of parameters
that are each cut over all ranks (ZeRO-3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_muon.checkpoint.pieces import MASTER, MOMENTUM, STATES, Piece, Shard, cut, step_of

ShapesOfGroup = Mapping[str, tuple[int, ...]]


def read_flat(
    state_dicts: Iterable[Mapping[str, Any]],
    masters: Iterable[Sequence[Tensor]],
    mappings: Iterable[Sequence[Mapping[str, Any]]],
    shapes: Sequence[ShapesOfGroup],
    *,
    cuts_momentum: bool,
) -> Shard:
    """Read flat partitions, all of them, in rank order.

    Args:
        state_dicts: the base optimizer's, per rank.
        masters: per rank and group, the fp32 partition without its padding.
        mappings: per rank and group, parameter -> `start` and `numel` in the partition.
        shapes: per group.
        cuts_momentum: the built-in Muon's momentum is partitioned as the weights are (with CPU
            offload, and in a BF16_Optimizer); otherwise every holder keeps that of whole matrices.
    """
    pieces: list[Piece] = []
    steps: dict[str, float] = {}
    reached: dict[str, int] = {}
    shape_of = {name: shape for group in shapes for name, shape in group.items()}
    lrs: set[float] = set()
    for state_dict, of_rank, of_groups in zip(state_dicts, masters, mappings, strict=True):
        lrs.update(float(group["lr"]) for group in state_dict["param_groups"])
        for number, (master, mapping) in enumerate(zip(of_rank, of_groups, strict=True)):
            state = state_dict["state"].get(number, {})
            held = {MASTER: master, **{k: state[k] for k in STATES if k in state}}
            whole = [] if cuts_momentum else _whole_momentum(held, mapping, shape_of)
            pieces.extend(whole)
            if whole:
                del held[MOMENTUM]
            step = step_of(state, state_dict["param_groups"][number])
            for name, address in mapping.items():
                offset = reached.get(name, 0)
                reached[name] = offset + address.numel
                if step is not None:
                    steps[name] = step
                pieces.extend(
                    cut(name, k, v, offset=offset, start=address.start, numel=address.numel)
                    for k, v in held.items()
                )
    return Shard(
        pieces=tuple(pieces), shapes=shape_of, steps=steps, shared_lr=_one(lrs), is_own=False
    )


def _whole_momentum(
    held: Mapping[str, Tensor], mapping: Mapping[str, Any], shape_of: ShapesOfGroup
) -> list[Piece]:
    """Momentum of the whole matrices of which the partition has a part, in its order."""
    if MOMENTUM not in held:
        return []
    pieces, start = [], 0
    for name in mapping:
        numel = math.prod(shape_of[name])
        pieces.append(cut(name, MOMENTUM, held[MOMENTUM], offset=0, start=start, numel=numel))
        start += numel
    return pieces


def read_split(
    state_dicts: Sequence[Mapping[str, Any]],
    masters: Sequence[Sequence[Tensor]],
    shapes: Sequence[ShapesOfGroup],
) -> Shard:
    """Read parameters that are each cut over all ranks.

    Args:
        state_dicts: the base optimizer's, per rank.
        masters: per rank and sub-group.
        shapes: per sub-group, in the order of its parameters.
    """
    pieces: list[Piece] = []
    steps: dict[str, float] = {}
    world_size = len(state_dicts)
    lrs: set[float] = set()
    for rank, (state_dict, of_rank) in enumerate(zip(state_dicts, masters, strict=True)):
        lrs.update(float(group["lr"]) for group in state_dict["param_groups"])
        group_of = {n: g for g in state_dict["param_groups"] for n in g["params"]}
        for number, (master, of_group) in enumerate(zip(of_rank, shapes, strict=True)):
            state = state_dict["state"].get(number, {})
            held = {MASTER: master, **{k: state[k] for k in STATES if k in state}}
            step = step_of(state, group_of.get(number, {}))
            start = 0
            for name, shape in of_group.items():
                numel = math.prod(shape)
                part = -(-numel // world_size)
                own = min(part, max(0, numel - rank * part))
                if step is not None:
                    steps[name] = step
                pieces.extend(
                    cut(name, key, values, offset=rank * part, start=start, numel=own)
                    for key, values in held.items()
                    if own and torch.is_tensor(values)
                )
                start += part
    return Shard(
        pieces=tuple(pieces),
        shapes={name: shape for group in shapes for name, shape in group.items()},
        steps=steps,
        shared_lr=_one(lrs),
        is_own=False,
    )


def _one(lrs: set[float]) -> float | None:
    return next(iter(lrs)) if len(lrs) == 1 else None
