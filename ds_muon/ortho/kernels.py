# SPDX-License-Identifier: Apache-2.0
"""Kernels: symmetric products of the package quack-kernels, an optional extra.

Its symmetric GEMM computes the tiles up to the diagonal and stores each of them twice.
Source: https://github.com/Dao-AILab/quack (quack/gemm_interface.py, gemm_symmetric), 0.6.
Never does: decide whether they are right; ortho/backends.py compares them with eager at start.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_muon.ortho.products import Products

# Smaller products fill no tile of the kernels, and sides must keep rows at 16 bytes.
_LEAST_ROWS, _MULTIPLE = 256, 8
# Matrices without a batch dimension need Hopper or later.
_LEAST_CAPABILITY = (9, 0)


class KernelProducts(Products):
    """The library's products, and the package's for symmetric ones that it can form.

    Args:
        gemm_symmetric: the package's function.
    """

    def __init__(self, gemm_symmetric: Callable[..., object]) -> None:
        self._gemm = gemm_symmetric

    def symmetric_mm(self, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        """Out <- a @ b."""
        if not _fits(a):
            return self.mm(a, b, out=out)
        self._gemm(a, b, out=out)
        return out

    def symmetric_addmm(
        self, c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0, out: Tensor
    ) -> Tensor:
        """Out <- beta * c + alpha * a @ b."""
        if not _fits(a):
            return self.addmm(c, a, b, beta=beta, alpha=alpha, out=out)
        self._gemm(a, b, C=c, out=out, alpha=alpha, beta=beta)
        return out


def _fits(a: Tensor) -> bool:
    rows, inner = a.shape
    return rows >= _LEAST_ROWS and rows % _MULTIPLE == inner % _MULTIPLE == 0


def kernel_products(dtype: torch.dtype, device: torch.device) -> KernelProducts:
    """Import the package.

    Raises:
        ValueError: the device, the dtype or the installation cannot run it.
    """
    rule = 'optimizer.params.ns_backend = "kernels" runs symmetric products of quack-kernels'
    if device.type != "cuda":
        raise ValueError(f'{rule}, which need an NVIDIA GPU, and this is {device}; use "eager"')
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise ValueError(
            f"{rule}, which need compute capability {_LEAST_CAPABILITY}, and {device} has "
            f'{capability}; use "eager"'
        )
    if dtype == torch.float32:
        raise ValueError(f'{rule}, which need ns_dtype "bf16" or "fp16"; use "eager" for fp32')
    try:
        from quack.gemm_interface import gemm_symmetric
    except Exception as error:  # a package that is there may still fail to load its libraries
        raise ValueError(
            f'{rule}, which cannot be imported ({error!r}); pip install "ds-muon[kernels]", or use '
            '"eager"'
        ) from error
    return KernelProducts(gemm_symmetric)
