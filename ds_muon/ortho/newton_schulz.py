# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz: drive all singular values of a matrix towards one.

Owns: normalisation, the standard and the Gram iteration, and in which arithmetic products run.
Never does: know where the matrix came from. Allocates only temporaries that die on return.

The iteration multiplies X by an odd polynomial of its singular values, p(s) = a s + b s^3 + c s^5,
    X <- a X + (b G + c G G) X,   G = X X^T,
always with the short side as rows, so that G is as small as it can be.
Sources: https://kellerjordan.github.io/posts/muon/ and, for the Gram form,
https://tridao.me/blog/2026/gram-newton-schulz/.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_muon.ortho.recipes import OrthoSpec


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

    def round(self, x: Tensor) -> Tensor:
        """Round `x` (any shape) to the compute dtype, keeping its storage dtype."""
        return x if self.rounded_to is None else x.to(self.rounded_to).to(self.storage)


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
    rows, cols = matrix.shape[-2:]
    arithmetic = arithmetic_for(spec, matrix.device)
    tall = rows > cols
    x = _normalise(matrix.mT if tall else matrix, spec).to(arithmetic.storage)
    if spec.uses_gram(rows, cols):
        x = _iterate_gram(x, spec, arithmetic)
    else:
        x = _iterate_standard(x, spec, arithmetic)
    x = x.to(spec.compute_dtype)
    return x.mT if tall else x


def _normalise(matrix: Tensor, spec: OrthoSpec) -> Tensor:
    """Divide by the Frobenius norm, which bounds every singular value by one.

    In fp32 the largest element is divided out first: squares of a matrix that decayed to 1e-25, or
    grew to 1e20, would leave fp32's range, and the iteration would start from a wrong norm.
    """
    dtype = torch.float32 if spec.normalise_in == "fp32" else spec.compute_dtype
    if spec.normalise_in == "fp32":
        # The copy is contiguous whatever the input's strides: products want it so.
        x = matrix.to(dtype, copy=True, memory_format=torch.contiguous_format)
    else:
        x = matrix.to(dtype, copy=True)
    if spec.normalise_in == "fp32":
        largest = torch.linalg.vector_norm(x, float("inf"), dim=(-2, -1), keepdim=True)
        x.div_(largest.clamp(min=torch.finfo(dtype).tiny))
    norm = x.norm(dim=(-2, -1), keepdim=True) if x.ndim == 3 else x.norm()
    norm = norm + spec.eps if spec.guard == "add" else norm.clamp(min=spec.eps)
    x.div_(norm if spec.divisor == 1.0 else norm * spec.divisor)
    return x.to(spec.compute_dtype)


def _iterate_standard(x: Tensor, spec: OrthoSpec, arithmetic: Arithmetic) -> Tensor:
    for a, b, c in spec.triples:
        gram = arithmetic.round(x @ x.mT)
        polynomial = arithmetic.round(_addmm(gram, gram, gram, beta=b, alpha=c))
        x = arithmetic.round(_addmm(x, polynomial, x, beta=a))
    return x


def _iterate_gram(x: Tensor, spec: OrthoSpec, arithmetic: Arithmetic) -> Tensor:
    """Iterate on R = X X^T and the accumulated factor Q; X itself is touched at restarts only."""
    r = arithmetic.round(x @ x.mT)
    q: Tensor | None = None
    last = len(spec.triples) - 1
    for step, (a, b, c) in enumerate(spec.triples):
        if step in spec.gram_restarts and q is not None:
            x = arithmetic.round(q @ x)
            r = arithmetic.round(x @ x.mT)
            q = None
        # z = a I + b R + c R R is the factor that this step puts before X.
        z = arithmetic.round(_addmm(r, r, r, beta=b, alpha=c))
        if q is None:
            q = z.clone()
            q.diagonal(dim1=-2, dim2=-1).add_(a)
            q = arithmetic.round(q)
        else:
            q = arithmetic.round(_addmm(q, z, q, beta=a))
        if step != last and step + 1 not in spec.gram_restarts:
            rz = arithmetic.round(_addmm(r, z, r, beta=a))
            r = arithmetic.round(_addmm(rz, z, rz, beta=a))
    return arithmetic.round(q @ x)


def _addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """beta * c + alpha * a @ b, for matrices or equal batches of them."""
    multiply = torch.addmm if c.ndim == 2 else torch.baddbmm
    return multiply(c, a, b, beta=beta, alpha=alpha)
