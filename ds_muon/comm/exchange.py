# SPDX-License-Identifier: Apache-2.0
"""Exchange: one bucket's pieces to their owners, and the owners' updates back.

Owns: the order of pieces in the buffers, and the buffers. On the way in a rank sends from the
"away" buffer and receives into the "home" buffer; on the way out the two change roles, so that a
piece keeps its place in both.
Never does: math; what is written into a piece, and what is done with one, is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_muon.comm.transport import Transport
from ds_muon.plan.routes import BucketRoute, Piece

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One buffer's content: pieces in packing order, and elements per peer.

    Attributes:
        slots: (piece, offset in elements).
        peer_numels: elements for or from rank 0, 1, ...
    """

    slots: tuple[tuple[Piece, int], ...]
    peer_numels: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the buffer."""
        return sum(self.peer_numels)


def _side(pieces: list[Piece], peers: list[int], world_size: int) -> Side:
    """Pack `pieces` grouped by peer rank, in their given order within a peer."""
    order = sorted(range(len(pieces)), key=lambda i: peers[i])
    slots, numels, offset = [], [0] * world_size, 0
    for i in order:
        slots.append((pieces[i], offset))
        offset += pieces[i].numel
        numels[peers[i]] += pieces[i].numel
    return Side(slots=tuple(slots), peer_numels=tuple(numels))


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One direction of one bucket on this rank; `silent` if no rank has anything to send."""

    away: Side
    home: Side
    silent: bool


def plan_way(route: BucketRoute, rank: int, *, way_in: bool) -> Way:
    """Lay out the buffers of `rank` for one direction of a bucket."""
    moving = route.moving(way_in=way_in)
    away = [p for p in moving if p.holder == rank]
    home = [p for p in moving if p.owner == rank]
    return Way(
        away=_side(away, [p.owner for p in away], route.world_size),
        home=_side(home, [p.holder for p in home], route.world_size),
        silent=not moving,
    )


class ExchangeBuffers:
    """Two byte buffers, sized once for the largest bucket and viewed in any dtype.

    Args:
        away_bytes, home_bytes: largest need over all buckets.
        keep: hold the memory between steps; otherwise `release` gives it back.
    """

    def __init__(
        self, *, away_bytes: int, home_bytes: int, device: torch.device, keep: bool
    ) -> None:
        self._split = -(-away_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.nbytes = self._split + home_bytes
        self._device = device
        self._keep = keep
        self._memory: Tensor | None = None
        if keep:
            self._allocate()

    def _allocate(self) -> Tensor:
        if self._memory is None:
            self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        return self._memory

    def away(self, numel: int, dtype: torch.dtype) -> Tensor:
        """View `numel` elements of the buffer for pieces held for others."""
        return self._allocate()[: self._split][: numel * dtype.itemsize].view(dtype)

    def home(self, numel: int, dtype: torch.dtype) -> Tensor:
        """View `numel` elements of the buffer for pieces of matrices owned here."""
        return self._allocate()[self._split :][: numel * dtype.itemsize].view(dtype)

    def release(self) -> None:
        """Give the memory back after a step, unless it is kept."""
        if not self._keep:
            self._memory = None


def run_way(
    transport: Transport, way: Way, buffers: ExchangeBuffers, *, dtype: torch.dtype, way_in: bool
) -> None:
    """Issue the collective of one direction; every rank issues it, or none does."""
    if way.silent:
        return
    away = buffers.away(way.away.numel, dtype)
    home = buffers.home(way.home.numel, dtype)
    if way_in:
        transport.all_to_all(
            home, away, received_numels=way.home.peer_numels, sent_numels=way.away.peer_numels
        )
    else:
        transport.all_to_all(
            away, home, received_numels=way.away.peer_numels, sent_numels=way.home.peer_numels
        )
