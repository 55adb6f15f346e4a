# SPDX-License-Identifier: Apache-2.0
"""Products: the matrix products that an iteration is made of, each into memory that is handed in.

Owns: which implementation forms them. They differ in the last bits only; one run uses one of them.
Most products of the iteration are symmetric (X X^T, and polynomials of it), so half of their
elements need not be computed.
Never does: round, or know the order of the iteration.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# Rows of the panels that a symmetric product is formed in; a GEMM of a panel runs at full speed.
PANEL_ROWS = 128
# A product of fewer multiply-adds takes no longer as one call.
LEAST_WORK = 2**25
# More panels save next to nothing: of k panels, (k + 1) / 2k of the elements are computed.
_MAX_PANELS = 8


class Products:
    """The device library's products, each one call."""

    def mm(self, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        """Out <- a @ b; `out` is neither of them."""
        return torch.mm(a, b, out=out)

    def addmm(
        self, c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0, out: Tensor
    ) -> Tensor:
        """Out <- beta * c + alpha * a @ b; `out` may be `c`, never `a` or `b`."""
        return torch.addmm(c, a, b, beta=beta, alpha=alpha, out=out)

    def symmetric_mm(self, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        """Out <- a @ b, which is symmetric but for rounding."""
        return self.mm(a, b, out=out)

    def symmetric_addmm(
        self, c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0, out: Tensor
    ) -> Tensor:
        """Out <- beta * c + alpha * a @ b, all symmetric; `out` is none of them."""
        return self.addmm(c, a, b, beta=beta, alpha=alpha, out=out)


class PanelProducts(Products):
    """Symmetric products in panels of rows up to the diagonal; what lies above is mirrored."""

    def symmetric_mm(self, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        """Out <- a @ b."""
        panels = _panels(out.shape[0], a.shape[1])
        if len(panels) == 1:
            return self.mm(a, b, out=out)
        for start, end in panels:
            torch.mm(a[start:end], b[:, :end], out=out[start:end, :end])
        return _mirror(out, panels)

    def symmetric_addmm(
        self, c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0, out: Tensor
    ) -> Tensor:
        """Out <- beta * c + alpha * a @ b."""
        panels = _panels(out.shape[0], a.shape[1])
        if len(panels) == 1:
            return self.addmm(c, a, b, beta=beta, alpha=alpha, out=out)
        for start, end in panels:
            below = out[start:end, :end]
            left, right = a[start:end], b[:, :end]
            torch.addmm(c[start:end, :end], left, right, beta=beta, alpha=alpha, out=below)
        return _mirror(out, panels)


@functools.cache
def _panels(n: int, inner: int) -> tuple[tuple[int, int], ...]:
    """Cut the n rows of an (n, inner) @ (inner, n) into equal panels; the last may be shorter."""
    count = min(_MAX_PANELS, max(1, n // PANEL_ROWS)) if n * n * inner >= LEAST_WORK else 1
    rows = -(-n // count)
    return tuple((start, min(start + rows, n)) for start in range(0, n, rows))


def _mirror(out: Tensor, panels: tuple[tuple[int, int], ...]) -> Tensor:
    for start, end in panels[1:]:
        out[:start, start:end].copy_(out[start:end, :start].mT)
    return out
