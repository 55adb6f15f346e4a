# SPDX-License-Identifier: Apache-2.0
"""Arena: the step's working memory on one rank, allocated once and viewed in any dtype.

    [ exchange buffers, set 0 | set 1 | ... | one orthogonalisation ]

Owns: which bytes serve which bucket. A bucket's way in and way out share its set; bucket k uses set
k modulo the number of sets, one more than the buckets in flight.
Never does: know what a range means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_muon.plan.memory import Buffers


class Arena:
    """Working memory.

    Args:
        exchange_bytes: of the bucket that needs most.
        sets: exchange buffers that live at a time.
        iterate_bytes: of the matrix that needs most.
        keep: hold the memory between steps; otherwise `release` gives it back.
    """

    def __init__(
        self,
        *,
        exchange_bytes: int,
        sets: int,
        iterate_bytes: int,
        device: torch.device,
        keep: bool,
    ) -> None:
        self._exchange, self._sets = exchange_bytes, sets
        self.nbytes = sets * exchange_bytes + iterate_bytes
        self._device = device
        self._keep = keep
        self._memory: Tensor | None = None
        if keep:
            self._allocate()

    def _allocate(self) -> Tensor:
        if self._memory is None:
            self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        return self._memory

    def send(self, bucket: int, at: Buffers, dtype: torch.dtype, *, way_in: bool) -> Tensor:
        """View what a way of a bucket sends."""
        return self._view(bucket, 0, at.send_in if way_in else at.send_out, dtype)

    def receive(self, bucket: int, at: Buffers, dtype: torch.dtype, *, way_in: bool) -> Tensor:
        """View what a way of a bucket receives."""
        numel = at.receive_in if way_in else at.receive_out
        return self._view(bucket, at.receive_start, numel, dtype)

    def _view(self, bucket: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        start += bucket % self._sets * self._exchange
        return self._allocate()[start : start + numel * dtype.itemsize].view(dtype)

    def iterate(self) -> Tensor:
        """View the memory of one orthogonalisation as bytes."""
        return self._allocate()[self._sets * self._exchange :]

    def release(self) -> None:
        """Give the memory back after a step, unless it is kept."""
        if not self._keep:
            self._memory = None
