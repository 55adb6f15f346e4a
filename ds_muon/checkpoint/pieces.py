# SPDX-License-Identifier: Apache-2.0
"""Pieces: the common form of whatever a checkpoint holds.

A piece is a range of one state of one parameter, as a flat view of a file; a shard is what one file
(or one set of files) holds. Nothing here knows how many ranks wrote it, or will read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MASTER = "fp32"
MOMENTUM = "momentum_buffer"
EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
STATES = (MOMENTUM, EXP_AVG, EXP_AVG_SQ)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A range of one state of one parameter.

    Attributes:
        key: MASTER or one of STATES.
        offset: of the first element in the flattened parameter.
        values: flat (numel,).
    """

    name: str
    key: str
    offset: int
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What a part of a checkpoint holds.

    Attributes:
        shapes: parameter -> its whole shape.
        steps: parameter -> AdamW steps taken.
        settings: DMuon's parameter groups by name; empty for another optimizer's checkpoint.
        shared_lr: another optimizer's learning rate, where all its groups have one.
        is_own: written by DMuon.
    """

    pieces: tuple[Piece, ...]
    shapes: Mapping[str, tuple[int, ...]]
    steps: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shared_lr: float | None = None
    is_own: bool = True


def cut(name: str, key: str, leaf: Tensor, *, offset: int, start: int, numel: int) -> Piece:
    """The piece that elements `start` to `start + numel` of a flat leaf are.

    Raises:
        ValueError: the leaf is shorter than that.
    """
    values = leaf.detach().reshape(-1)[start : start + numel]
    if values.numel() != numel:
        raise ValueError(
            f"the checkpoint says that {key} of {name} stands at elements {start} to "
            f"{start + numel} of a tensor that has {leaf.numel()}"
        )
    return Piece(name=name, key=key, offset=offset, values=values)


def whole(shape: Sequence[int], pieces: Iterable[Piece]) -> Tensor:
    """Put one state of one parameter together.

    Raises:
        ValueError: elements that are in no piece.
    """
    ordered = sorted(pieces, key=lambda piece: piece.offset)
    value = torch.zeros(torch.Size(shape).numel(), dtype=ordered[0].values.dtype)
    reached = 0
    for piece in ordered:
        if piece.offset > reached:
            break
        end = piece.offset + piece.values.numel()
        value[piece.offset : end] = piece.values
        reached = max(reached, end)
    if reached != value.numel():
        raise ValueError(
            f"{ordered[0].key} of {ordered[0].name} is not whole: elements {reached} to "
            f"{value.numel()} are in no file"
        )
    return value.view(torch.Size(shape))


def step_of(state: Mapping[str, Any], group: Mapping[str, Any]) -> float | None:
    """AdamW's step count: in the state as a tensor or a number, or in the group."""
    step = state.get("step", group.get("step"))
    return None if step is None else float(step)
