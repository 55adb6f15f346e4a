# SPDX-License-Identifier: Apache-2.0
"""Routes: which ranges of a bucket's matrices travel from which rank to which.

Owns: the way in (pieces to their owner) and the way out (the owner's update to every holder).
Never does: move anything; comm/strategies.py walks these records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_muon.plan.layout import Fragment, Layout


class Piece(NamedTuple):
    """A range of one matrix between a holder and the matrix's owner; all sizes in elements."""

    matrix: int
    holder: int
    owner: int
    fragment: Fragment

    @property
    def moves(self) -> bool:
        """Whether the range has to travel at all."""
        return self.holder != self.owner

    @property
    def numel(self) -> int:
        """Elements in the range."""
        return self.fragment.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRoute:
    """The traffic of one micro-bucket.

    Attributes:
        pieces: every fragment of the bucket's matrices, in matrix order. The way out visits all
            of them; the way in only those whose matrix is not replicated, since the owner of a
            replicated matrix already holds it whole.
        inbound: per piece, whether it takes part in the way in.
    """

    world_size: int
    matrices: tuple[int, ...]
    pieces: tuple[Piece, ...]
    inbound: tuple[bool, ...]

    def moving(self, *, way_in: bool) -> tuple[Piece, ...]:
        """Pieces that travel on this way, in the order both ends pack them."""
        return tuple(
            piece
            for piece, goes_in in zip(self.pieces, self.inbound, strict=True)
            if piece.moves and (goes_in or not way_in)
        )


def route_bucket(layout: Layout, owners: Sequence[int], matrices: Sequence[int]) -> BucketRoute:
    """Derive the traffic of one bucket."""
    pieces, inbound = [], []
    for index in matrices:
        replicated = layout.is_replicated(index)
        for fragment in layout.fragments[index]:
            pieces.append(
                Piece(
                    matrix=index,
                    holder=fragment.rank,
                    owner=owners[index],
                    fragment=fragment,
                )
            )
            inbound.append(not replicated)
    return BucketRoute(
        world_size=layout.world_size,
        matrices=tuple(matrices),
        pieces=tuple(pieces),
        inbound=tuple(inbound),
    )
