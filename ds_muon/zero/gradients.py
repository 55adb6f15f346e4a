# SPDX-License-Identifier: Apache-2.0
"""Gradients: a parameter that no backward of a step has reached has a zero one.

ZeRO-3, and every stage under `offload_optimizer`, keep gradients in buffers that outlive a step and
write what a backward reaches. What it does not reach would go on with the gradient of an earlier
step, and under offload what only an earlier micro-batch reached would be lost.

Owns: the corrections on one ZeRO optimizer, around its step.
"""

from __future__ import annotations

from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_muon.zero.seams import private
from ds_muon.zero.wrapping import after, before


def forget_old_gradients(zero: Any) -> None:
    """Install the corrections that this optimizer needs; none for other wrappers."""
    if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        if private(zero, "offload_optimizer"):
            zero.step = before(zero.step, lambda: _complete_zero3(zero))
        zero.step = after(zero.step, lambda: private(zero, "grad_partitions_flat_buffer").zero_())
    elif isinstance(zero, DeepSpeedZeroOptimizer) and private(zero, "cpu_offload"):
        zero.step = before(zero.step, lambda: _complete_flat(zero))
        zero.step = after(zero.step, lambda: _forget_accumulated(zero))


def _complete_zero3(zero: Any) -> None:
    """Bring to the host what the last micro-batch did not; zero what none did."""
    leaves = private(zero, "fp32_partitioned_groups_flat")
    found = private(zero, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition")
    device = get_accelerator().current_device_name()
    for parameter in (p for group in private(zero, "fp16_groups") for p in group):
        number = zero.get_param_id(parameter)
        if number in private(zero, "norm_for_param_grads"):
            continue
        index, start, numel = private(zero, "grad_position")[number]
        if parameter.ds_id in private(zero, "_offload_boundary_param_ids"):
            gradient = found[parameter.ds_id].to(device)
            private(zero, "_offload_grad_partition_at_boundary")(parameter, gradient, {}, {})
        else:
            leaves[index].grad.narrow(0, start, numel).zero_()


def _complete_flat(zero: Any) -> None:
    """The same for ZeRO-1 and ZeRO-2."""
    leaves = private(zero, "single_partition_of_fp32_groups")
    for index, parameters in enumerate(private(zero, "params_in_partition")):
        for parameter in parameters:
            number = zero.get_param_id(parameter)
            if number in private(zero, "norm_for_param_grads"):
                continue
            if number not in private(zero, "_offload_accumulated_param_ids"):
                _, _, start, numel = private(zero, "grad_position")[number]
                leaves[index].grad.view(-1).narrow(0, start, numel).zero_()
            elif private(zero, "_use_compact_grad_partition_buffer")(index):
                zero.copy_grads_in_partition(parameter, index)
            else:
                private(zero, "_restore_cpu_offload_grad_to_gpu")(parameter)
                zero.set_norm_for_param_grad_in_gpu(parameter)
                zero.update_offload_overflow_tracker_for_param_grad(parameter)
                zero.async_inplace_copy_grad_to_fp32_buffer_from_gpu(parameter)


def _forget_accumulated(zero: Any) -> None:
    for buffer in private(zero, "accumulated_grads_in_cpu").values():
        buffer.zero_()
