# SPDX-License-Identifier: Apache-2.0
"""Crossing: pieces between the memory of a leaf and the arena, which may be on another device.

    leaf's memory                          the bus                     the arena
    momentum, grad -> u, wire dtype  ->  a host buffer, copied  ->  exchange, iteration
    weights        <- applied        <-  a host buffer, copied  <-  update, compute dtype

Under CPU offload nothing else crosses: momentum, gradient and weights stay where the leaf is, and
so do the elementwise passes over them.

Owns: two host buffers of one chunk each, so that one is copied while the other is written or read.
Never does: arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from ds_muon.ortho.chunks import CHUNK_NUMEL, chunks

# The widest dtype that crosses is fp32.
_BUFFER_BYTES = 4 * CHUNK_NUMEL


class Crossing(Protocol):
    """How chunks get from a leaf's memory to the arena and back."""

    def outgoing(self, out: Tensor, *parts: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Cut `out`, in the arena, and `parts`, beside the leaf, alike.

        The caller writes the first tensor of each tuple before it asks for the next.
        """

    def incoming(self, update: Tensor, *parts: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Cut `update`, in the arena, and `parts`, beside the leaf, alike.

        The caller reads the first tensor of each tuple before it asks for the next.
        """


class SameMemory:
    """Leaf and arena are on one device: nothing is copied, nothing is cut."""

    def outgoing(self, out: Tensor, *parts: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """See Crossing."""
        return ((out, *parts),)

    def incoming(self, update: Tensor, *parts: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """See Crossing."""
        return ((update, *parts),)


class HostBuffers:
    """The leaf is on the host, the arena on `device`.

    Args:
        device: of the arena.
        pin: page-lock the buffers, so that copies run beside the host's work; a CPU has no need.
    """

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self._device = device
        pinned = pin and device.type != "cpu"
        self._buffers = [
            torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)
        ]
        self._copied: list[torch.Event | None] = [None, None]
        self._turn = 0

    def outgoing(self, out: Tensor, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """See Crossing."""
        for target, *own in chunks(out, *parts):
            turn, staged = self._next(target)
            yield (staged, *own)
            self._copy(turn, target, staged)

    def incoming(self, update: Tensor, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """See Crossing."""
        arriving: tuple[int, tuple[Tensor, ...]] | None = None
        for source, *own in chunks(update, *parts):
            turn, staged = self._next(source)
            self._copy(turn, staged, source)
            if arriving is not None:
                yield self._arrived(*arriving)
            arriving = turn, (staged, *own)
        if arriving is not None:
            yield self._arrived(*arriving)

    def _next(self, like: Tensor) -> tuple[int, Tensor]:
        """The other buffer in the shape and dtype of a chunk, once nothing is copied with it."""
        self._turn = turn = 1 - self._turn
        self._wait(turn)
        flat = self._buffers[turn][: like.numel() * like.element_size()].view(like.dtype)
        return turn, flat.view(like.shape)

    def _copy(self, turn: int, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if self._device.type != "cpu":
            self._copied[turn] = torch.accelerator.current_stream(self._device).record_event()

    def _wait(self, turn: int) -> None:
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()
            self._copied[turn] = None

    def _arrived(self, turn: int, chunk: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self._wait(turn)
        return chunk
