# SPDX-License-Identifier: Apache-2.0
"""Buffers: memory of the exchange, allocated once for the largest bucket and viewed in any dtype.

Owns: for each bucket in flight a send and a receive region. A bucket's way in and way out share
them: what was sent in is free when the way out is packed, what was received in is read by then.
Never does: know what a range in a region means.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64


def aligned(nbytes: int) -> int:
    """Round up, so that every region starts at a boundary any dtype and kernel likes."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class ExchangeBuffers:
    """`sets` pairs of regions.

    Args:
        send_bytes, receive_bytes: largest need of any bucket and way.
        sets: 1 for one bucket at a time; one more than the buckets in flight otherwise.
        keep: hold the memory between steps; otherwise `release` gives it back.
    """

    def __init__(
        self, *, send_bytes: int, receive_bytes: int, sets: int, device: torch.device, keep: bool
    ) -> None:
        self._send = aligned(send_bytes)
        self._stride = self._send + aligned(receive_bytes)
        self.sets = sets
        self.nbytes = sets * self._stride
        self._device = device
        self._keep = keep
        self._memory: Tensor | None = None
        if keep:
            self._allocate()

    def _allocate(self) -> Tensor:
        if self._memory is None:
            self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        return self._memory

    def send(self, bucket: int, numel: int, dtype: torch.dtype) -> Tensor:
        """View `numel` elements of the send region that `bucket` uses."""
        return self._view(bucket % self.sets * self._stride, numel, dtype)

    def receive(self, bucket: int, numel: int, dtype: torch.dtype) -> Tensor:
        """View `numel` elements of the receive region that `bucket` uses."""
        return self._view(bucket % self.sets * self._stride + self._send, numel, dtype)

    def _view(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        return self._allocate()[start : start + numel * dtype.itemsize].view(dtype)

    def release(self) -> None:
        """Give the memory back after a step, unless it is kept."""
        if not self._keep:
            self._memory = None
