# SPDX-License-Identifier: Apache-2.0
"""Predict: the layouts that ZeRO will make of parameter groups, for any world, without ranks.

Owns: ZeRO's orders, paddings and cuts as integers, for `ds_muon plan`. Tests compare it with what
zero/leaves.py reads off real engines.
Never does: serve a training step; that reads what ZeRO really did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ds_muon.plan.layout import (
    Layout,
    Placement,
    flat_partition_layout,
    replicated_layout,
    split_parameter_layout,
)

# ZeRO-1/2 pads a group's flat buffer to this many elements per rank.
FLAT_ALIGNMENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedParameter:
    """A trainable parameter: its elements, and its matrices (none: AdamW's)."""

    numel: int
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSettings:
    """What a layout follows from, in ds_config.json's terms.

    Attributes:
        parameter_alignment: elements that a parameter's start is aligned to under ZeRO-1/2; 1: off.
        sub_group_size: partition elements per ZeRO-3 sub-group.
    """

    stage: int
    round_robin_gradients: bool = False
    parameter_alignment: int = 1
    sub_group_size: int = 10**9


def predict_layouts(
    groups: Sequence[Sequence[PlannedParameter]], settings: ZeroSettings, *, world_size: int
) -> list[Layout]:
    """Lay out groups of matrices; one layout per set of leaves that is stepped together."""
    if settings.stage == 0:
        everything = [p.placements for group in groups for p in group]
        return [replicated_layout(everything, world_size=world_size)] if everything else []
    if settings.stage in (1, 2):
        return [_flat(group, settings, world_size) for group in groups]
    return [
        _split(sub_group, world_size)
        for group in groups
        for sub_group in sub_groups(group, settings.sub_group_size, world_size=world_size)
    ]


def sub_groups(
    group: Sequence[PlannedParameter], sub_group_size: int, *, world_size: int
) -> list[list[PlannedParameter]]:
    """Cut a group as ZeRO-3 does: a sub-group closes once its partition reaches the size."""
    found: list[list[PlannedParameter]] = [[]]
    filled = 0
    for parameter in group:
        if filled >= sub_group_size:
            found.append([])
            filled = 0
        found[-1].append(parameter)
        filled += -(-parameter.numel // world_size)
    return found


def _flat(group: Sequence[PlannedParameter], settings: ZeroSettings, world_size: int) -> Layout:
    order = list(range(len(group)))
    if settings.round_robin_gradients:
        order = [i for rank in range(world_size) for i in order[rank::world_size]]
    starts, end = [0] * len(group), 0
    for position, index in enumerate(order):
        starts[index] = end
        end += group[index].numel
        if position < len(order) - 1:
            end += -end % settings.parameter_alignment
    placements = [
        replace(p, offset=start + p.offset)
        for parameter, start in zip(group, starts, strict=True)
        for p in parameter.placements
    ]
    padded = math.ceil(end / (FLAT_ALIGNMENT * world_size)) * FLAT_ALIGNMENT * world_size
    return flat_partition_layout(
        placements, partition_numel=padded // world_size, world_size=world_size
    )


def _split(group: Sequence[PlannedParameter], world_size: int) -> Layout:
    parts = [-(-p.numel // world_size) for p in group]
    return split_parameter_layout(
        [p.placements for p in group],
        partition_numels=parts,
        leaf_offsets=list(accumulate(parts, initial=0))[:-1],
        world_size=world_size,
    )
