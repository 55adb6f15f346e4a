# SPDX-License-Identifier: Apache-2.0
"""Corrections to DeepSpeed, on engines that run DMuon and on no other.

- The loss scale is updated after the step, not in its middle, so that the step in which it grows
  does not unscale by a factor that its backward never used.
- fp16 without ZeRO scales the loss, which its optimizer then unscales.
- fp32 without ZeRO records the gradient norm that its clipping computes.
- ZeRO-1/2 links optimizer states at start and after loading, for `safe_get_full_optimizer_state`.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from ds_muon.zero.gradients import forget_old_gradients
from ds_muon.zero.seams import override, private


def correct_wrapper(engine: Any) -> None:
    """Apply what the wrapper that DeepSpeed chose needs."""
    wrapper = engine.optimizer
    if wrapper is engine.basic_optimizer:
        record_clipped_norm(engine)
        return
    forget_old_gradients(wrapper)
    if engine.fp16_enabled():
        update_loss_scale_after_step(wrapper)
        if isinstance(wrapper, FP16_UnfusedOptimizer):
            scale_loss_without_zero(engine)
    if isinstance(wrapper, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        link_states(wrapper)


def update_loss_scale_after_step(zero: Any) -> None:
    """Defer `_update_scale` of one fp16 wrapper to the end of its step."""
    update, step = private(zero, "_update_scale"), zero.step
    pending: list[bool] = []

    def deferred_update(has_overflow: bool = False) -> None:
        pending.append(has_overflow)

    def step_then_update(closure: None = None) -> Any:
        result = step(closure)
        while pending:
            update(pending.pop())
        return result

    override(zero, "_update_scale", deferred_update)
    zero.step = step_then_update


def scale_loss_without_zero(engine: Any) -> None:
    """Make engine.backward scale the loss for FP16_UnfusedOptimizer, and its norm the raw one."""
    wrapper = engine.optimizer
    backward, step = engine.backward, wrapper.step

    def scaled_backward(loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        scale = wrapper.loss_scale
        return backward(loss.float() * scale, *args, **kwargs) / scale

    def step_with_raw_norm(closure: None = None) -> Any:
        scale = wrapper.loss_scale
        result = step(closure)
        norm = private(wrapper, "_global_grad_norm")
        override(wrapper, "_global_grad_norm", norm / scale)
        return result

    engine.backward = scaled_backward
    wrapper.step = step_with_raw_norm


def record_clipped_norm(engine: Any) -> None:
    """Keep the norm that fp32 clipping without ZeRO computes and drops."""

    def clip_fp32_gradients() -> None:
        norm = clip_grad_norm_(
            parameters=engine.module.parameters(),
            max_norm=engine.gradient_clipping(),
            mpu=engine.mpu,
        )
        override(engine, "_global_grad_norm", norm)

    override(engine, "clip_fp32_gradients", clip_fp32_gradients)


def link_states(zero: Any) -> None:
    """Let DeepSpeed's accessors find the states of a flat wrapper, now and after each load."""
    load, link = zero.load_state_dict, private(zero, "_lazy_init_hp_params_optimizer_state")

    def load_then_link(*args: Any, **kwargs: Any) -> None:
        load(*args, **kwargs)
        override(zero, "_hp_optimizer_states_linked", False)
        link()

    zero.load_state_dict = load_then_link
    link()
