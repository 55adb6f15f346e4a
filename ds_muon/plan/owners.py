# SPDX-License-Identifier: Apache-2.0
"""Owners: the one rank that runs Newton-Schulz on a matrix.

Owns: the assignment, a pure function of (layout, cost per matrix, scope); ties break by name.
Never does: cut a matrix, or look at more than integers.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_muon.plan.layout import Layout


def assign_owners(layout: Layout, costs: Sequence[int], *, scope: str) -> tuple[int, ...]:
    """Choose an owner for every matrix.

    Largest cost first, each to the least loaded candidate; then to the rank that receives least,
    then to the one that holds most of it. "balance" takes every rank as a candidate, unless
    leaving whole matrices where they are is no slower: then those cost no exchange at all
    (experts that ZeRO-3 happens to keep whole). "straddlers" takes only ranks that hold a piece.

    Args:
        costs: Newton-Schulz flops, or measured time, per matrix.
        scope: "balance" or "straddlers".

    Returns:
        The owner's rank per matrix.
    """
    if scope == "straddlers":
        return _largest_first(layout, costs, holders_only=True, whole_stay=True)
    free = _largest_first(layout, costs, holders_only=False, whole_stay=False)
    local = _largest_first(layout, costs, holders_only=False, whole_stay=True)
    rank_by = [(makespan(layout, costs, o), moved_numel(layout, o)) for o in (free, local)]
    return local if rank_by[1] <= rank_by[0] else free


def makespan(layout: Layout, costs: Sequence[int], owners: Sequence[int]) -> int:
    """Cost of the busiest rank."""
    loads = [0] * layout.world_size
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return max(loads, default=0)


def moved_numel(layout: Layout, owners: Sequence[int]) -> int:
    """Elements that travel to their owner, summed over matrices."""
    return sum(
        matrix.numel - layout.held_numel(i, owners[i]) for i, matrix in enumerate(layout.matrices)
    )


def _largest_first(
    layout: Layout, costs: Sequence[int], *, holders_only: bool, whole_stay: bool
) -> tuple[int, ...]:
    matrices = layout.matrices
    owners = [-1] * len(matrices)
    loads = [0] * layout.world_size
    received = [0] * layout.world_size
    by_cost = sorted(range(len(matrices)), key=lambda i: (-costs[i], matrices[i].name))
    settled = [i for i in by_cost if whole_stay and len(layout.holders(i)) == 1]
    for i in settled:
        owners[i] = layout.holders(i)[0]
        loads[owners[i]] += costs[i]
    for i in by_cost:
        if owners[i] >= 0:
            continue
        held = [0] * layout.world_size
        for piece in layout.fragments[i]:
            held[piece.rank] += piece.numel
        candidates = layout.holders(i) if holders_only else range(layout.world_size)
        owner = min(candidates, key=lambda r: (loads[r], received[r] - held[r], -held[r], r))
        owners[i] = owner
        loads[owner] += costs[i]
        received[owner] += matrices[i].numel - held[owner]
    return tuple(owners)
