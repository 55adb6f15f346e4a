# SPDX-License-Identifier: Apache-2.0
"""Memory of one orthogonalisation: where an owner assembles a matrix and iterates it.

Owns: the layout [iterate | input, where its dtype cannot be the iterate's | scratch] in bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_muon.ortho.newton_schulz import scratch_numel
from ds_muon.ortho.recipes import OrthoSpec

# Regions start at multiples of this; any dtype and kernel likes it.
ALIGNMENT_BYTES = 64


def iterate_bytes(rows: int, cols: int, spec: OrthoSpec, storage: torch.dtype) -> int:
    """Bytes from the assembled input to the update of a (rows, cols) matrix.

    Args:
        storage: dtype of the iterates; fp32 where a device emulates the compute dtype.
    """
    matrix, scratch = _regions(rows, cols, spec, storage)
    return scratch + scratch_numel(rows, cols, spec) * storage.itemsize


def _regions(rows: int, cols: int, spec: OrthoSpec, storage: torch.dtype) -> tuple[int, int]:
    """Where the input and the scratch start, in bytes; the iterate starts at 0."""
    iterate = _aligned(rows * cols * storage.itemsize)
    if _holds(storage, spec.wire_dtype):
        return 0, iterate
    return iterate, iterate + _aligned(rows * cols * spec.wire_dtype.itemsize)


def _holds(storage: torch.dtype, wire: torch.dtype) -> bool:
    """Whether every value of the wire dtype is one of the storage dtype."""
    return storage in (wire, torch.float32)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def iterate_views(
    memory: Tensor, rows: int, cols: int, spec: OrthoSpec, storage: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """View flat bytes as what a backend's `ready` takes.

    Returns:
        (rows, cols) iterate in the storage dtype; (rows, cols) input to be filled with values of
        the wire dtype, often the iterate itself; and the flat scratch.
    """
    matrix_start, scratch_start = _regions(rows, cols, spec, storage)
    numel = rows * cols
    x = memory[: numel * storage.itemsize].view(storage).view(rows, cols)
    matrix = x
    if matrix_start:
        end = matrix_start + numel * spec.wire_dtype.itemsize
        matrix = memory[matrix_start:end].view(spec.wire_dtype).view(rows, cols)
    end = scratch_start + scratch_numel(rows, cols, spec) * storage.itemsize
    return x, matrix, memory[scratch_start:end].view(storage)
