# SPDX-License-Identifier: Apache-2.0
"""Micro-buckets: whole matrices that are exchanged together, under the workspace cap.

Owns: which matrices share a bucket. All ranks meet at each bucket's exchange, so a bucket takes
the next matrices of every owner and keeps the owners busy together.
Never does: cut a matrix; one that exceeds the cap by itself runs with what it needs, and is named.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from ds_muon.plan.costs import CostModel
from ds_muon.plan.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Oversize:
    """A matrix that does not fit the cap, and the bytes its owner needs for it."""

    matrix: str
    need_bytes: int


def buffer_sets(inflight: int) -> int:
    """Buffer pairs alive with `inflight` buckets: one going in, one iterated, one going out."""
    return 1 if inflight == 1 else inflight + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """What the memory of a bucket follows from.

    Attributes:
        cap_bytes: `workspace_mb`; exchange and iteration together, per rank.
        exchange: strategy, which decides the buffers.
        sets: buffer pairs that live at a time (one, or one more than the buckets in flight).
        update_bytes: per element of an update on its way out.
    """

    cap_bytes: int
    exchange: str
    sets: int
    update_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The buckets of one layout.

    Attributes:
        matrices: indices per bucket, in the order of the step.
        oversize: matrices that exceed the cap by themselves.
        peak_bytes: exchange and iteration of the worst bucket, on the rank that needs most.
    """

    matrices: tuple[tuple[int, ...], ...]
    oversize: tuple[Oversize, ...]
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """What one matrix asks of the ranks; elements, but for iterate_bytes."""

    owner: int
    numel: int
    away_in: dict[int, int]
    away_out: dict[int, int]
    iterate_bytes: int


class _Draft:
    """A bucket under construction, with what every rank needs for it."""

    def __init__(
        self, world_size: int, workspace: Workspace, wire_bytes: int, limit_bytes: int
    ) -> None:
        self.matrices: list[int] = []
        self._limit_bytes = limit_bytes
        self._workspace, self._wire_bytes = workspace, wire_bytes
        self._size = world_size
        self._away_in, self._home_in = [0] * world_size, [0] * world_size
        self._away_out, self._home_out = [0] * world_size, [0] * world_size
        self._owned, self._iterate = [0] * world_size, [0] * world_size

    def try_add(self, index: int, demand: _Demand) -> bool:
        """Add a matrix if every rank stays within the limit; the first one always goes in."""
        before = self._iterate[demand.owner]
        self._add(demand, 1)
        self._iterate[demand.owner] = max(before, demand.iterate_bytes)
        personal = self._workspace.exchange in ("all_to_all", "p2p")
        touched = {demand.owner, *demand.away_out} if personal else range(self._size)
        if self.matrices and any(self.need_bytes(r) > self._limit_bytes for r in touched):
            self._add(demand, -1)
            self._iterate[demand.owner] = before
            return False
        self.matrices.append(index)
        return True

    def _add(self, demand: _Demand, sign: int) -> None:
        owner = demand.owner
        for rank, numel in demand.away_in.items():
            self._away_in[rank] += sign * numel
            self._home_in[owner] += sign * numel
        for rank, numel in demand.away_out.items():
            self._away_out[rank] += sign * numel
            self._home_out[owner] += sign * numel
        self._owned[owner] += sign * demand.numel

    def need_bytes(self, rank: int) -> int:
        """Exchange buffers and iteration of one rank; the sizes are plan/traffic.py's."""
        strategy, size = self._workspace.exchange, self._size
        send_in, receive_in = self._away_in[rank], self._home_in[rank]
        send_out, receive_out = self._home_out[rank], self._away_out[rank]
        if strategy == "all_gather":
            send_in, send_out = max(self._away_in), max(self._owned)
            receive_in, receive_out = size * send_in, size * send_out
        elif strategy == "broadcast":
            send_out = self._owned[rank]
            receive_out = sum(self._owned) - send_out
        wire, update = self._wire_bytes, self._workspace.update_bytes
        exchange = max(send_in * wire, send_out * update) + max(
            receive_in * wire, receive_out * update
        )
        return self._workspace.sets * exchange + self._iterate[rank]


def form_buckets(
    layout: Layout,
    owners: Sequence[int],
    flops: Sequence[int],
    model: CostModel,
    workspace: Workspace,
) -> Buckets:
    """Group matrices into buckets whose exchange and iteration fit the cap on every rank.

    All ranks meet at a bucket's exchange, so its slowest owner sets its time: the next matrix goes
    to the owner with the least work in the bucket, and the bucket closes when that one has no room.
    Where a matrix exceeds the cap by itself, every rank may use what that one needs.
    """
    demands = [_demand(layout, i, owner, model) for i, owner in enumerate(owners)]
    alone = [_need_alone(layout.world_size, d, model, workspace) for d in demands]
    by_cost = sorted(range(len(owners)), key=lambda i: (-flops[i], layout.matrices[i].name))
    queues: list[list[int]] = [[] for _ in range(layout.world_size)]
    for index in reversed(by_cost):
        queues[owners[index]].append(index)
    cap, buckets, peak = workspace.cap_bytes, [], 0
    while any(queues):
        limit = max([cap] + [alone[queue[-1]] for queue in queues if queue])
        draft = _Draft(layout.world_size, workspace, model.wire_bytes, limit)
        busy = [(0, owner) for owner, queue in enumerate(queues) if queue]
        while busy:
            load, owner = heapq.heappop(busy)
            index = queues[owner][-1]
            if not draft.try_add(index, demands[index]):
                break
            queues[owner].pop()
            if queues[owner]:
                heapq.heappush(busy, (load + flops[index], owner))
        buckets.append(tuple(draft.matrices))
        peak = max(peak, *(draft.need_bytes(rank) for rank in range(layout.world_size)))
    oversize = tuple(
        Oversize(matrix=layout.matrices[i].name, need_bytes=alone[i])
        for i in by_cost
        if alone[i] > cap
    )
    return Buckets(matrices=tuple(buckets), oversize=oversize, peak_bytes=peak)


def _need_alone(world_size: int, demand: _Demand, model: CostModel, workspace: Workspace) -> int:
    draft = _Draft(world_size, workspace, model.wire_bytes, 0)
    draft.try_add(0, demand)
    return draft.need_bytes(demand.owner)


def _demand(layout: Layout, index: int, owner: int, model: CostModel) -> _Demand:
    away: dict[int, int] = {}
    for piece in layout.fragments[index]:
        if piece.rank != owner:
            away[piece.rank] = away.get(piece.rank, 0) + piece.numel
    matrix = layout.matrices[index]
    return _Demand(
        owner=owner,
        numel=matrix.numel,
        away_in={} if layout.is_replicated(index) else away,
        away_out=away,
        iterate_bytes=model.workspace_bytes(matrix.rows, matrix.cols),
    )
