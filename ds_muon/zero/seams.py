# SPDX-License-Identifier: Apache-2.0
"""Seams: the private attributes of DeepSpeed and torch that are read, and the fixes on instances.

Owns: one guarded accessor, the transport made of deepspeed.comm calls, and the corrections that
apply to engines running DMuon and to no other:
- the loss scale is updated after the step, not in its middle, so that the step in which it grows
  does not unscale by a factor that its backward never used;
- fp16 without ZeRO scales the loss, which its optimizer then unscales;
- fp32 without ZeRO records the gradient norm that its clipping computes;
- ZeRO-1/2 links optimizer states at start and after loading, for `safe_get_full_optimizer_state`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.constants import default_pg_timeout
from deepspeed.runtime.utils import clip_grad_norm_
from torch import Tensor

from ds_muon.comm.transport import Pending

TESTED_VERSIONS = "0.19.8"


def private(owner: Any, name: str) -> Any:
    """Read a private attribute of DeepSpeed.

    Raises:
        RuntimeError: this DeepSpeed does not have it.
    """
    if not hasattr(owner, name):
        owner_name = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        raise RuntimeError(
            f"ds_muon relies on {owner_name}.{name}, which deepspeed "
            f"{deepspeed.__version__} does not have; install deepspeed {TESTED_VERSIONS}"
        )
    return getattr(owner, name)


def parsed_config(engine: Any) -> Any:
    """The engine's DeepSpeedConfig."""
    return private(engine, "_config")


def user_config(engine: Any) -> dict[str, Any]:
    """ds_config.json as the user wrote it."""
    return private(parsed_config(engine), "_param_dict")


def free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody has, where it can say; communication libraries take theirs
    without torch's allocator knowing."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


Partition = tuple[tuple[int, ...], ...]


class DeepSpeedTransport:
    """Transport by deepspeed.comm, so that its comms logger sees the calls.

    It has a communicator of its own: an exchange never queues behind ZeRO's traffic.

    Args:
        purpose: transports of equal purpose and partition share one communicator.
        partition: disjoint lists of all ranks; this transport is over the list with this rank in
            it, and its ranks count from 0 there. None: one list of all ranks.
    """

    def __init__(self, purpose: str = "exchange", partition: Partition | None = None) -> None:
        everyone = tuple(range(dist.get_world_size()))
        self.group = own_group(purpose, (everyone,) if partition is None else partition)
        self._ranks = torch.distributed.get_process_group_ranks(self.group)
        self.rank = self._ranks.index(dist.get_rank())
        self.world_size = len(self._ranks)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        *,
        received_numels: Sequence[int],
        sent_numels: Sequence[int],
    ) -> Pending:
        """See Transport."""
        return dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=list(received_numels),
            input_split_sizes=list(sent_numels),
            group=self.group,
            async_op=True,
        )

    def all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """See Transport."""
        return dist.all_gather_into_tensor(received, sent, group=self.group, async_op=True)

    def broadcast(self, tensor: Tensor, *, source: int) -> Pending:
        """See Transport."""
        return dist.broadcast(tensor, self._ranks[source], group=self.group, async_op=True)

    def reduce(self, tensor: Tensor, *, destination: int) -> Pending:
        """See Transport."""
        return dist.reduce(tensor, self._ranks[destination], group=self.group, async_op=True)

    def all_reduce(self, tensor: Tensor) -> Pending:
        """See Transport."""
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        """See Transport."""
        return dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    def send_receive(
        self, received: Mapping[int, Tensor], sent: Mapping[int, Tensor]
    ) -> list[Pending]:
        """See Transport."""
        p2p, group, ranks = torch.distributed, self.group, self._ranks
        batch = [p2p.P2POp(p2p.irecv, t, ranks[peer], group) for peer, t in received.items()]
        batch += [p2p.P2POp(p2p.isend, t, ranks[peer], group) for peer, t in sent.items()]
        return p2p.batch_isend_irecv(batch) if batch else []

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Transport."""
        shown: list[Any] = [None] * self.world_size
        dist.all_gather_object(shown, value, group=self.group)
        return shown


def own_group(purpose: str, partition: Partition) -> Any:
    """The communicator of this rank's list; every rank asks for the same partitions in order."""
    return _own_group(torch.distributed.group.WORLD, purpose, partition)


@functools.cache
def _own_group(world: Any, purpose: str, partition: Partition) -> Any:
    """One communicator per purpose and partition for all engines that share a world."""
    timeout, mine = _configured_timeout(), dist.get_rank(group=world)
    groups = [torch.distributed.new_group(list(ranks), timeout=timeout) for ranks in partition]
    return next(g for g, ranks in zip(groups, partition, strict=True) if mine in ranks)


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


def link_states(zero: Any) -> None:
    """Let DeepSpeed's accessors find the states of a flat wrapper, now and after each load."""
    load, link = zero.load_state_dict, private(zero, "_lazy_init_hp_params_optimizer_state")

    def load_then_link(*args: Any, **kwargs: Any) -> None:
        load(*args, **kwargs)
        zero._hp_optimizer_states_linked = False
        link()

    zero.load_state_dict = load_then_link
    link()
