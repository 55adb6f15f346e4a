# SPDX-License-Identifier: Apache-2.0
"""Arithmetic: the dtype that iterates are stored in, and when they are rounded to another.

Owns: how a device forms products of the compute dtype, and what becomes of the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_muon.ortho.chunks import CHUNK_NUMEL
from ds_muon.ortho.instructions import multiplies
from ds_muon.ortho.recipes import OrthoSpec


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How products of the compute dtype are formed.

    A CPU without bf16 or fp16 instructions multiplies such matrices 10 to 100 times slower than
    fp32 ones. Where a configuration asks for them all the same, the iterates are kept in fp32, and
    every product is rounded to the compute dtype: the same operands, fp32 accumulation and one
    rounding, as the instructions would do.

    Attributes:
        storage: dtype of the iterates.
        rounded_to: dtype every product is rounded to, or None where storage is that dtype.
        update_rounded_to: dtype the update is rounded to, or None where products are of it.
    """

    storage: torch.dtype
    rounded_to: torch.dtype | None
    update_rounded_to: torch.dtype | None

    def round_(self, x: Tensor) -> Tensor:
        """Round `x` (rows, cols) to the compute dtype in place, keeping its storage dtype."""
        return x if self.rounded_to is None else _round_(x, self.rounded_to)

    def round_update_(self, x: Tensor) -> Tensor:
        """Round what the last product gave to the dtype that updates travel in, likewise.

        Every update is rounded, moved or not.
        """
        return x if self.update_rounded_to is None else _round_(x, self.update_rounded_to)


def _round_(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.numel() <= CHUNK_NUMEL:
        return x.copy_(x.to(dtype))
    for rows in x.split(max(1, CHUNK_NUMEL // x.shape[1])):
        rows.copy_(rows.to(dtype))
    return x


def arithmetic_for(spec: OrthoSpec, device: torch.device) -> Arithmetic:
    """Choose the arithmetic of `spec` on `device`; the same on every rank of equal hardware."""
    dtype = spec.compute_dtype
    update = None if spec.update_dtype == dtype else spec.update_dtype
    if spec.native_products or multiplies(dtype, device):
        return Arithmetic(dtype, None, update)
    return Arithmetic(torch.float32, dtype, update)
