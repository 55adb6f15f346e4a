# SPDX-License-Identifier: Apache-2.0
"""Restore: fill the leaves of a run from pieces, by parameter name.

Owns: the check that everything a run needs is there, made before anything is changed, and the
copies. What a run needs is what its own checkpoint header says it holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_muon.checkpoint.header import ParameterSlice
from ds_muon.checkpoint.pieces import EXP_AVG, MASTER, MOMENTUM, Piece, Shard

_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """A leaf to fill.

    Attributes:
        slices: what it holds, on this rank.
        states: key (MASTER, momentum_buffer, exp_avg ...) -> flat tensor of the leaf's numel.
        step: AdamW's step count, 0-dim, if it has one.
    """

    slices: tuple[ParameterSlice, ...]
    states: Mapping[str, Tensor]
    step: Tensor | None = None


Copies = list[tuple[Tensor, Tensor]]


def some(names: Sequence[str]) -> str:
    """A few of many names, for a message."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def without(destination: Destination, names: Container[str]) -> Destination:
    """A destination less the parameters that keep what they have."""
    kept = tuple(item for item in destination.slices if item.name not in names)
    return replace(destination, slices=kept)


def weights_shard(
    destinations: Iterable[Destination], shards: Sequence[Shard], weights: Mapping[str, Tensor]
) -> Shard:
    """Weights of parameters that are trained here, and were not where the checkpoint was saved.

    Args:
        weights: all that the checkpoint has, whole, by parameter name.
    """
    trained = {name for shard in shards for name in shard.shapes}
    names = {item.name for d in destinations for item in d.slices} - trained
    found = {name: weights[name] for name in sorted(names) if name in weights}
    return Shard(
        pieces=tuple(
            Piece(name=name, key=MASTER, offset=0, values=value.detach().reshape(-1))
            for name, value in found.items()
        ),
        shapes={name: tuple(value.shape) for name, value in found.items()},
        is_own=all(shard.is_own for shard in shards),
    )


def plan_copies(destinations: Sequence[Destination], shards: Iterable[Shard]) -> Copies:
    """Find a source for every element of every destination; nothing is changed.

    An AdamW checkpoint has no momentum; its exp_avg, the same running mean of the same gradients,
    stands in for it.

    Returns:
        (to, from) pairs of equal numel.

    Raises:
        ValueError: names parameters that are missing, of another shape, or without a state.
    """
    found: dict[tuple[str, str], list[tuple[int, Tensor]]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    steps: dict[str, float] = {}
    foreign = True
    for shard in shards:
        foreign = foreign and not shard.is_own
        shapes.update(shard.shapes)
        steps.update(shard.steps)
        for piece in shard.pieces:
            found[piece.name, piece.key].append((piece.offset, piece.values))
    _require_parameters(destinations, shapes)
    copies: Copies = []
    without: dict[str, list[str]] = defaultdict(list)  # parameter -> states
    for destination in destinations:
        for item in destination.slices:
            for key, leaf in destination.states.items():
                pieces = found.get((item.name, key))
                if pieces is None and key == MOMENTUM and foreign:
                    pieces = found.get((item.name, EXP_AVG))
                target = leaf.view(-1)[item.leaf_offset : item.leaf_offset + item.numel]
                if pieces is None or not _cover(item, target, pieces, copies):
                    without[item.name].append(key)
        if destination.step is not None and destination.slices:
            copies.append((destination.step, _step(destination, steps, without)))
    if without:
        raise ValueError(_explain(without))
    return copies


def _cover(
    item: ParameterSlice, target: Tensor, pieces: Sequence[tuple[int, Tensor]], copies: Copies
) -> bool:
    """Add what fills `target` from pieces; whether all of it is filled."""
    reached, end = item.parameter_offset, item.parameter_offset + item.numel
    for offset, values in sorted(pieces, key=lambda piece: piece[0]):
        stop = min(offset + values.numel(), end)
        if offset <= reached < stop:
            into = target[reached - item.parameter_offset : stop - item.parameter_offset]
            copies.append((into, values[reached - offset : stop - offset]))
            reached = stop
    return reached == end


def _step(
    destination: Destination, steps: Mapping[str, float], without: dict[str, list[str]]
) -> Tensor:
    names = list(dict.fromkeys(item.name for item in destination.slices))
    counts = {name: steps[name] for name in names if name in steps}
    missing = [name for name in names if name not in steps]
    if missing:
        for name in missing:
            without[name].append("step")
    elif len(set(counts.values())) > 1:
        told = ", ".join(f"{name} {counts[name]:g}" for name in names[:_NAMED])
        raise ValueError(
            "AdamW's step counts differ between parameters that stand in one flat partition here: "
            f"{told}; give those parameters groups of their own"
        )
    return torch.tensor(next(iter(counts.values()), 0.0))


def _require_parameters(
    destinations: Sequence[Destination], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    wanted = {item.name: item.shape for d in destinations for item in d.slices}
    missing = [name for name in wanted if name not in shapes]
    if missing:
        raise ValueError(
            f"it is of another model: it has no {some(missing)}; load_optimizer_states=False with "
            "load_module_strict=False takes the weights that both have"
        )
    other = [
        f"{name} is {tuple(shapes[name])} there and {tuple(shape)} here"
        for name, shape in wanted.items()
        if tuple(shapes[name]) != tuple(shape)
    ]
    if other:
        raise ValueError(f"it is of another model: {some(other)}")


def _explain(without: Mapping[str, Sequence[str]]) -> str:
    by_states: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, states in without.items():
        by_states[tuple(dict.fromkeys(states))].append(name)
    told = "; ".join(f"{', '.join(s)} of {some(names)}" for s, names in by_states.items())
    return (
        f"it has no {told}. A parameter that was frozen then has no states, and one that changed "
        "halves has the other's (Muon keeps momentum_buffer, AdamW exp_avg and exp_avg_sq): give "
        "include, exclude and requires_grad as they were, or load with load_optimizer_states="
        "False, which takes the weights only"
    )


@torch.no_grad()
def run_copies(copies: Copies) -> None:
    """Fill the destinations."""
    for target, source in copies:
        target.copy_(source)
