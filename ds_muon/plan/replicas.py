# SPDX-License-Identifier: Apache-2.0
"""Replicas: which replica of a shard group orthogonalises which matrix (HSDP).

Owns: the split of one layout over the replicas; owners inside a replica are owners.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_muon.plan.layout import Layout


def split_over_replicas(
    layout: Layout, costs: Sequence[int], replicas: int
) -> tuple[tuple[int, ...], ...]:
    """Give every matrix to one replica, largest cost first, each to the least loaded.

    Args:
        layout: of one replica; all are laid out alike.

    Returns:
        Indices of the layout's matrices per replica, ascending.
    """
    names = [m.name for m in layout.matrices]
    chosen: list[list[int]] = [[] for _ in range(replicas)]
    loads = [0] * replicas
    for index in sorted(range(len(names)), key=lambda i: (-costs[i], names[i])):
        replica = min(range(replicas), key=lambda r: (loads[r], r))
        chosen[replica].append(index)
        loads[replica] += costs[index]
    return tuple(tuple(sorted(indices)) for indices in chosen)


def restrict(layout: Layout, indices: Sequence[int]) -> Layout:
    """Keep some of a layout's matrices, where they are."""
    return Layout(
        world_size=layout.world_size,
        matrices=tuple(layout.matrices[i] for i in indices),
        fragments=tuple(layout.fragments[i] for i in indices),
    )
