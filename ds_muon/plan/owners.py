# SPDX-License-Identifier: Apache-2.0
"""Owners: the one rank that runs Newton-Schulz on a matrix.

Owns: the assignment, a pure function of (layout, cost per matrix, scope); ties break by name.
Never does: cut a matrix, or look at more than integers.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_muon.plan.layout import Layout

# Newton-Schulz flops that take as long as one element's way in and back: two bf16 values at
# 450 GB/s beside 250 Tflop/s. A slower fabric only adds to the reasons for leaving a matrix.
FLOPS_PER_MOVED_ELEMENT = 2000


def assign_owners(layout: Layout, costs: Sequence[int], *, scope: str) -> tuple[int, ...]:
    """Choose an owner for every matrix.

    "straddlers": largest cost first, each to the least loaded of the ranks that hold a piece.
    "balance": the best of three, by the busiest rank's cost and by the elements that the busiest
    rank receives: largest first to the least loaded of all ranks; the same, but each to the rank
    that holds most of it while that keeps the busiest rank no busier; and the same, but whole
    matrices stay where they are (experts that ZeRO-3 keeps whole cost no exchange).

    Args:
        costs: Newton-Schulz flops, or measured time in the same unit, per matrix.
        scope: "balance" or "straddlers".

    Returns:
        The owner's rank per matrix.
    """
    placing = _Placing(layout, costs)
    if scope == "straddlers":
        return placing.largest_first(holders_only=True, whole_stay=True)
    free = placing.largest_first()
    limit = makespan(layout, costs, free)
    candidates = (
        placing.largest_first(whole_stay=True),
        placing.largest_first(stay_below=limit),
        free,
    )
    return min(candidates, key=placing.price)


def makespan(layout: Layout, costs: Sequence[int], owners: Sequence[int]) -> int:
    """Cost of the busiest rank."""
    return max(_loads(layout, costs, owners), default=0)


def _loads(layout: Layout, costs: Sequence[int], owners: Sequence[int]) -> list[int]:
    loads = [0] * layout.world_size
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads


class _Placing:
    """Ways to place the matrices of one layout."""

    def __init__(self, layout: Layout, costs: Sequence[int]) -> None:
        self._layout, self._costs = layout, costs
        self._names = [matrix.name for matrix in layout.matrices]
        self._held_by = [_held_by(layout, i) for i in range(len(self._names))]
        self._turns = _turns(costs, self._held_by)

    def price(self, owners: Sequence[int]) -> int:
        """Cost of the busiest rank, with what the rank that receives most waits for."""
        received = [0] * self._layout.world_size
        for matrix, held, owner in zip(self._layout.matrices, self._held_by, owners, strict=True):
            received[owner] += matrix.numel - held.get(owner, 0)
        busiest = max(received, default=0)
        return makespan(self._layout, self._costs, owners) + FLOPS_PER_MOVED_ELEMENT * busiest

    def largest_first(
        self, *, holders_only: bool = False, whole_stay: bool = False, stay_below: int = -1
    ) -> tuple[int, ...]:
        """Largest cost first, each to the least loaded rank; then to the one that receives least.

        Args:
            holders_only: only ranks that hold a piece are candidates.
            whole_stay: before the others, what one rank holds alone stays there.
            stay_below: a matrix goes to the rank that holds most of it while that one's cost stays
                within this.
        """
        size, costs = self._layout.world_size, self._costs
        owners, loads, received = [-1] * len(self._names), [0] * size, [0] * size
        whole = [whole_stay and len(held) == 1 for held in self._held_by]
        for i in sorted(
            range(len(owners)),
            key=lambda i: (not whole[i], -costs[i], self._turns[i], self._names[i]),
        ):
            held = self._held_by[i]
            most = max(held.values())
            candidates: Sequence[int] = [
                r for r, n in held.items() if n == most and loads[r] + costs[i] <= stay_below
            ]
            if not candidates:
                candidates = list(held) if holders_only or whole[i] else range(size)
            least = min(loads[r] for r in candidates) if len(candidates) < size else min(loads)
            tied = [r for r in candidates if loads[r] == least]
            nearest = [r for r in tied if r in held] if len(tied) > 1 else []
            owner = min(
                (min(tied, key=received.__getitem__), *nearest),
                key=lambda r: (received[r] - held.get(r, 0), -held.get(r, 0), r),
            )
            owners[i] = owner
            loads[owner] += costs[i]
            received[owner] += self._layout.matrices[i].numel - held.get(owner, 0)
        return tuple(owners)


def _held_by(layout: Layout, index: int) -> dict[int, int]:
    held: dict[int, int] = {}
    for piece in layout.fragments[index]:
        held[piece.rank] = held.get(piece.rank, 0) + piece.numel
    return held


def _turns(costs: Sequence[int], held_by: Sequence[dict[int, int]]) -> list[int]:
    """Count, per matrix, the earlier ones of its cost that the same rank holds most of.

    Matrices of equal cost are placed in this order, so that every rank's own come up in turn.
    """
    seen: dict[tuple[int, int], int] = {}
    turns = []
    for cost, held in zip(costs, held_by, strict=True):
        key = (cost, max(held, key=lambda r: (held[r], -r)))
        turns.append(seen.get(key, 0))
        seen[key] = turns[-1] + 1
    return turns
