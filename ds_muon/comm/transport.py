# SPDX-License-Identifier: Apache-2.0
"""Transport: the collectives that this package issues, as an interface that is passed in.

zero/seams.py makes one of deepspeed.comm calls; tests wrap it to count elements and calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


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
    ) -> None:
        """Exchange variable pieces.

        Args:
            received: flat, filled with the pieces of rank 0, 1, ... in this order.
            sent: flat, the pieces for rank 0, 1, ... in this order.
            received_numels, sent_numels: elements per peer.
        """

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order; for start-up only."""
