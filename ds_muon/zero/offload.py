# SPDX-License-Identifier: Apache-2.0
"""Offload: what ZeRO keeps on the host, and what the step needs to work with it there.

Owns: the reading of `offload_optimizer` and `offload_param`.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_muon.run.crossing import HostBuffers
from ds_muon.zero.seams import available, parsed_config


def offload_device(engine: Any, which: str) -> OffloadDeviceEnum:
    """Where `offload_optimizer` or `offload_param` puts things; `which` is the key's last word."""
    config = getattr(parsed_config(engine).zero_config, f"offload_{which}")
    return OffloadDeviceEnum.none if config is None else config.device


def is_on_host(engine: Any, which: str) -> bool:
    """Whether master weights and state (`optimizer`), or shards (`param`), stand on the host."""
    return offload_device(engine, which) == OffloadDeviceEnum.cpu


def require_offload(engine: Any) -> None:
    """Refuse offload where DeepSpeed keeps offloaded gradients in a way that is not known.

    Raises:
        ValueError: this DeepSpeed is older.
    """
    needed = (
        (DeepSpeedZeroOptimizer, "_use_compact_grad_partition_buffer"),
        (DeepSpeedZeroOptimizer_Stage3, "_offload_grad_partition_at_boundary"),
    )
    asked = any(is_on_host(engine, which) for which in ("optimizer", "param"))
    if asked and not all(available(owner, name) for owner, name in needed):
        raise ValueError(
            "zero_optimization.offload_optimizer and offload_param need deepspeed 0.19.8 or newer, "
            "where DMuon knows how gradients get to the host; install it, or remove them"
        )


def crossing_for(engine: Any, device: torch.device) -> HostBuffers | None:
    """The way between leaves on the host and the arena on `device`; None: the leaves are there."""
    if not is_on_host(engine, "optimizer"):
        return None
    pin = parsed_config(engine).zero_config.offload_optimizer.pin_memory
    return HostBuffers(device, pin=pin)
