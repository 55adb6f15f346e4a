# SPDX-License-Identifier: Apache-2.0
"""Replicas: what HSDP adds to a plan; R replicas of a shard group of G ranks, R * G ranks in all.

    replica 0   [ 0 1 2 3 ]     a row: ZeRO partitions over it, and the exchange stays inside it
    replica 1   [ 4 5 6 7 ]
                  | a column: the ranks that hold the same pieces

Every matrix has one owner in the world: a row, and a rank in it. Down the columns gradients are
reduced to the owning row, and updates published to the others.

Owns: the split of one layout over rows, and the messages and reductions of a column as integers.
Never does: choose an owner inside a row; owners.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_muon.plan.blocks import Block, one_run
from ds_muon.plan.layout import Fragment, Layout, Matrix
from ds_muon.plan.plan import Plan


def split_over_replicas(
    layouts: Sequence[Layout], costs: Sequence[Sequence[int]], replicas: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Give every matrix to one replica, largest cost first, each to the least loaded.

    Loads are those of all layouts together: rows do not meet between the leaves of a step. Among
    equally loaded replicas a matrix goes where the ranks that hold it publish least so far, so that
    columns are balanced too.

    Args:
        layouts: of one replica, in the order of a step; all replicas are laid out alike.
        costs: per layout, of each matrix.

    Returns:
        Per layout, the indices of its matrices per replica, ascending.
    """
    chosen: list[list[list[int]]] = [[[] for _ in range(replicas)] for _ in layouts]
    loads = [0] * replicas
    published = [[0] * layouts[0].world_size for _ in range(replicas)] if layouts else []
    everything = [
        (-cost, matrix.name, number, index)
        for number, layout in enumerate(layouts)
        for index, (matrix, cost) in enumerate(zip(layout.matrices, costs[number], strict=True))
    ]
    for cost, _, number, index in sorted(everything):
        pieces = layouts[number].fragments[index]
        least = min(loads)
        candidates = [r for r in range(replicas) if loads[r] == least]
        replica = min(
            candidates, key=lambda r: (sum(p.numel * published[r][p.rank] for p in pieces), r)
        )
        chosen[number][replica].append(index)
        loads[replica] -= cost
        for piece in pieces:
            published[replica][piece.rank] += piece.numel
    return tuple(tuple(tuple(sorted(row)) for row in of_layout) for of_layout in chosen)


def restrict(layout: Layout, indices: Sequence[int]) -> Layout:
    """Keep some of a layout's matrices where they are, with their momentum side by side."""
    filled: dict[tuple[int, int], int] = {}
    fragments = []
    for index in indices:
        kept = []
        for piece in layout.fragments[index]:
            offset = filled.get((piece.rank, piece.leaf), 0)
            kept.append(piece._replace(momentum=one_run(offset, piece.numel)))
            filled[piece.rank, piece.leaf] = offset + piece.numel
        fragments.append(tuple(kept))
    return Layout(
        world_size=layout.world_size,
        matrices=tuple(layout.matrices[i] for i in indices),
        fragments=tuple(fragments),
    )


def plan_rows(
    layouts: Sequence[Layout],
    costs: Sequence[Sequence[int]],
    replicas: int,
    plan: Callable[[Layout], Plan],
) -> tuple[tuple[Plan, ...], ...]:
    """Plan every replica's own matrices of each layout; buckets come in the layout's order.

    That order is the model's, so that what the next forward uses first is published first.
    """
    return tuple(
        tuple(plan(restrict(layout, indices)).in_layout_order() for indices in rows)
        for layout, rows in zip(layouts, split_over_replicas(layouts, costs, replicas), strict=True)
    )


def momentum_numel(row: Plan, shard: int) -> int:
    """Elements of momentum that a rank of this row keeps."""
    return sum(piece.numel for _, piece in held(row, shard))


def held(row: Plan, shard: int) -> Iterator[tuple[int, Fragment]]:
    """Matrices of a row's plan and the pieces of them that one of its ranks holds."""
    for index, pieces in enumerate(row.layout.fragments):
        for piece in pieces:
            if piece.rank == shard:
                yield index, piece


class Part(NamedTuple):
    """A fragment in a packed buffer."""

    matrix: Matrix
    fragment: Fragment
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The updates of one bucket of one replica, packed, as they go down one column.

    Attributes:
        replica: whose matrices these are; it broadcasts, and its own rank needs nothing.
        numel: elements of the packed buffer.
    """

    replica: int
    bucket: int
    parts: tuple[Part, ...]
    numel: int


def messages(rows: Sequence[Plan], shard: int) -> tuple[tuple[Message, ...], ...]:
    """What is published down column `shard`: per bucket number, one message per replica.

    Every rank of the column issues them in this order; a message without content is left out.
    """
    return tuple(
        tuple(
            message
            for replica, row in enumerate(rows)
            if number < len(row.routes)
            if (message := _message(row, replica, number, shard)).numel
        )
        for number in range(max((len(row.routes) for row in rows), default=0))
    )


def _message(row: Plan, replica: int, number: int, shard: int) -> Message:
    parts, numel = [], 0
    for index in sorted(row.routes[number].matrices):
        for piece in row.layout.fragments[index]:
            if piece.rank == shard:
                parts.append(Part(matrix=row.layout.matrices[index], fragment=piece, offset=numel))
                numel += piece.numel
    return Message(replica=replica, bucket=number, parts=tuple(parts), numel=numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Blocks of a leaf's gradient that are summed down a column in one call.

    Attributes:
        destination: the replica that gets the sum; None: all do.
    """

    destination: int | None
    blocks: tuple[Block, ...]

    @property
    def numel(self) -> int:
        """Elements of the packed buffer."""
        return sum(block.numel for block in self.blocks)


def reductions(
    rows: Sequence[Plan] | None, shard: int, *, leaf_numel: int, chunk_numel: int
) -> tuple[Reduction, ...]:
    """What is reduced down column `shard` for one leaf: matrices to their row, the rest to all.

    Args:
        rows: plans of the leaf's matrices; None: a leaf of the AdamW half.
        chunk_numel: elements per call at most.
    """
    if rows is None:
        return _chunks(None, [one_run(0, leaf_numel)], chunk_numel)
    return tuple(
        reduction
        for replica, row in enumerate(rows)
        for reduction in _chunks(replica, [p.place for _, p in held(row, shard)], chunk_numel)
    )


def _chunks(
    destination: int | None, blocks: Sequence[Block], chunk_numel: int
) -> tuple[Reduction, ...]:
    found: list[list[Block]] = []
    room = 0
    for block in sorted(blocks):
        first = 0
        while first < block.numel:
            if not room:
                found.append([])
                room = chunk_numel
            taken = min(block.numel - first, room)
            found[-1].extend(block.cut(first, first + taken))
            first, room = first + taken, room - taken
    return tuple(Reduction(destination=destination, blocks=tuple(chunk)) for chunk in found)
