# SPDX-License-Identifier: Apache-2.0
"""Leaves: read off DeepSpeed's wrapper where it really put every parameter.

Owns: one reader per way of laying parameters out (whole, one flat buffer cut over ranks, each
parameter cut over ranks), and the check that a leaf holds what its slices say.
Never does: trust model order; offsets come from storage addresses and partition sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from ds_muon.checkpoint import ParameterSlice
from ds_muon.comm.transport import Transport
from ds_muon.groups import RoutedGroup
from ds_muon.optimizer import MUON
from ds_muon.plan.layout import (
    Layout,
    Placement,
    flat_partition_layout,
    replicated_layout,
    split_parameter_layout,
)
from ds_muon.routing import Route
from ds_muon.zero.seams import private


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A tensor that DeepSpeed steps, and the parameter ranges in it on this rank.

    Attributes:
        sources: per slice, the flat range of the model's weights that it must equal.
    """

    tensor: Tensor
    slices: tuple[ParameterSlice, ...]
    sources: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSet:
    """Leaves that one base step call updates together; `layout` is None for AdamW leaves."""

    kind: str
    leaves: tuple[Leaf, ...]
    layout: Layout | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The leaves' tensors."""
        return tuple(leaf.tensor for leaf in self.leaves)


def read_leaf_sets(
    engine: Any, groups: Sequence[RoutedGroup], transport: Transport
) -> tuple[LeafSet, ...]:
    """Read all leaves of the engine's wrapper.

    Args:
        transport: over the ranks that ZeRO partitions over.

    Raises:
        RuntimeError: an unknown wrapper, or a leaf that does not hold what it should.
    """
    wrapper = engine.optimizer
    if wrapper is engine.basic_optimizer:
        sets = _read_whole(groups, [list(g.parameters) for g in groups], transport)
    elif isinstance(wrapper, FP16_UnfusedOptimizer):
        sets = _read_whole(groups, private(wrapper, "fp32_groups"), transport)
    elif isinstance(wrapper, BF16_Optimizer):
        flats = private(wrapper, "bf16_groups_flat")
        parts = private(wrapper, "fp32_groups_flat_partition")
        sets = _read_flat(groups, flats, parts, transport)
    elif isinstance(wrapper, DeepSpeedZeroOptimizer):
        flats = private(wrapper, "bit16_groups_flat")
        parts = private(wrapper, "single_partition_of_fp32_groups")
        sets = _read_flat(groups, flats, parts, transport)
    elif isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        sets = _read_split(groups, wrapper, transport)
    else:
        raise RuntimeError(f"DMuon does not know the DeepSpeed wrapper {type(wrapper).__name__}")
    for leaf_set in sets:
        for leaf in leaf_set.leaves:
            _check_content(leaf)
    return tuple(sets)


def _read_whole(
    groups: Sequence[RoutedGroup], masters: Sequence[Sequence[Tensor]], transport: Transport
) -> list[LeafSet]:
    """No ZeRO: every leaf is a whole parameter or its fp32 copy; all matrices step together."""
    found: dict[str, list[tuple[Leaf, Route]]] = {}
    for group, tensors in zip(groups, masters, strict=True):
        for param, route, tensor in zip(group.parameters, group.routes, tensors, strict=True):
            leaf = Leaf(
                tensor=tensor,
                slices=(_slice(route, group.kind, 0, 0, route.numel),),
                sources=(param.detach().reshape(-1),),
            )
            found.setdefault(group.kind, []).append((leaf, route))
    return [
        LeafSet(
            kind=kind,
            leaves=tuple(leaf for leaf, _ in items),
            layout=replicated_layout(
                [r.placements for _, r in items], world_size=transport.world_size
            )
            if kind == MUON
            else None,
        )
        for kind, items in found.items()
    ]


def _read_flat(
    groups: Sequence[RoutedGroup],
    flats: Sequence[Tensor],
    partitions: Sequence[Tensor],
    transport: Transport,
) -> list[LeafSet]:
    """ZeRO-1/2: a group is one flat buffer, of which every rank keeps an equal part."""
    world_size, rank = transport.world_size, transport.rank
    sets = []
    for group, flat, partition in zip(groups, flats, partitions, strict=True):
        size = partition.numel()
        placements: list[Placement] = []
        slices: list[ParameterSlice] = []
        sources: list[Tensor] = []
        for param, route in zip(group.parameters, group.routes, strict=True):
            start = (param.data_ptr() - flat.data_ptr()) // flat.element_size()
            placements.extend(replace(p, offset=start + p.offset) for p in route.placements)
            left, right = max(start, rank * size), min(start + route.numel, (rank + 1) * size)
            if left < right:
                slices.append(
                    _slice(route, group.kind, left - start, left - rank * size, right - left)
                )
                sources.append(param.detach().reshape(-1)[left - start : right - start])
        sets.append(
            LeafSet(
                kind=group.kind,
                leaves=(Leaf(tensor=partition, slices=tuple(slices), sources=tuple(sources)),),
                layout=flat_partition_layout(
                    placements, partition_numel=size, world_size=world_size
                )
                if group.kind == MUON
                else None,
            )
        )
    return sets


def _read_split(groups: Sequence[RoutedGroup], zero: Any, transport: Transport) -> list[LeafSet]:
    """ZeRO-3: a sub-group's leaf holds one piece of each of its parameters, in their order."""
    route_of = {
        id(p): (group.kind, route)
        for group in groups
        for p, route in zip(group.parameters, group.routes, strict=True)
    }
    world_size, rank = transport.world_size, transport.rank
    sub_groups = private(zero, "fp16_groups")
    leaves = private(zero, "fp32_partitioned_groups_flat")
    sets = []
    for params, tensor in zip(sub_groups, leaves, strict=True):
        kind = route_of[id(params[0])][0]
        parts = [p.ds_tensor.ds_numel for p in params]
        offsets = list(accumulate(parts, initial=0))[:-1]
        slices, sources = [], []
        for param, part, offset in zip(params, parts, offsets, strict=True):
            route = route_of[id(param)][1]
            numel = min(part, max(0, route.numel - rank * part))
            if numel:
                slices.append(_slice(route, kind, rank * part, offset, numel))
                sources.append(param.ds_tensor.detach().reshape(-1)[:numel])
        layout = None
        if kind == MUON:
            layout = split_parameter_layout(
                [route_of[id(p)][1].placements for p in params],
                partition_numels=parts,
                leaf_offsets=offsets,
                world_size=world_size,
            )
        leaf = Leaf(tensor=tensor, slices=tuple(slices), sources=tuple(sources))
        sets.append(LeafSet(kind=kind, leaves=(leaf,), layout=layout))
    return sets


def _slice(
    route: Route, kind: str, parameter_offset: int, leaf_offset: int, numel: int
) -> ParameterSlice:
    return ParameterSlice(
        name=route.name,
        kind=kind,
        shape=route.shape,
        parameter_offset=parameter_offset,
        leaf_offset=leaf_offset,
        numel=numel,
    )


@torch.no_grad()
def clear_padding(leaf: Leaf) -> None:
    """Zero what no parameter lies in; ZeRO-3 leaves it uninitialised, differently on each rank."""
    flat, end = leaf.tensor.view(-1), 0
    for item in sorted(leaf.slices, key=lambda item: item.leaf_offset):
        flat[end : item.leaf_offset] = 0
        end = item.leaf_offset + item.numel
    flat[end:] = 0


def _check_content(leaf: Leaf) -> None:
    """Compare every slice of a leaf with the model's weights, in the model's dtype."""
    flat = leaf.tensor.detach().reshape(-1)
    for item, source in zip(leaf.slices, leaf.sources, strict=True):
        held = flat[item.leaf_offset : item.leaf_offset + item.numel]
        if not torch.equal(held.to(source.device, source.dtype), source):
            raise RuntimeError(
                f"DMuon: elements {item.parameter_offset} to {item.parameter_offset + item.numel} "
                f"of {item.name} are not where DeepSpeed's layout says; this deepspeed version "
                "lays parameters out in another way than ds_muon knows"
            )
