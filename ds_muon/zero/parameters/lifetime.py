# SPDX-License-Identifier: Apache-2.0
"""Lifetime: when ZeRO-3 frees gathered matrices (`reshard_after_forward`).

    true (Z3)    freed after every forward and backward of their module, gathered again for each:
                 2 U per micro-batch, U = (N - 1) / N of the matrices' elements received per rank
    false (Z2)   kept from their first forward until the optimizer step: U per step at any
                 accumulation, and the matrices' whole size in memory
    null         as ZeRO decides by reuse distance, prefetch and persistence threshold

Owns: overrides on one engine's parameter coordinator, for Muon's matrices only; all other
parameters keep ZeRO's own rules. Outside training mode matrices are freed after their module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import z3_leaf_module
from torch import nn
from torch.nn import Parameter

from ds_muon.zero.seams import override, private


def set_lifetime(zero: Any, matrices: Iterable[Parameter], *, reshard: bool) -> None:
    """Give matrices a lifetime of their own.

    Args:
        zero: a ZeRO-3 optimizer, before its first forward.
        matrices: parameters, each with all of ZeRO-3's attributes.
        reshard: `reshard_after_forward`.
    """
    chosen = {id(p): p for p in matrices}
    offload = private(zero, "parameter_offload")
    # A persistent parameter is never freed; these have a rule of their own instead.
    kept = [p for p in private(offload, "persistent_parameters") if id(p) not in chosen]
    for owner in (zero, offload):
        override(owner, "persistent_parameters", kept)
    for parameter in chosen.values():
        parameter.ds_persist = False
    _Lifetime(private(offload, "get_param_coordinator")(), chosen, reshard=reshard)


class _Lifetime:
    """Overrides the release of some parameters on one coordinator."""

    def __init__(self, coordinator: Any, chosen: dict[int, Parameter], *, reshard: bool) -> None:
        self._chosen, self._reshard = chosen, reshard
        self._training = True
        self._release_param = private(
            coordinator, "_PartitionedParameterCoordinator__release_param"
        )
        self._release_sub_module = private(coordinator, "release_sub_module")
        self._release_and_reset_all = private(coordinator, "release_and_reset_all")
        override(coordinator, "_PartitionedParameterCoordinator__release_param", self.release_param)
        override(coordinator, "release_sub_module", self.release_sub_module)
        override(coordinator, "release_and_reset_all", self.release_and_reset_all)

    def _keeps(self, parameter: Parameter) -> bool:
        return not self._reshard and self._training and id(parameter) in self._chosen

    def release_param(self, parameter: Parameter, free_data: bool = True) -> None:
        """Free a parameter unless it is to stay until the step."""
        if not self._keeps(parameter):
            self._release_param(parameter, free_data)

    def release_sub_module(self, submodule: nn.Module, forward: bool = False) -> None:
        """Let ZeRO free what its rules say, then the matrices that it would keep for reuse."""
        self._training = submodule.training
        self._release_sub_module(submodule, forward=forward)
        for parameter in submodule.parameters(recurse=z3_leaf_module(submodule)):
            available = getattr(parameter, "ds_status", None) == ZeroParamStatus.AVAILABLE
            if id(parameter) in self._chosen and available and not self._keeps(parameter):
                self._release_param(parameter)
        self._training = True

    def release_and_reset_all(self, module: nn.Module) -> None:
        """Free everything: the step begins, or a checkpoint is written."""
        self._training = False
        self._release_and_reset_all(module)
        self._training = True
