# SPDX-License-Identifier: Apache-2.0
"""Costs of Newton-Schulz on one matrix, in flops and in bytes.

Owns: the formulas that owners and buckets are planned by.
Never does: run or time anything.
"""

from __future__ import annotations

from dataclasses import dataclass

FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What a matrix of a shape costs.

    Attributes:
        steps: Newton-Schulz steps.
        gram_from: long/short side ratio from which the Gram form runs; None: never.
        gram_restarts: how many of its steps recompute X X^T.
        wire_bytes, compute_bytes: per element of the momentum pieces and of the iterates.
    """

    steps: int
    gram_from: float | None
    gram_restarts: int
    wire_bytes: int
    compute_bytes: int

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

    def workspace_bytes(self, rows: int, cols: int) -> int:
        """Bytes live at the peak of one orthogonalisation, the assembled matrix included.

        The assembled input, its normalised fp32 copy and the cast iterate; or, later, the input,
        two iterates and three n x n products. Iterates that emulate a dtype are fp32.
        """
        n, numel = min(rows, cols), rows * cols
        normalise = numel * (self.wire_bytes + FP32_BYTES + self.compute_bytes)
        iterate = numel * (self.wire_bytes + 2 * self.compute_bytes)
        return max(normalise, iterate + 3 * n * n * self.compute_bytes)
