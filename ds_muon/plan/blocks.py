# SPDX-License-Identifier: Apache-2.0
"""Blocks: where the elements of a matrix stand in a flat buffer, as equal runs at equal distances.

A matrix that is a parameter, or some of its rows, is one run. Columns are one run per row; rows
that belong to other matrices in turn (q, k and v of every head) are one run per turn:

    (3, 6), columns 2:4   . . x x . . . . x x . . . . x x . .      start 2, run 2, stride 6

Owns: the arithmetic of cutting them. A cut inside a run gives up to three blocks: the rest of a
run, whole runs, and the start of one; never one per row.
"""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """Elements k = 0 .. numel - 1 at start + k // run * stride + k % run; numel % run is 0."""

    start: int
    numel: int
    run: int
    stride: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + (self.numel // self.run - 1) * self.stride + self.run

    @property
    def shape(self) -> tuple[int, ...]:
        """(numel,) of one run, (runs, run) of several: how a view of it and its like are shaped."""
        return (self.numel,) if self.run == self.numel else (self.numel // self.run, self.run)

    def moved(self, distance: int) -> Block:
        """The same elements in a buffer that starts `distance` earlier."""
        return Block(self.start + distance, self.numel, self.run, self.stride)

    def at(self, index: int) -> int:
        """Where one element stands."""
        return self.start + index // self.run * self.stride + index % self.run

    def before(self, position: int) -> int:
        """How many elements stand before a position."""
        if position <= self.start:
            return 0
        runs, rest = divmod(position - self.start, self.stride)
        return min(self.numel, runs * self.run + min(rest, self.run))

    def cut(self, first: int, last: int) -> tuple[Block, ...]:
        """Elements first .. last - 1, in order, as few blocks as there can be."""
        if first >= last:
            return ()
        if self.run == self.numel:
            return (one_run(self.start + first, last - first),)
        found = []
        while first < last:
            if first % self.run or last - first < self.run:
                numel = min(last - first, self.run - first % self.run)
            else:
                numel = (last - first) // self.run * self.run
            if numel <= self.run:
                found.append(one_run(self.at(first), numel))
            else:
                found.append(Block(self.at(first), numel, self.run, self.stride))
            first += numel
        return tuple(found)


def one_run(start: int, numel: int) -> Block:
    """A contiguous range."""
    return Block(start, numel, numel, numel)
