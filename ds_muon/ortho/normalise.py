# SPDX-License-Identifier: Apache-2.0
"""Normalisation: a matrix over its Frobenius norm, which bounds every singular value by one.

Owns: a norm that is right in fp32's whole range, and what happens to a matrix of zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_muon.ortho.arithmetic import Arithmetic
from ds_muon.ortho.chunks import CHUNK_NUMEL, chunks
from ds_muon.ortho.recipes import OrthoSpec

# Squares of the elements of a matrix with such a norm neither overflow nor vanish in fp32.
_SAFE_NORMS = (1e-15, 1e15)


def normalise(x: Tensor, matrix: Tensor, spec: OrthoSpec, arithmetic: Arithmetic) -> None:
    """x <- matrix over its Frobenius norm.

    Args:
        x: (rows, cols), contiguous, in the storage dtype; overwritten.
        matrix: of the same shape, contiguous; may be `x` itself.
    """
    if spec.normalise_in == "compute":
        x.copy_(matrix)
        arithmetic.round_(x)
        x.div_(_guarded(x.norm(), spec.eps, spec.guard, spec.divisor))
    elif x.dtype == torch.float32:
        _normalise_in_place(x if x is matrix else x.copy_(matrix), spec)
    else:
        _normalise_in_chunks(x, matrix, spec)
        return
    arithmetic.round_(x)


def normalise_at_once(x: Tensor, matrix: Tensor, eps: float, guard: str, divisor: float) -> None:
    """`normalise` in fp32 as one expression, for a compiler that needs no memory for its parts."""
    scaled = matrix.float() / _largest(matrix)
    norm = _guarded(torch.linalg.vector_norm(scaled), eps, guard, divisor)
    x.copy_(scaled / norm)


def _normalise_in_place(x: Tensor, spec: OrthoSpec) -> None:
    """Normalise an fp32 matrix."""
    if x.device.type == "cpu":  # elsewhere looking at the norm would empty the device's queue
        norm = _norm(x)
        if _SAFE_NORMS[0] < float(norm) < _SAFE_NORMS[1]:
            x.div_(norm if spec.divisor == 1.0 else norm * spec.divisor)
            return
    x.div_(_largest(x))
    x.div_(_guarded(_norm(x), spec.eps, spec.guard, spec.divisor))


def _normalise_in_chunks(x: Tensor, matrix: Tensor, spec: OrthoSpec) -> None:
    """Normalise in fp32 what is stored in a lower dtype."""
    largest, flat = _largest(matrix), matrix.view(-1)
    parts = [_norm(part.to(torch.float32, copy=True).div_(largest)) for (part,) in chunks(flat)]
    norm = torch.linalg.vector_norm(torch.stack(parts))
    norm = _guarded(norm, spec.eps, spec.guard, spec.divisor)
    for out, part in chunks(x.view(-1), flat):
        out.copy_(part.to(torch.float32, copy=True).div_(largest).div_(norm))


def _norm(x: Tensor) -> Tensor:
    """Frobenius norm in fp32 of an fp32 matrix; sums of many squares are made in parts."""
    if x.numel() <= CHUNK_NUMEL:
        return torch.linalg.vector_norm(x)
    parts = [torch.linalg.vector_norm(part) for part in x.view(-1).split(CHUNK_NUMEL)]
    return torch.linalg.vector_norm(torch.stack(parts))


def _largest(matrix: Tensor) -> Tensor:
    """Magnitude of the largest element in fp32; squares of a matrix that decayed to 1e-25, or grew
    to 1e20, would leave fp32's range, so it is divided out before its norm is taken.
    """
    low, high = torch.aminmax(matrix)
    return torch.maximum(high, -low).float().clamp(min=torch.finfo(torch.float32).tiny)


def _guarded(norm: Tensor, eps: float, guard: str, divisor: float) -> Tensor:
    norm = norm + eps if guard == "add" else norm.clamp(min=eps)
    return norm if divisor == 1.0 else norm * divisor
