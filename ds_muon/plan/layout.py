# SPDX-License-Identifier: Apache-2.0
"""Layout: which elements of which matrix stand where in which rank's flat leaf.

Owns: Matrix, Fragment, Layout, and the three ways a ZeRO regime lays matrices out.
Never does: read them off DeepSpeed (zero/ does), choose owners (owners.py does).

A flat partition of 2 ranks over matrices A, B, C (ZeRO-1/2; "|" is the partition edge):

    flat   [ A A A A B B | B C C C . . ]      B is a straddler: 2 of its 3 elements on rank 0
    rank 0 [ A A A A B B ]   rank 1 [ B C C C . . ]     "." is padding, no fragment names it

ZeRO-3 gives every rank 1/N of every parameter instead, the last pieces short or empty:

    rank 0 [ A A | B B | C C ]   rank 1 [ A A | B . | C . ]

Several matrices may share a parameter, one after another or interleaved (plan/blocks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_muon.plan.blocks import Block, one_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One logical matrix: what Newton-Schulz is applied to.

    Attributes:
        name: unique; the parameter's name, with an index for one of several in a parameter.
        rows, cols: as stored, row-major.
        transposed: the stored rows are the layer's inputs (HF Conv1D), so that the lr factor sees
            (cols, rows).
    """

    name: str
    rows: int
    cols: int
    transposed: bool = False

    @property
    def numel(self) -> int:
        """Elements of the matrix."""
        return self.rows * self.cols


class Fragment(NamedTuple):
    """A contiguous range of a matrix, and the block that it is in one rank's leaf.

    `momentum` is where its momentum stands in the leaf's buffer: as in the leaf, but for replicas
    that keep the momentum of their own matrices only (plan/replicas.py).
    """

    rank: int
    leaf: int
    matrix_offset: int
    place: Block
    momentum: Block

    @property
    def numel(self) -> int:
        """Elements of the range."""
        return self.place.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A matrix inside a parameter.

    Attributes:
        offset: of its first element in the parameter's storage, or in a buffer of parameters.
        run, stride: elements that stand together, and from the start of one run to the next;
            run 0: all of them do.
    """

    matrix: Matrix
    offset: int
    run: int = 0
    stride: int = 0

    @property
    def block(self) -> Block:
        """All of the matrix's elements."""
        if not self.run:
            return one_run(self.offset, self.matrix.numel)
        return Block(self.offset, self.matrix.numel, self.run, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where every matrix of a set of leaves lies, on all ranks.

    Attributes:
        fragments: per matrix, ordered by (matrix_offset, rank). They either partition the matrix
            over the ranks, or are one whole copy per rank (a replicated matrix).
    """

    world_size: int
    matrices: tuple[Matrix, ...]
    fragments: tuple[tuple[Fragment, ...], ...]

    def __post_init__(self) -> None:
        for matrix, pieces in zip(self.matrices, self.fragments, strict=True):
            if self._is_replicated(matrix, pieces):
                continue
            covered = 0
            for piece in pieces:
                if piece.matrix_offset != covered or piece.numel <= 0:
                    raise AssertionError(f"fragments of {matrix.name} do not tile it: {pieces}")
                covered += piece.numel
            if covered != matrix.numel:
                raise AssertionError(f"{matrix.name}: {covered=} of {matrix.numel=} elements")

    def _is_replicated(self, matrix: Matrix, pieces: Sequence[Fragment]) -> bool:
        whole = all(p.numel == matrix.numel and p.matrix_offset == 0 for p in pieces)
        return whole and [p.rank for p in pieces] == list(range(self.world_size))

    def is_replicated(self, index: int) -> bool:
        """Whether every rank holds the whole matrix."""
        return self._is_replicated(self.matrices[index], self.fragments[index])

    def held_numel(self, index: int, rank: int) -> int:
        """Elements of matrix `index` that `rank` holds."""
        return sum(p.numel for p in self.fragments[index] if p.rank == rank)

    def holders(self, index: int) -> tuple[int, ...]:
        """Ranks with a piece of matrix `index`, ascending."""
        return tuple(sorted({p.rank for p in self.fragments[index]}))


def replicated_layout(placements: Sequence[Sequence[Placement]], *, world_size: int) -> Layout:
    """Lay out whole parameters on every rank (no ZeRO); `placements[leaf]` are the leaf's."""
    flat = [(leaf, p) for leaf, items in enumerate(placements) for p in items]
    return Layout(
        world_size=world_size,
        matrices=tuple(p.matrix for _, p in flat),
        fragments=tuple(
            tuple(
                Fragment(rank=rank, leaf=leaf, matrix_offset=0, place=p.block, momentum=p.block)
                for rank in range(world_size)
            )
            for leaf, p in flat
        ),
    )


def flat_partition_layout(
    placements: Sequence[Placement], *, partition_numel: int, world_size: int
) -> Layout:
    """Lay out one flat buffer cut evenly over the ranks (ZeRO-1/2, BF16_Optimizer).

    Args:
        placements: offsets are from the start of the flat buffer.
        partition_numel: elements per rank; rank r holds [r, r+1) times it.
    """
    return Layout(
        world_size=world_size,
        matrices=tuple(p.matrix for p in placements),
        fragments=tuple(_cut(p, partition_numel, leaf_base=0) for p in placements),
    )


def _cut(placement: Placement, partition_numel: int, *, leaf_base: int) -> tuple[Fragment, ...]:
    """Cut a matrix at the multiples of `partition_numel`; a rank's part starts at `leaf_base`."""
    whole = placement.block
    pieces, first = [], 0
    for rank in range(whole.start // partition_numel, (whole.stop - 1) // partition_numel + 1):
        last = whole.before((rank + 1) * partition_numel)
        for block in whole.cut(first, last):
            place = block.moved(leaf_base - rank * partition_numel)
            pieces.append(
                Fragment(rank=rank, leaf=0, matrix_offset=first, place=place, momentum=place)
            )
            first += block.numel
    return tuple(pieces)


def split_parameter_layout(
    parameters: Sequence[Sequence[Placement]],
    *,
    partition_numels: Sequence[int],
    leaf_offsets: Sequence[int],
    world_size: int,
) -> Layout:
    """Lay out parameters that are each cut over the ranks (ZeRO-3).

    Args:
        parameters: placements per parameter, with offsets from its start, in leaf order.
        partition_numels: elements of each parameter per rank, padding included.
        leaf_offsets: where each parameter's piece starts in the leaf, on every rank.
    """
    cuts = [
        (placement, part, base)
        for placements, part, base in zip(parameters, partition_numels, leaf_offsets, strict=True)
        for placement in placements
    ]
    return Layout(
        world_size=world_size,
        matrices=tuple(placement.matrix for placement, _, _ in cuts),
        fragments=tuple(_cut(p, part, leaf_base=base) for p, part, base in cuts),
    )
