# SPDX-License-Identifier: Apache-2.0
"""Arithmetic: the dtype that iterates are stored in, and when they are rounded to another.

Owns: how a device forms products of the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_muon.ortho.chunks import CHUNK_NUMEL
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

    def round_(self, x: Tensor) -> Tensor:
        """Round `x` (rows, cols) to the compute dtype in place, keeping its storage dtype."""
        if self.rounded_to is None:
            return x
        if x.numel() <= CHUNK_NUMEL:
            return x.copy_(x.to(self.rounded_to))
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
