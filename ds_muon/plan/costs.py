# SPDX-License-Identifier: Apache-2.0
"""Costs of Newton-Schulz on one matrix: flops by formula, or time by a measured table.

Owns: the formulas that owners and buckets are planned by.
Never does: run or time anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ds_muon.plan.layout import Matrix

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What a matrix of a shape costs.

    Attributes:
        steps: Newton-Schulz steps.
        gram_from: long/short side ratio from which the Gram form runs; None: never.
        gram_restarts: how many of its steps recompute X X^T.
        iterate_bytes: (rows, cols) -> bytes that an owner holds while it iterates the matrix.
        measured: (short, long side) -> seconds, of shapes that were timed; None: flops only.
    """

    steps: int
    gram_from: float | None
    gram_restarts: int
    iterate_bytes: Callable[[int, int], int]
    measured: Mapping[Shape, float] | None = None

    def flops(self, rows: int, cols: int) -> int:
        """Flops of one orthogonalisation, two per multiply-add.

        With n the short and m the long side a standard step is G = X X^T (2 n^2 m), G G (2 n^3)
        and (b G + c G G) X (2 n^2 m): n^2 (4 m + 2 n). The Gram form does the two products with X
        once, and again at each restart; its other products are n x n: Z always, Q after the
        first step since a restart, and two for R unless the step is the last or before a restart.
        """
        n, m = sorted((rows, cols))
        ratio = m / n
        if self.gram_from is None or ratio <= 1.0 or ratio < self.gram_from:
            return self.steps * n * n * (4 * m + 2 * n)
        segments = self.gram_restarts + 1
        square_products = self.steps + (self.steps - segments) + 2 * (self.steps - segments)
        return segments * 4 * n * n * m + square_products * 2 * n**3

    def costs(self, matrices: Sequence[Matrix]) -> tuple[int, ...]:
        """Return what owners are balanced by: flops, or measured time in flops of the same sum."""
        unit = self.unit_seconds(matrices)
        if unit is None:
            return tuple(self.flops(m.rows, m.cols) for m in matrices)
        return tuple(max(1, round(s / unit)) for s in self._seconds(matrices))

    def unit_seconds(self, matrices: Sequence[Matrix]) -> float | None:
        """Seconds that a cost of 1 stands for; None without a measured table."""
        if not self.measured or not matrices:
            return None
        return math.fsum(self._seconds(matrices)) / sum(
            self.flops(m.rows, m.cols) for m in matrices
        )

    def _seconds(self, matrices: Sequence[Matrix]) -> list[float]:
        """Measured time; a shape that the table lacks costs its flops at the table's own rate."""
        measured = self.measured or {}
        rate = math.fsum(measured.values()) / sum(self.flops(*shape) for shape in measured)
        return [measured.get(_shape(m), self.flops(m.rows, m.cols) * rate) for m in matrices]


def _shape(matrix: Matrix) -> Shape:
    n, m = sorted((matrix.rows, matrix.cols))
    return n, m
