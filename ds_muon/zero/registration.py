# SPDX-License-Identifier: Apache-2.0
"""Registration: make DeepSpeed build DMuon when, and only when, a config asks for it.

Owns: three wrapped methods of DeepSpeedEngine, which pass every other optimizer through untouched,
and one entry in ZeRO's list of supported optimizers. They are installed the first time somebody
looks up torch.optim.DMuon, which DeepSpeed does before it builds an optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

from ds_muon.optimizer import MatrixOwnerOptimizer
from ds_muon.zero.attach import bind_optimizer
from ds_muon.zero.hsdp.mesh import partitioned_over
from ds_muon.zero.prepare import build_optimizer
from ds_muon.zero.seams import override, private, require_classes

TYPE_NAME = "DMuon"


def install() -> None:
    """Hook the engine class; a second call does nothing.

    Raises:
        RuntimeError: this DeepSpeed lacks what ds_muon needs; nothing has been hooked.
    """
    if MatrixOwnerOptimizer in ZERO_SUPPORTED_OPTIMIZERS:
        return
    require_classes()
    ZERO_SUPPORTED_OPTIMIZERS.append(MatrixOwnerOptimizer)
    build_basic = private(DeepSpeedEngine, "_configure_basic_optimizer")
    configure_zero = private(DeepSpeedEngine, "_configure_zero_optimizer")
    configure = private(DeepSpeedEngine, "_configure_optimizer")

    @functools.wraps(build_basic)
    def _configure_basic_optimizer(self: Any, model_parameters: Iterable[Any]) -> Any:
        if str(self.optimizer_name()).lower() != TYPE_NAME.lower():
            return build_basic(self, model_parameters)
        return build_optimizer(self, model_parameters)

    @functools.wraps(configure_zero)
    def _configure_zero_optimizer(self: Any, optimizer: Any) -> Any:
        mesh = optimizer.preparation.mesh if isinstance(optimizer, MatrixOwnerOptimizer) else None
        if mesh is None:
            return configure_zero(self, optimizer)
        with partitioned_over(self, mesh):
            return configure_zero(self, optimizer)

    @functools.wraps(configure)
    def _configure_optimizer(self: Any, client_optimizer: Any, model_parameters: Any) -> None:
        configure(self, client_optimizer, model_parameters)
        if isinstance(self.basic_optimizer, MatrixOwnerOptimizer):
            bind_optimizer(self, self.basic_optimizer)

    override(DeepSpeedEngine, "_configure_basic_optimizer", _configure_basic_optimizer)
    override(DeepSpeedEngine, "_configure_zero_optimizer", _configure_zero_optimizer)
    override(DeepSpeedEngine, "_configure_optimizer", _configure_optimizer)
