# SPDX-License-Identifier: Apache-2.0
"""Heads: which rows of which projection belong to which attention head (QK-clip).

A row is a row of the stored weight, one output of the projection, or an element of its bias. Every
row has a slot in the table of factors, which is ordered by part:

    [ queries of all heads | keys of all key heads | whole factors of all heads | 1 ]

Owns: slots, and the ranges of rows in a fragment of a flat leaf.
Never does: know modules (attention.py) or compute factors (ortho/qk_clip.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Part = Literal["query", "key", "whole", "none"]


class Rows(NamedTuple):
    """Consecutive rows of a projection that take the same factor; `head` is None for "none"."""

    count: int
    part: Part
    head: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A parameter, by name, whose rows are scaled; `rows` cover it."""

    name: str
    rows: tuple[Rows, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """One attention module: `heads` queries share `keys` keys, in equal groups of neighbours."""

    name: str
    heads: int
    keys: int
    projections: tuple[Projection, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The table of factors of all attention modules."""

    modules: tuple[Heads, ...]

    @property
    def heads(self) -> int:
        """Query heads of all modules."""
        return sum(m.heads for m in self.modules)

    @property
    def keys(self) -> int:
        """Keys of all modules."""
        return sum(m.keys for m in self.modules)

    def key_of(self) -> tuple[int, ...]:
        """Per head its key, numbered over all modules."""
        found: list[int] = []
        first = 0
        for module in self.modules:
            group = module.heads // module.keys
            found += [first + head // group for head in range(module.heads)]
            first += module.keys
        return tuple(found)

    def of_rows(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every projection's name, and the slot of each of its rows."""
        head = key = 0
        for module in self.modules:
            start = {"query": head, "key": self.heads + key, "whole": self.heads + self.keys + head}
            for projection in module.projections:
                yield (
                    projection.name,
                    tuple(
                        self.size - 1 if rows.head is None else start[rows.part] + rows.head
                        for rows in projection.rows
                        for _ in range(rows.count)
                    ),
                )
            head, key = head + module.heads, key + module.keys

    @property
    def size(self) -> int:
        """Factors in the table."""
        return 2 * self.heads + self.keys + 1


class RowRange(NamedTuple):
    """A block of `rows` x `cols` elements in a leaf; part of a row counts as one shorter row."""

    leaf_offset: int
    first_row: int
    rows: int
    cols: int


def row_ranges(
    *, parameter_offset: int, leaf_offset: int, numel: int, cols: int
) -> Sequence[RowRange]:
    """Cut a fragment of a parameter into whole rows and at most two parts of rows.

    Args:
        parameter_offset: where it starts in the parameter; leaf_offset: in the leaf.
        cols: elements of a row.
    """
    found: list[RowRange] = []
    start, end = parameter_offset, parameter_offset + numel
    while start < end:
        row, within = divmod(start, cols)
        rows, width = 1, min(cols - within, end - start)
        if width == cols:
            rows = (end - start) // cols
        offset = leaf_offset + start - parameter_offset
        found.append(RowRange(leaf_offset=offset, first_row=row, rows=rows, cols=width))
        start += rows * width
    return found
