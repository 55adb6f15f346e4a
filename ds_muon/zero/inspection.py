# SPDX-License-Identifier: Apache-2.0
"""Inspection: what the installed DeepSpeed says of itself and of a configuration, without ranks.

Owns: an engine that is never built, which answers what only its configuration decides; so the
refusals are those of support.py and not a copy of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_muon.zero.seams import (
    TESTED_VERSIONS,
    missing_from_classes,
    parsed_config,
    version_warning,
)
from ds_muon.zero.support import REFUSALS

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The installed DeepSpeed.

    Attributes:
        missing: what ds_muon needs and its classes lack, in words.
        warning: why this version is not one of the tested ones.
        device_bytes: memory of one device; of the machine on a CPU.
    """

    version: str
    tested: tuple[str, ...]
    missing: tuple[str, ...]
    warning: str | None
    accelerator: str
    devices: int
    device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroKnobs:
    """Settings of zero_optimization with this DeepSpeed's defaults; sizes in elements."""

    stage: int
    reduce_bucket: int
    allgather_bucket: int
    overlap_comm: bool
    sub_group: int
    prefetch: int
    persistence: int
    max_live: int
    max_reuse: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """What can be known of a configuration before a run.

    Attributes:
        error: why DeepSpeed does not accept it; nothing else is known then.
        refusals: regimes that DMuon refuses, in words.
    """

    error: str | None = None
    refusals: tuple[str, ...] = ()
    knobs: ZeroKnobs | None = None


def installed() -> Installed:
    """Ask the installed DeepSpeed."""
    accelerator = get_accelerator()
    return Installed(
        version=deepspeed.__version__,
        tested=TESTED_VERSIONS,
        missing=tuple(missing_from_classes()),
        warning=version_warning(deepspeed.__version__),
        accelerator=accelerator.device_name(),
        devices=accelerator.device_count(),
        device_bytes=accelerator.total_memory(),
    )


def foresee(written: Mapping[str, Any]) -> Foreseen:
    """Read a ds_config.json as DeepSpeed would; "auto" counts as not written.

    Args:
        written: the file's content.
    """
    given = _without_auto({k: v for k, v in written.items() if k not in _BATCH_KEYS})
    try:
        engine = _UnbuiltEngine({**given, "train_micro_batch_size_per_gpu": 1})
        asked = [refusal for refusal in REFUSALS if _asks(refusal.is_asked, engine)]
    except Exception as error:  # DeepSpeed raises whatever its validators do
        return Foreseen(error=f"{type(error).__name__}: {error}")
    refusals = [f"{refusal.regime} ({refusal.key}); {refusal.remedy}" for refusal in asked]
    if given.get("sequence_parallel_size", 1) > 1:
        refusals.append("sequence parallelism (sequence_parallel_size); set it to 1")
    return Foreseen(refusals=tuple(refusals), knobs=_knobs(parsed_config(engine).zero_config))


def _asks(is_asked: Any, engine: Any) -> bool:
    """Some regimes can only be seen where ranks are; those are not asked for yet."""
    try:
        return bool(is_asked(engine))
    except AssertionError:
        return False


def _knobs(zero: Any) -> ZeroKnobs:
    return ZeroKnobs(
        stage=int(zero.stage),
        reduce_bucket=int(zero.reduce_bucket_size),
        allgather_bucket=int(zero.allgather_bucket_size),
        overlap_comm=bool(zero.overlap_comm),
        sub_group=int(zero.sub_group_size),
        prefetch=int(zero.prefetch_bucket_size),
        persistence=int(zero.param_persistence_threshold),
        max_live=int(zero.max_live_parameters),
        max_reuse=int(zero.max_reuse_distance),
    )


def _without_auto(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_auto(v) for k, v in value.items() if v != "auto"}
    return value


class _UnbuiltEngine(DeepSpeedEngine):
    """Answers from a configuration alone; its model has no parameters."""

    def __init__(self, config: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        self._config = DeepSpeedConfig(config)
        self.module = nn.Module()
        self.mpu = None
        self.has_moe_layers = False
        self.pipeline_parallelism = False

    def __del__(self) -> None:
        """There is nothing to destroy."""
