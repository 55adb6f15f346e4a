# SPDX-License-Identifier: Apache-2.0
"""Peers of the Newton-Schulz benchmark: routines of others, in their own dtype or a given one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.zero.muon import original_muon
from torch import Tensor
from torch.optim import _muon

JORDAN = (3.4445, -4.7750, 2.0315)
STEPS = 5
Routine = Callable[[Tensor], Tensor]


def torch_muon(dtype: torch.dtype) -> Routine:
    """torch.optim.Muon's routine; for another dtype its source with the one cast replaced."""
    function: Any = _muon._zeropower_via_newtonschulz
    if dtype != torch.bfloat16:
        source = inspect.getsource(function)
        cast = "grad.bfloat16()"
        if source.count(cast) != 1:
            raise RuntimeError(f"torch.optim.Muon of torch {torch.__version__} has no {cast!r}")
        namespace = dict(vars(_muon))
        exec(source.replace(cast, f"grad.to({dtype}, copy=True)"), namespace)
        function = namespace[function.__name__]
    return lambda matrix: function(matrix, JORDAN, STEPS, 1e-7)


def deepspeed_muon(method: str, dtype: torch.dtype | None) -> Routine:
    """A routine of DeepSpeed's built-in Muon; dtype None: the one it takes on this device."""
    function = {
        "standard": original_muon.zeropower_via_newtonschulz5,
        "gram": original_muon.zeropower_via_gram_newtonschulz,
    }[method]
    if dtype is None:
        return lambda matrix: function(matrix, STEPS)

    def run(matrix: Tensor) -> Tensor:
        with mock.patch.object(original_muon, "ns_compute_dtype", lambda *_: dtype):
            return function(matrix, STEPS)

    return run


def peers(dtype: torch.dtype | None) -> dict[str, Routine]:
    """Name -> routine; dtype None: each in the one that it takes on this device."""
    return {
        "torch.optim.Muon": torch_muon(dtype or torch.bfloat16),
        "DeepSpeed standard": deepspeed_muon("standard", dtype),
        "DeepSpeed gram": deepspeed_muon("gram", dtype),
    }
