# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz: drive all singular values of a matrix towards one, in memory that is handed in.

Owns: the standard and the Gram iteration, and how much memory they take.
Never does: know where the matrix came from.

The iteration multiplies X by an odd polynomial of its singular values, p(s) = a s + b s^3 + c s^5,
    X <- a X + (b G + c G G) X,   G = X X^T,
always with the short side as rows, so that G is as small as it can be. A tall matrix is iterated
through its transposed view. Small iterates alternate between two buffers; a large one is replaced
column block by column block, so that it is held once.
Sources: https://kellerjordan.github.io/posts/muon/ and, for the Gram form,
https://tridao.me/blog/2026/gram-newton-schulz/.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ds_muon.ortho import normalise as normalisation
from ds_muon.ortho.arithmetic import Arithmetic, arithmetic_for
from ds_muon.ortho.products import PanelProducts, Products
from ds_muon.ortho.recipes import OrthoSpec

# A larger iterate is replaced in blocks of about this many elements; GEMMs of a block stay large.
BLOCK_NUMEL = 2**24
# Regions of the scratch start at multiples of this, in elements: any kernel's favourite boundary.
_ALIGNMENT = 64


def products_for(spec: OrthoSpec, device: torch.device) -> Products:
    """Choose how eager products are formed; a function of the recipe and the kind of device.

    Panels pay where a product takes much longer than its launch, and leave a GPU partly idle.
    """
    panels = device.type == "cpu" and not spec.native_products
    return PanelProducts() if panels else Products()


def scratch_numel(rows: int, cols: int, spec: OrthoSpec) -> int:
    """Elements, in the storage dtype, that iterating a (rows, cols) matrix takes besides it."""
    n, m = sorted((rows, cols))
    squares = 4 if spec.uses_gram(rows, cols) else 2
    return squares * _aligned(n * n) + _aligned(n * _block_cols(n, m, spec))


def _block_cols(n: int, m: int, spec: OrthoSpec) -> int:
    """Columns that are replaced at a time; all of them: the iterate alternates between buffers."""
    return m if spec.native_products else min(m, max(1, BLOCK_NUMEL // n))


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGNMENT) * _ALIGNMENT


@torch.no_grad()
def orthogonalize(matrix: Tensor, spec: OrthoSpec, *, products: Products | None = None) -> Tensor:
    """Replace the singular values of each matrix by approximately one.

    Args:
        matrix: (rows, cols) or (batch, rows, cols), any float dtype; not modified.
        spec: coefficients, method and dtypes.
        products: None: `products_for`.

    Returns:
        The same shape in `spec.update_dtype`. A zero matrix gives zeros.

    Raises:
        ValueError: `matrix` has another number of dimensions.
    """
    if matrix.ndim not in (2, 3):
        raise ValueError(f"matrix must be 2-D or a 3-D batch, got shape {tuple(matrix.shape)}")
    if matrix.ndim == 3:
        found = [orthogonalize(one, spec, products=products) for one in matrix]
        return torch.stack(found) if found else matrix.to(spec.update_dtype)
    storage = arithmetic_for(spec, matrix.device).storage
    x = torch.empty(matrix.shape, dtype=storage, device=matrix.device)
    scratch = x.new_empty(scratch_numel(*x.shape, spec))
    run = NewtonSchulz(x, matrix.contiguous(), spec, scratch, products=products)
    return run().to(spec.update_dtype)


class NewtonSchulz:
    """The orthogonalisation of matrices of one shape in one memory; a call runs it once.

    Args:
        x: (rows, cols), contiguous, in `arithmetic_for(spec, device).storage`; overwritten.
        matrix: (rows, cols), contiguous; where a call finds its input; may be `x` itself.
        scratch: flat, `scratch_numel(rows, cols, spec)` elements of x's dtype.
        products: None: `products_for`.
        normalise: writes the normalised matrix into x; None: normalise.py's.
    """

    def __init__(
        self,
        x: Tensor,
        matrix: Tensor,
        spec: OrthoSpec,
        scratch: Tensor,
        *,
        products: Products | None = None,
        normalise: Callable[[Tensor, Tensor, Arithmetic], None] | None = None,
    ) -> None:
        self._x, self._matrix, self._spec = x, matrix, spec
        self._normalise = normalise or functools.partial(normalisation.normalise, spec=spec)
        self._arithmetic = arithmetic_for(spec, x.device)
        products = products or products_for(spec, x.device)
        self._iterate = _Iterate(x, spec, scratch, products, self._arithmetic)

    def __call__(self) -> Tensor:
        """Orthogonalise what `matrix` holds.

        Returns:
            (rows, cols), contiguous: the result, always in the same part of the memory.
        """
        self._normalise(self._x, self._matrix, arithmetic=self._arithmetic)
        iterate, spec = self._iterate, self._spec
        iterate.start()
        if iterate.gram_form:
            _iterate_gram(iterate, spec)
        else:
            _iterate_standard(iterate, spec)
        return self._arithmetic.round_update_(iterate.result())


class _Iterate:
    """X with the short side as rows, and the scratch of its iteration."""

    def __init__(
        self,
        x: Tensor,
        spec: OrthoSpec,
        scratch: Tensor,
        products: Products,
        arithmetic: Arithmetic,
    ) -> None:
        rows, cols = x.shape
        self._matrix, self._tall = x, rows > cols
        self.gram_form = spec.uses_gram(rows, cols)
        self.products, self.arithmetic = products, arithmetic
        self.x = x.mT if self._tall else x
        n, m = self.x.shape
        count, square = 4 if self.gram_form else 2, _aligned(n * n)
        first = scratch.storage_offset()
        self.squares = [
            scratch.as_strided((n, n), (n, 1), first + i * square) for i in range(count)
        ]
        self._width = _block_cols(n, m, spec)
        self._block = scratch[count * square :]
        # Bit parity with an original includes the orientation in which it holds its iterates.
        self._by_columns = self._tall and not spec.native_products
        self._first = self.x
        # A small X is read from one of two buffers and written to the other.
        self._buffers: tuple[Tensor, Tensor] | None = None
        if self._width >= m:
            again = x.view(n, m) if self._tall and not self._by_columns else self._first
            self._buffers = self._columns(m), again
        self._targets = self._buffers

    def start(self) -> None:
        """Go back to the memory that a normalised matrix stands in."""
        self.x, self._targets = self._first, self._buffers

    def _columns(self, width: int) -> Tensor:
        """The block's memory as columns of X: stored like the matrix, or else always row by row."""
        n = self.x.shape[0]
        strides = (1, n) if self._by_columns else (width, 1)
        return self._block.as_strided((n, width), strides)

    def gram(self, out: Tensor) -> Tensor:
        """Out <- X X^T."""
        return self.arithmetic.round_(self.products.symmetric_mm(self.x, self.x.mT, out=out))

    def replace(self, factor: Tensor, *, beta: float = 0.0) -> None:
        """X <- beta X + factor X."""
        if self._targets is not None:
            target, other = self._targets
            self._multiply(self.x, factor, self.x, beta, out=target)
            self.x, self._targets = target, (other, target)
            return
        for block in self.x.split(self._width, dim=1):
            old = self._columns(block.shape[1]).copy_(block)
            self._multiply(block, factor, old, beta, out=block)

    def _multiply(self, c: Tensor, factor: Tensor, x: Tensor, beta: float, *, out: Tensor) -> None:
        if beta == 0.0:
            self.products.mm(factor, x, out=out)
        else:
            self.products.addmm(c, factor, x, beta=beta, out=out)
        self.arithmetic.round_(out)

    def result(self) -> Tensor:
        """X in its own orientation, contiguous."""
        x = self.x.mT if self._tall else self.x
        if x.is_contiguous():
            return x
        if self._targets is None:
            raise AssertionError("an iterate of another orientation comes from two buffers")
        free = (
            self._matrix if self.x is self._buffers[0] else self._columns(x.shape[0]).view(x.shape)
        )
        return free.copy_(x)


def _iterate_standard(iterate: _Iterate, spec: OrthoSpec) -> None:
    gram, polynomial = iterate.squares
    products, round_ = iterate.products, iterate.arithmetic.round_
    for a, b, c in spec.triples:
        iterate.gram(gram)
        round_(products.symmetric_addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial))
        iterate.replace(polynomial, beta=a)


def _iterate_gram(iterate: _Iterate, spec: OrthoSpec) -> None:
    """Iterate on R = X X^T and the accumulated factor Q; X itself is touched at restarts only."""
    r, z, q, spare = iterate.squares
    addmm, round_ = iterate.products.symmetric_addmm, iterate.arithmetic.round_
    iterate.gram(r)
    fresh = True
    last = len(spec.triples) - 1
    for step, (a, b, c) in enumerate(spec.triples):
        if step in spec.gram_restarts and not fresh:
            iterate.replace(q)
            iterate.gram(r)
            fresh = True
        # z = a I + b R + c R R is the factor that this step puts before X.
        round_(addmm(r, r, r, beta=b, alpha=c, out=z))
        if fresh:
            q.copy_(z).diagonal().add_(a)
            round_(q)
        else:
            round_(addmm(q, z, q, beta=a, out=spare))
            q, spare = spare, q
        fresh = False
        if step != last and step + 1 not in spec.gram_restarts:
            round_(addmm(r, z, r, beta=a, out=spare))
            round_(addmm(spare, z, spare, beta=a, out=r))
    iterate.replace(q)
