# SPDX-License-Identifier: Apache-2.0
"""Transport: the collectives that this package issues, as an interface that is passed in.

zero/transport.py makes one of deepspeed.comm calls; tests wrap it to count elements and calls.
Every call is asynchronous: its tensors must live, and stay as they are, until it was waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> Any:
        """Return when its tensors may be read and written again."""


class Transport(Protocol):
    """Collectives over one process group; every rank issues them in the same order."""

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def world_size(self) -> int:
        """Ranks in the group."""

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        *,
        received_numels: Sequence[int],
        sent_numels: Sequence[int],
    ) -> Pending:
        """Exchange flat buffers of variable pieces for rank 0, 1, ...; numels are per peer."""

    def all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """Fill `received` (world_size * numel,) with every rank's `sent` (numel,), by rank."""

    def broadcast(self, tensor: Tensor, *, source: int) -> Pending:
        """Send `tensor` from `source`; the other ranks receive into theirs."""

    def reduce(self, tensor: Tensor, *, destination: int) -> Pending:
        """Sum `tensor` over all ranks into `destination`'s; what the others keep is undefined."""

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Sum `tensor` over all ranks into every rank's."""

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        """Take the largest of every element over all ranks into every rank's."""

    def send_receive(
        self, received: Mapping[int, Tensor], sent: Mapping[int, Tensor]
    ) -> list[Pending]:
        """Exchange tensors with single peers, by their ranks, as one batch."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order; for start-up only."""
