# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz: drive all singular values of a matrix towards one, in memory that is handed in.

Owns: normalisation, the standard and the Gram iteration, in which arithmetic products run, and how
much memory that takes.
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

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_muon.ortho.chunks import CHUNK_NUMEL, chunks
from ds_muon.ortho.recipes import OrthoSpec

# A larger iterate is replaced in blocks of about this many elements; GEMMs of a block stay large.
BLOCK_NUMEL = 2**24
# Regions of the scratch start at multiples of this, in elements: any kernel's favourite boundary.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How products of the compute dtype are formed.

    A CPU without bf16 or fp16 instructions multiplies such matrices a hundred times slower than
    fp32 ones. There the iterates are kept in fp32, and every product is rounded to the compute
    dtype: the same operands, fp32 accumulation and one rounding, as the instructions would do.

    Attributes:
        storage: dtype of the iterates.
        rounded_to: dtype every product is rounded to, or None where storage is that dtype.
    """

    storage: torch.dtype
    rounded_to: torch.dtype | None

    def round_(self, x: Tensor) -> Tensor:
        """Round `x` (rows, cols) to the compute dtype in place, keeping its storage dtype."""
        if self.rounded_to is not None:
            for rows in x.split(max(1, CHUNK_NUMEL // x.shape[1])):
                rows.copy_(rows.to(self.rounded_to))
        return x


def arithmetic_for(spec: OrthoSpec, device: torch.device) -> Arithmetic:
    """Choose the arithmetic of `spec` on `device`; the same on every rank of equal hardware."""
    dtype = spec.compute_dtype
    if spec.native_products or dtype == torch.float32 or device.type != "cpu":
        return Arithmetic(dtype, None)
    native = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return Arithmetic(dtype, None) if native[dtype]() else Arithmetic(torch.float32, dtype)


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
def orthogonalize(matrix: Tensor, spec: OrthoSpec) -> Tensor:
    """Replace the singular values of each matrix by approximately one.

    Args:
        matrix: (rows, cols) or (batch, rows, cols), any float dtype; not modified.
        spec: coefficients, method and dtypes.

    Returns:
        The same shape in `spec.compute_dtype`. A zero matrix gives zeros.

    Raises:
        ValueError: `matrix` has another number of dimensions.
    """
    if matrix.ndim not in (2, 3):
        raise ValueError(f"matrix must be 2-D or a 3-D batch, got shape {tuple(matrix.shape)}")
    if matrix.ndim == 3:
        found = [orthogonalize(one, spec) for one in matrix]
        return torch.stack(found) if found else matrix.to(spec.compute_dtype)
    x = torch.empty(
        matrix.shape, dtype=arithmetic_for(spec, matrix.device).storage, device=matrix.device
    )
    return orthogonalize_into(x, matrix.contiguous(), spec).to(spec.compute_dtype)


@torch.no_grad()
def orthogonalize_into(
    x: Tensor, matrix: Tensor, spec: OrthoSpec, scratch: Tensor | None = None
) -> Tensor:
    """Orthogonalise `matrix` in given memory.

    Args:
        x: (rows, cols), contiguous, in `arithmetic_for(spec, device).storage`; overwritten.
        matrix: (rows, cols), contiguous; may be `x` itself.
        scratch: flat, `scratch_numel(rows, cols, spec)` elements of x's dtype; None: allocated.

    Returns:
        (rows, cols), contiguous: the result, in `x` or in a part of `scratch`.
    """
    rows, cols = x.shape
    arithmetic = arithmetic_for(spec, x.device)
    if scratch is None:
        scratch = x.new_empty(scratch_numel(rows, cols, spec))
    _normalise(x, matrix, spec, arithmetic)
    iterate = _Iterate(x, spec, arithmetic, scratch)
    if spec.uses_gram(rows, cols):
        _iterate_gram(iterate, spec)
    else:
        _iterate_standard(iterate, spec)
    return iterate.result()


def _normalise(x: Tensor, matrix: Tensor, spec: OrthoSpec, arithmetic: Arithmetic) -> None:
    """x <- matrix over its Frobenius norm, which bounds every singular value by one.

    In fp32 the largest element is divided out first: squares of a matrix that decayed to 1e-25, or
    grew to 1e20, would leave fp32's range, and the iteration would start from a wrong norm.
    """
    if spec.normalise_in == "compute":
        x.copy_(matrix)
        arithmetic.round_(x)
        norm = _guarded(x.norm(), spec)
        x.div_(norm)
        arithmetic.round_(x)
        return
    largest = torch.linalg.vector_norm(matrix, float("inf")).float()
    largest = largest.clamp(min=torch.finfo(torch.float32).tiny)
    flat = matrix.view(-1)
    parts = [torch.linalg.vector_norm(part.float() / largest) for (part,) in chunks(flat)]
    norm = _guarded(torch.linalg.vector_norm(torch.stack(parts)), spec)
    for out, part in chunks(x.view(-1), flat):
        scaled = part.to(torch.float32, copy=True).div_(largest).div_(norm)
        out.copy_(scaled if arithmetic.rounded_to is None else scaled.to(arithmetic.rounded_to))


def _guarded(norm: Tensor, spec: OrthoSpec) -> Tensor:
    norm = norm + spec.eps if spec.guard == "add" else norm.clamp(min=spec.eps)
    return norm if spec.divisor == 1.0 else norm * spec.divisor


class _Iterate:
    """X with the short side as rows, and the scratch of its iteration."""

    def __init__(self, x: Tensor, spec: OrthoSpec, arithmetic: Arithmetic, scratch: Tensor) -> None:
        self._rows, self._cols = x.shape
        self._tall = self._rows > self._cols
        self.x = x.mT if self._tall else x
        self._spare: Tensor | None = None
        self.arithmetic = arithmetic
        n, m = self.x.shape
        count, square = 4 if spec.uses_gram(n, m) else 2, _aligned(n * n)
        self.squares = [scratch[i * square :][: n * n].view(n, n) for i in range(count)]
        self._width = _block_cols(n, m, spec)
        self._block = scratch[count * square :][: n * self._width]
        # Bit parity with an original includes the orientation in which it holds its iterates.
        self._row_by_row = spec.native_products

    def gram(self, out: Tensor) -> Tensor:
        """Out <- X X^T."""
        return self.arithmetic.round_(torch.mm(self.x, self.x.mT, out=out))

    def replace(self, factor: Tensor, *, beta: float) -> None:
        """X <- beta X + factor X."""
        n, m = self.x.shape
        if self._width >= m:
            spare = self._view_of(self._spare if self._spare is not None else self._block)
            addmm(self.x, factor, self.x, beta=beta, out=spare)
            self.arithmetic.round_(spare)
            self.x, self._spare = spare, self._memory_of(self.x)
            return
        for block in self.x.split(self._width, dim=1):
            old = self._block[: block.numel()]
            old = old.view(block.shape[1], n).mT if self._tall else old.view(n, block.shape[1])
            old.copy_(block)
            addmm(block, factor, old, beta=beta, out=block)
            self.arithmetic.round_(block)

    def _view_of(self, flat: Tensor) -> Tensor:
        """Flat memory as X: in the orientation of the matrix, or else always row by row."""
        n, m = self.x.shape
        return flat.view(m, n).mT if self._tall and not self._row_by_row else flat.view(n, m)

    def _memory_of(self, x: Tensor) -> Tensor:
        return (x if x.is_contiguous() else x.mT).view(-1)

    def result(self) -> Tensor:
        """X in its own orientation, contiguous."""
        x = self.x.mT if self._tall else self.x
        if x.is_contiguous():
            return x
        if self._spare is None:
            raise AssertionError("an iterate of another orientation comes from two buffers")
        return self._spare.view(self._rows, self._cols).copy_(x)


def _iterate_standard(iterate: _Iterate, spec: OrthoSpec) -> None:
    gram, polynomial = iterate.squares
    for a, b, c in spec.triples:
        iterate.gram(gram)
        addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        iterate.arithmetic.round_(polynomial)
        iterate.replace(polynomial, beta=a)


def _iterate_gram(iterate: _Iterate, spec: OrthoSpec) -> None:
    """Iterate on R = X X^T and the accumulated factor Q; X itself is touched at restarts only."""
    r, z, q, spare = iterate.squares
    round_ = iterate.arithmetic.round_
    iterate.gram(r)
    fresh = True
    last = len(spec.triples) - 1
    for step, (a, b, c) in enumerate(spec.triples):
        if step in spec.gram_restarts and not fresh:
            iterate.replace(q, beta=0.0)
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
    iterate.replace(q, beta=0.0)


def addmm(
    c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0, out: Tensor
) -> Tensor:
    """Out <- beta * c + alpha * a @ b; `out` may be `c`, never `a` or `b`."""
    return torch.addmm(c, a, b, beta=beta, alpha=alpha, out=out)
