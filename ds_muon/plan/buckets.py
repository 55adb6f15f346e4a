# SPDX-License-Identifier: Apache-2.0
"""Micro-buckets: whole matrices that are exchanged together, under the workspace cap.

Owns: which matrices share a bucket. All ranks meet at each bucket's exchange, so its slowest owner
sets its time, and a bucket is made of rounds in which the owners have equally much to do.
Never does: cut a matrix; one that exceeds the cap by itself runs with what it needs, and is named.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ds_muon.plan.costs import CostModel
from ds_muon.plan.layout import Layout
from ds_muon.plan.memory import ALIGNMENT_BYTES, Workspace, buffers
from ds_muon.plan.traffic import PERSONAL, way_numels


@dataclass(frozen=True, slots=True, kw_only=True)
class Oversize:
    """A matrix that does not fit the cap, and the bytes its owner needs for it."""

    matrix: str
    need_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The buckets of one layout.

    Attributes:
        matrices: indices per bucket, in the order of the step.
        oversize: matrices that exceed the cap by themselves.
        exchange_bytes: per rank, of the largest bucket; the workspace's `sets` of them live.
        iterate_bytes: per rank, of the largest matrix it owns.
    """

    matrices: tuple[tuple[int, ...], ...]
    oversize: tuple[Oversize, ...]
    exchange_bytes: tuple[int, ...]
    iterate_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """What one matrix asks of the ranks; elements, but for iterate_bytes."""

    owner: int
    numel: int
    away_in: dict[int, int]
    away_out: dict[int, int]
    iterate_bytes: int


class _Draft:
    """A bucket under construction, and the exchange buffers that every rank needs for it.

    Args:
        budgets: exchange bytes that each rank may need.
    """

    def __init__(self, workspace: Workspace, budgets: Sequence[int]) -> None:
        self._workspace, self._budgets = workspace, budgets
        self._size = size = len(budgets)
        self._away_in, self._home_in = [0] * size, [0] * size
        self._away_out, self._home_out = [0] * size, [0] * size
        self._owned = [0] * size
        # At least this many bytes are left on every rank; exact sums are taken when it runs out.
        self._room = min(budgets)

    def add(self, demand: _Demand, sign: int = 1) -> None:
        """Add a matrix, or with sign -1 take it out again."""
        owner = demand.owner
        for away, home, moved in (
            (self._away_in, self._home_in, demand.away_in),
            (self._away_out, self._home_out, demand.away_out),
        ):
            for rank, numel in moved.items():
                away[rank] += sign * numel
            home[owner] += sign * sum(moved.values())
        self._owned[owner] += sign * demand.numel

    def fits(self, demand: _Demand) -> bool:
        """Whether every rank is within its budget, now that `demand` has been added."""
        if self._workspace.exchange not in PERSONAL:
            pairs = zip(self.all_exchange_bytes(), self._budgets, strict=True)
            return all(nbytes <= budget for nbytes, budget in pairs)
        if not demand.away_out:
            return True
        # A holder sends its piece in, and receives it on the way out.
        both = self._workspace.wire_bytes + self._workspace.update_bytes
        grown = max(demand.away_out.values()) * both + 2 * ALIGNMENT_BYTES
        at_owner = self._budgets[demand.owner] - self.exchange_bytes(demand.owner)
        self._room = min(self._room - grown, at_owner)
        if self._room < 0 and at_owner >= 0:
            pairs = zip(self._budgets, self.all_exchange_bytes(), strict=True)
            self._room = min(budget - nbytes for budget, nbytes in pairs)
        return self._room >= 0

    def all_exchange_bytes(self) -> list[int]:
        """Exchange buffers of every rank."""
        widest = (max(self._away_in), max(self._owned))
        everything = sum(self._owned)
        return [self.exchange_bytes(r, widest, everything) for r in range(self._size)]

    def exchange_bytes(
        self, rank: int, widest: tuple[int, int] = (0, 0), everything: int = 0
    ) -> int:
        """Exchange buffers of one rank; the last two matter to strategies that share them."""
        ways = []
        for way_in, away, home in (
            (True, self._away_in, self._home_in),
            (False, self._away_out, self._home_out),
        ):
            ways.append(
                way_numels(
                    self._workspace.exchange,
                    self._size,
                    away=away[rank],
                    home=home[rank],
                    owned=self._owned[rank],
                    widest=widest[0 if way_in else 1],
                    everything=everything,
                    way_in=way_in,
                )
                if any(away)
                else (0, 0)
            )
        (send_in, receive_in), (send_out, receive_out) = ways
        return buffers(
            self._workspace,
            send_in=send_in,
            receive_in=receive_in,
            send_out=send_out,
            receive_out=receive_out,
        ).nbytes


def form_buckets(
    layout: Layout,
    owners: Sequence[int],
    costs: Sequence[int],
    model: CostModel,
    workspace: Workspace,
) -> Buckets:
    """Group matrices into buckets whose exchange and iteration fit the cap on every rank.

    Where a matrix exceeds the cap by itself, every rank may use what that one needs.
    """
    size, fixed = layout.world_size, workspace.staging_bytes
    demands = [_demand(layout, i, owner, model) for i, owner in enumerate(owners)]
    iterate = [0] * size
    for demand in demands:
        iterate[demand.owner] = max(iterate[demand.owner], demand.iterate_bytes)
    need = [_need_alone(demand, iterate, workspace) for demand in demands]
    limit = max([workspace.cap_bytes, *need])
    budgets = [(limit - fixed - nbytes) // workspace.sets for nbytes in iterate]
    matrices, exchange = _fill(_Queues(layout, owners, costs), demands, budgets, workspace)
    oversize = tuple(
        Oversize(matrix=matrix.name, need_bytes=nbytes)
        for matrix, nbytes in zip(layout.matrices, need, strict=True)
        if nbytes > workspace.cap_bytes
    )
    return Buckets(
        matrices=matrices,
        oversize=oversize,
        exchange_bytes=tuple(exchange),
        iterate_bytes=tuple(iterate),
    )


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
        iterate_bytes=model.iterate_bytes(matrix.rows, matrix.cols),
    )


def _need_alone(demand: _Demand, iterate: Sequence[int], workspace: Workspace) -> int:
    """Bytes that one matrix asks of the rank that it asks most of.

    All ranks can be at such a matrix at a time where each receives only what is its own: then the
    pieces that a rank holds of the others' fit beside. The iteration is that of the rank's largest
    matrix, for which the memory is there anyway.
    """
    if workspace.exchange in PERSONAL:
        away = sum(demand.away_out.values())
        inward = away if demand.away_in else 0
        exchange = buffers(
            workspace, send_in=inward, receive_in=inward, send_out=away, receive_out=away
        ).nbytes
        ranks = (demand.owner, *demand.away_out)
        busiest = workspace.sets * exchange + max(iterate[r] for r in ranks)
    else:
        draft = _Draft(workspace, [0] * len(iterate))
        draft.add(demand)
        pairs = zip(draft.all_exchange_bytes(), iterate, strict=True)
        busiest = max(workspace.sets * nbytes + i for nbytes, i in pairs)
    return busiest + workspace.staging_bytes


# A round may run over its largest matrix by these factors where that shortens what is left.
_STRETCHES = (1.0, 1.05, 1.1, 1.2)


class _Queues:
    """Per owner, the matrices it has still to do, by cost."""

    def __init__(self, layout: Layout, owners: Sequence[int], costs: Sequence[int]) -> None:
        names = [m.name for m in layout.matrices]
        by_cost = sorted(range(len(owners)), key=lambda i: (costs[i], names[i]), reverse=True)
        self._costs = costs
        self._waiting: list[list[int]] = [[] for _ in range(layout.world_size)]
        for index in reversed(by_cost):
            self._waiting[owners[index]].append(index)
        self._left = [sum(costs[i] for i in queue) for queue in self._waiting]

    def __bool__(self) -> bool:
        return any(self._waiting)

    def save(self) -> tuple[list[list[int]], list[int]]:
        """Return what `restore` takes."""
        return [list(queue) for queue in self._waiting], list(self._left)

    def restore(self, saved: tuple[list[list[int]], list[int]]) -> None:
        """Undo what was removed since `save`."""
        self._waiting, self._left = [list(queue) for queue in saved[0]], list(saved[1])

    def critical(self) -> int:
        """Cost that the busiest owner has still to do."""
        return max(self._left)

    def owners(self) -> list[int]:
        """Owners that have something to do."""
        return [owner for owner, queue in enumerate(self._waiting) if queue]

    def largest(self) -> int:
        """Cost of the largest matrix that waits."""
        return max(self._costs[queue[-1]] for queue in self._waiting if queue)

    def position(self, owner: int, room: int) -> int:
        """Where the owner's largest matrix of at most cost `room` stands; -1: there is none."""
        return bisect_right(self._waiting[owner], room, key=lambda i: self._costs[i]) - 1

    def at(self, owner: int, position: int) -> tuple[int, int]:
        """Return the matrix at a position, and its cost."""
        index = self._waiting[owner][position]
        return index, self._costs[index]

    def remove(self, owner: int, position: int) -> None:
        """Take a matrix out."""
        self._left[owner] -= self._costs[self._waiting[owner].pop(position)]


def _fill(
    queues: _Queues, demands: Sequence[_Demand], budgets: Sequence[int], workspace: Workspace
) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """Fill one bucket after the other with as many complete rounds as fit, with one in any case."""
    size = len(budgets)
    buckets, peaks = [], [0] * size
    while queues:
        draft, members = _Draft(workspace, budgets), list[int]()
        complete = True
        while queues and complete:
            saved = queues.save()
            taken, complete = _best_round(queues, draft, demands)
            if members and not complete:
                queues.restore(saved)
                _withdraw(draft, demands, taken)
            else:
                members += taken
        buckets.append(tuple(members))
        peaks = [max(pair) for pair in zip(peaks, draft.all_exchange_bytes(), strict=True)]
    return tuple(buckets), peaks


def _withdraw(draft: _Draft, demands: Sequence[_Demand], taken: Sequence[int]) -> None:
    for index in taken:
        draft.add(demands[index], -1)


def _best_round(
    queues: _Queues, draft: _Draft, demands: Sequence[_Demand]
) -> tuple[list[int], bool]:
    """Take the round after which the least is lost: its own time and the busiest owner's rest."""
    before, saved = queues.critical(), queues.save()
    largest = queues.largest()
    best: tuple[int, int] | None = None
    for stretch in _STRETCHES:
        span = int(largest * stretch)
        taken, complete, time = _round(queues, draft, demands, span)
        lost = time + queues.critical() - before
        if lost == 0:
            return taken, complete
        if best is None or lost < best[0]:
            best = (lost, span)
        queues.restore(saved)
        _withdraw(draft, demands, taken)
    if best is None:
        raise AssertionError("no round was tried")
    taken, complete, _ = _round(queues, draft, demands, best[1])
    return taken, complete


def _round(
    queues: _Queues,
    draft: _Draft,
    demands: Sequence[_Demand],
    span: int,
) -> tuple[list[int], bool, int]:
    """Give every owner matrices up to the cost `span`.

    Returns:
        The matrices taken, whether no rank's budget stood in the way, and the largest owner's cost.
    """
    taken, complete, time = list[int](), True, 0
    busy = [(0, owner) for owner in queues.owners()]
    while busy:
        load, owner = heapq.heappop(busy)
        time = max(time, load)
        position = queues.position(owner, span - load)
        if position < 0:
            continue
        index, cost = queues.at(owner, position)
        draft.add(demands[index])
        if not draft.fits(demands[index]):
            draft.add(demands[index], -1)
            complete = False
            continue
        queues.remove(owner, position)
        taken.append(index)
        heapq.heappush(busy, (load + cost, owner))
    return taken, complete, time
