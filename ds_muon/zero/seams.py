# SPDX-License-Identifier: Apache-2.0
"""Seams: the private attributes of DeepSpeed and torch that are read, and the fixes on instances.

Owns: one guarded accessor, the transport made of deepspeed.comm calls, and three corrections that
apply to engines running DMuon and to no other:
- the loss scale is updated after the step, not in its middle, so that the step in which it grows
  does not unscale by a factor that its backward never used;
- fp16 without ZeRO scales the loss, which its optimizer then unscales;
- fp32 without ZeRO records the gradient norm that its clipping computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.constants import default_pg_timeout
from deepspeed.runtime.utils import clip_grad_norm_
from torch import Tensor

TESTED_VERSIONS = "0.19.8"


def private(owner: Any, name: str) -> Any:
    """Read a private attribute of DeepSpeed.

    Raises:
        RuntimeError: this DeepSpeed does not have it.
    """
    if not hasattr(owner, name):
        raise RuntimeError(
            f"ds_muon relies on {type(owner).__name__}.{name}, which deepspeed "
            f"{deepspeed.__version__} does not have; install deepspeed {TESTED_VERSIONS}"
        )
    return getattr(owner, name)


class DeepSpeedTransport:
    """Transport over all ranks by deepspeed.comm, so that its comms logger sees the calls.

    It has a communicator of its own: an exchange never queues behind ZeRO's traffic.
    """

    def __init__(self) -> None:
        self._group = torch.distributed.new_group(
            list(range(dist.get_world_size())), timeout=_configured_timeout()
        )
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        *,
        received_numels: Sequence[int],
        sent_numels: Sequence[int],
    ) -> None:
        """See Transport."""
        dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=list(received_numels),
            input_split_sizes=list(sent_numels),
            group=self._group,
        )

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Transport."""
        shown: list[Any] = [None] * self.world_size
        dist.all_gather_object(shown, value, group=self._group)
        return shown


def _configured_timeout() -> timedelta:
    """The time-out of the world's communicator; a new group would take torch's own otherwise."""
    device = torch.device(deepspeed.get_accelerator().device_name())
    try:
        return torch.distributed.group.WORLD._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return default_pg_timeout


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

    zero._update_scale = deferred_update
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
        wrapper._global_grad_norm = private(wrapper, "_global_grad_norm") / scale
        return result

    engine.backward = scaled_backward
    wrapper.step = step_with_raw_norm


def record_clipped_norm(engine: Any) -> None:
    """Keep the norm that fp32 clipping without ZeRO computes and drops."""

    def clip_fp32_gradients() -> None:
        engine._global_grad_norm = clip_grad_norm_(
            parameters=engine.module.parameters(),
            max_norm=engine.gradient_clipping(),
            mpu=engine.mpu,
        )

    private(engine, "clip_fp32_gradients")
    engine.clip_fp32_gradients = clip_fp32_gradients
