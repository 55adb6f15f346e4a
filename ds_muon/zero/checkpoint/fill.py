# SPDX-License-Identifier: Apache-2.0
"""Fill: what a load by name has to set besides the leaves of the optimizer.

Owns: weights that follow from masters, settings of groups and of the scheduler, the loss scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_muon.checkpoint.pieces import Shard
from ds_muon.optimizer import MatrixOwnerOptimizer
from ds_muon.zero.checkpoint.contents import SavedWeights
from ds_muon.zero.checkpoint.files import SavedTag
from ds_muon.zero.seams import private

SCALE_NUMBERS = ("cur_scale", "cur_iter", "last_overflow_iter")
_SCALER_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint that this run takes by parameter name.

    Attributes:
        weights: of all parameters, trained or not.
        scaler: loss scale and the like.
    """

    tag: SavedTag
    shards: Sequence[Shard]
    weights: SavedWeights
    scaler: Mapping[str, Any]


def fill_weights(wrapper: Any, optimizer: MatrixOwnerOptimizer) -> None:
    """Round the masters to the weights that the model computes with."""
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        # Loading its own masters, ZeRO-3 copies them to the weights' partitions.
        own = {key: getattr(wrapper, key) for key in _SCALER_KEYS}
        own[FP32_FLAT_GROUPS] = private(wrapper, "fp32_partitioned_groups_flat")
        world_size = optimizer.binding.header.world_size
        wrapper.load_state_dict([own] * world_size, load_optimizer_states=False)
    elif isinstance(wrapper, FP16_UnfusedOptimizer):
        for weights, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
            torch._foreach_copy_([w.data for w in weights], [m.data for m in masters])
    elif wrapper is not optimizer:
        wrapper.update_lp_params()


def fill_settings(engine: Any, optimizer: MatrixOwnerOptimizer, source: Source) -> None:
    """Settings of groups, and the loss scale where both runs scale dynamically."""
    for shard in source.shards:
        optimizer.take_settings(shard.settings)
        if shard.shared_lr is not None and engine.lr_scheduler is not None:
            # A scheduler goes on from there; without one this run's own lr stands.
            for group in optimizer.param_groups:
                group["lr"] = shard.shared_lr
    saved, scaler = _saved_scale(source.scaler), _dynamic_scaler(engine.optimizer)
    if saved is not None and scaler is not None:
        vars(scaler).update(saved)


def _saved_scale(saved: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a dynamic loss scale has learned, from ZeRO's scaler or the numbers of a run without."""
    scaler = saved.get("loss_scaler")
    if isinstance(scaler, DynamicLossScaler):
        return {key: getattr(scaler, key) for key in SCALE_NUMBERS}
    if saved.get("dynamic_loss_scale") and "cur_scale" in saved:
        return {key: saved[key] for key in SCALE_NUMBERS}
    return None


def _dynamic_scaler(wrapper: Any) -> Any:
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        config = private(wrapper, "loss_scale_config")
        return config if config.dynamic_loss_scale else None
    scaler = getattr(wrapper, "loss_scaler", None)
    return scaler if isinstance(scaler, DynamicLossScaler) else None


def require_scheduler(scheduler: Any, saved: Mapping[str, Any] | None) -> None:
    """Check that a saved scheduler's state fits this run's.

    Raises:
        ValueError: it is of another kind.
    """
    own = {} if scheduler is None else scheduler.state_dict()
    missing = sorted(set(own) - set(saved or {}))
    if missing:
        kind = type(scheduler).__name__
        raise ValueError(
            f"its learning rate scheduler is of another kind than this run's {kind}: it has no "
            f"{', '.join(missing)}; use the scheduler that saved, or load with "
            "load_lr_scheduler_states=False, which starts this one anew"
        )


def fit_scheduler(scheduler: Any, groups: int) -> None:
    """Give a scheduler that another optimizer's groups had this run's number of groups."""
    for name in ("base_lrs", "_last_lr"):
        saved = vars(scheduler).get(name) if scheduler is not None else None
        if isinstance(saved, list) and len(saved) != groups and len(set(saved)) == 1:
            vars(scheduler)[name] = saved[:1] * groups
