# SPDX-License-Identifier: Apache-2.0
"""The elementwise part of Muon: momentum and Nesterov, the lr factor by shape, the decayed step.

Owns: formulas on parts of a leaf, flat or (runs, run); they are the same for a whole matrix and
for a piece.
Never does: know which part of which matrix it was given.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_muon.ortho.chunks import chunks


@torch.no_grad()
def advance_momentum(buffer: Tensor, grad: Tensor, *, momentum: float) -> None:
    """buffer <- momentum * buffer + (1 - momentum) * grad, in place.

    Args:
        buffer: (numel,) or (runs, run), fp32 or a lower momentum dtype.
        grad: of the same shape, fp32.
    """
    for held, new in chunks(buffer, grad):
        if held.dtype == new.dtype:
            held.lerp_(new, 1 - momentum)
        else:
            held.copy_(held.to(new.dtype).lerp_(new, 1 - momentum))


@torch.no_grad()
def write_direction(
    out: Tensor,
    buffer: Tensor,
    grad: Tensor,
    *,
    momentum: float,
    nesterov: bool,
    rounded_to: torch.dtype,
) -> None:
    """Write u, rounded to the wire dtype: what Newton-Schulz is applied to.

    Args:
        out: (numel,) or (runs, run), in the wire dtype or one that holds all of its values.
        buffer: of the same shape, already advanced by `grad`.
        grad: of the same shape, fp32.
        rounded_to: the wire dtype; every piece is rounded, moved or not.
    """
    for u, held, new in chunks(out, buffer, grad):
        direction = held
        if nesterov:
            into = u if u.dtype == new.dtype else None
            direction = torch.lerp(new, held.to(new.dtype), momentum, out=into)
        u.copy_(direction if u.dtype == rounded_to else direction.to(rounded_to))


@torch.no_grad()
def apply_update(
    leaf: Tensor, update: Tensor, *, lr: float, weight_decay: float, scale: float
) -> None:
    """leaf <- leaf * (1 - lr * weight_decay) - lr * scale * update, in place.

    Args:
        leaf: (numel,) or (runs, run), the master weights.
        update: of the same shape, the orthogonalised piece.
        lr: step length in units of the update before `scale`.
    """
    for weights, step in chunks(leaf, update):
        weights.mul_(1 - lr * weight_decay)
        weights.add_(step, alpha=-(lr * scale))


def lr_factor(name: str, rows: int, cols: int) -> float:
    """Factor on lr for a logical matrix of (rows, cols): outputs by inputs, never padded.

    match_rms_adamw is Moonlight's (https://arxiv.org/abs/2502.16982); original is Keller Jordan's;
    spectral and unit_rms_norm carry Emerging-Optimizers' names.

    Raises:
        ValueError: unknown name.
    """
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    if name == "original":
        return math.sqrt(max(1, rows / cols))
    if name == "spectral":
        return math.sqrt(max(rows, cols))
    if name == "unit_rms_norm":
        return math.sqrt(rows / cols)
    raise ValueError(f"lr_scale {name!r} is unknown")
