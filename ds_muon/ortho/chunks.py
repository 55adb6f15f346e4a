# SPDX-License-Identifier: Apache-2.0
"""Chunks: elementwise passes go over large tensors in pieces, so that temporaries are small.

Owns: the size of a piece, and the bytes that a pass may hold at once. Elementwise results do not
depend on where a tensor is cut.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

CHUNK_NUMEL = 2**21
# Per element a momentum buffer widened to fp32, the direction in fp32, and the direction rounded.
_BYTES_PER_ELEMENT = 10


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors of equal shape alike: (numel,), or the (runs, run) of a strided block."""
    if tensors[0].numel() <= CHUNK_NUMEL:
        return iter((tensors,))
    return zip(*(_chunks(t) for t in tensors), strict=True)


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.ndim == 1:
        yield from tensor.split(CHUNK_NUMEL)
        return
    for rows in tensor.split(max(1, CHUNK_NUMEL // tensor.shape[1])):
        yield from rows.split(CHUNK_NUMEL, dim=1)


def staging_bytes(numel: int) -> int:
    """Bytes that an elementwise pass over `numel` elements holds at most, besides its operands."""
    return _BYTES_PER_ELEMENT * min(numel, CHUNK_NUMEL)
