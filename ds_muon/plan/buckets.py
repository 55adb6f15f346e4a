# SPDX-License-Identifier: Apache-2.0
"""Micro-buckets: whole matrices that are exchanged together, under the workspace cap.

Owns: which matrices share a bucket. All ranks meet at each bucket's exchange, so a bucket takes
the next matrices of every owner and keeps the owners busy together.
Never does: cut a matrix; one that exceeds the cap by itself runs with what it needs, and is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_muon.plan.costs import CostModel
from ds_muon.plan.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Oversize:
    """A matrix that does not fit the cap, and the bytes its owner needs for it."""

    matrix: str
    need_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """What one matrix asks of the ranks: bytes of exchange buffer each, and its iteration."""

    owner: int
    exchange_bytes: dict[int, int]
    iterate_bytes: int

    @property
    def owner_bytes(self) -> int:
        return self.exchange_bytes[self.owner] + self.iterate_bytes


class _Draft:
    """A bucket under construction, with the bytes every rank needs for it."""

    def __init__(self, limits: Sequence[int]) -> None:
        self.matrices: list[int] = []
        self._limits = limits
        self._exchange = [0] * len(limits)
        self._iterate = [0] * len(limits)

    def try_add(self, index: int, demand: _Demand) -> bool:
        """Add a matrix if every rank stays within its limit; the first one always goes in.

        An owner's limit admits its next matrix, and a holder needs less for it than its owner.
        """
        if self.matrices and not all(
            self._needed(rank, demand) <= self._limits[rank] for rank in demand.exchange_bytes
        ):
            return False
        for rank, size in demand.exchange_bytes.items():
            self._exchange[rank] += size
        owner = demand.owner
        self._iterate[owner] = max(self._iterate[owner], demand.iterate_bytes)
        self.matrices.append(index)
        return True

    def _needed(self, rank: int, demand: _Demand) -> int:
        iterate = self._iterate[rank]
        if rank == demand.owner:
            iterate = max(iterate, demand.iterate_bytes)
        return self._exchange[rank] + demand.exchange_bytes[rank] + iterate


def form_buckets(
    layout: Layout, owners: Sequence[int], model: CostModel, *, cap_bytes: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[Oversize, ...]]:
    """Group matrices into buckets whose exchange and iteration fit `cap_bytes` on every rank.

    Returns:
        Matrix indices per bucket, and the matrices that exceed the cap by themselves.
    """
    demands = [_demand(layout, i, owner, model) for i, owner in enumerate(owners)]
    by_size = sorted(
        range(len(owners)), key=lambda i: (-layout.matrices[i].numel, layout.matrices[i].name)
    )
    queues: list[list[int]] = [[] for _ in range(layout.world_size)]
    for index in reversed(by_size):
        queues[owners[index]].append(index)
    buckets = []
    while any(queues):
        limits = [
            max(cap_bytes, demands[queue[-1]].owner_bytes) if queue else cap_bytes
            for queue in queues
        ]
        draft = _Draft(limits)
        taken = -1
        while taken != len(draft.matrices):
            taken = len(draft.matrices)
            for queue in queues:
                if queue and draft.try_add(queue[-1], demands[queue[-1]]):
                    queue.pop()
        buckets.append(tuple(draft.matrices))
    oversize = tuple(
        Oversize(matrix=layout.matrices[i].name, need_bytes=demands[i].owner_bytes)
        for i in by_size
        if demands[i].owner_bytes > cap_bytes
    )
    return tuple(buckets), oversize


def _demand(layout: Layout, index: int, owner: int, model: CostModel) -> _Demand:
    """Exchange bytes: a holder buffers its piece, the owner all pieces that others hold."""
    element_bytes = max(model.wire_bytes, model.compute_bytes)
    exchange = {owner: 0}
    for piece in layout.fragments[index]:
        if piece.rank != owner:
            exchange[piece.rank] = exchange.get(piece.rank, 0) + piece.numel * element_bytes
            exchange[owner] += piece.numel * element_bytes
    matrix = layout.matrices[index]
    return _Demand(
        owner=owner,
        exchange_bytes=exchange,
        iterate_bytes=model.workspace_bytes(matrix.rows, matrix.cols),
    )
