# SPDX-License-Identifier: Apache-2.0
"""Seams: every undocumented attribute of DeepSpeed that ds_muon reads or replaces, in one table.

Owns: the table, the only accessors to what is in it, and the probe that compares it with the
DeepSpeed that is installed: attributes of classes and modules when ds_muon hooks itself in, those
of instances when an engine is built. A version that lacks one is refused by one error that names
all that is missing, before anything has been changed.
Never does: say what is done about them; corrections.py, leaves.py, hsdp/ and parameters/ do.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any, Literal

import deepspeed
import torch
from deepspeed.constants import default_pg_timeout

# scripts/test_versions.sh runs on each of these; what lies between them counts as tested.
TESTED_VERSIONS = ("0.19.0", "0.19.3", "0.19.6", "0.19.8")

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_CONFIG = "deepspeed.runtime.config:DeepSpeedConfig"
_ZERO12 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_ZERO3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
_UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload"
_COORDINATOR = (
    "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"
)
_INIT = "deepspeed.runtime.zero.partition_parameters:Init"
# What ZeRO-3 puts on every parameter.
_PARAMETER = "torch.nn.parameter:Parameter"
_GROUPS = "deepspeed.utils.groups"
_ZERO12_MODULE = "deepspeed.runtime.zero.stage_1_and_2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One attribute.

    Attributes:
        owner: "module:Class", or a module.
        level: "class" for what stands on the class or module, "instance" for what its objects have.
        purpose: what ds_muon needs it for.
        only_for: the feature that is refused without it; None: nothing works without it.
    """

    owner: str
    name: str
    level: Literal["class", "instance"]
    purpose: str
    only_for: str | None = None

    def __str__(self) -> str:
        owner = self.owner.rsplit(":", 1)[-1].rsplit(".", 1)[-1]
        return f"{owner}.{self.name}: {self.purpose}"


OFFLOAD = "CPU offload, from deepspeed 0.19.8"


def _of(
    owner: str, level: Literal["class", "instance"], only_for: str | None = None, **names: str
) -> tuple[Seam, ...]:
    return tuple(
        Seam(owner=owner, name=name, level=level, purpose=purpose, only_for=only_for)
        for name, purpose in names.items()
    )


SEAMS: tuple[Seam, ...] = (
    *_of(
        _ENGINE,
        "class",
        _configure_basic_optimizer="hooked, to build DMuon's base optimizer",
        _configure_zero_optimizer="hooked, to partition over a row of HSDP",
        _configure_optimizer="hooked, to bind the optimizer once it is wrapped",
        clip_fp32_gradients="replaced without ZeRO in fp32, to record the gradient's norm",
        _load_checkpoint="replaced, to take a checkpoint by parameter name",
        _load_zero_checkpoint="replaced, likewise",
        _get_all_ckpt_names="replaced while such a checkpoint is loaded",
        _take_model_step="followed under qk_clip: the next step's logits start anew",
        is_first_weights_partition_group="replaced under HSDP: one replica writes model files",
    ),
    *_of(
        _ENGINE,
        "instance",
        _config="the parsed ds_config.json",
        seq_data_parallel_group="the group that ZeRO partitions over; a row under HSDP",
        seq_dp_world_size="the size of that group, which checkpoints record",
        _global_grad_norm="written without ZeRO in fp32, where DeepSpeed drops the norm",
    ),
    *_of(_CONFIG, "instance", _param_dict="ds_config.json as written, compared between ranks"),
    *_of(
        _ZERO12,
        "class",
        _update_scale="deferred to the end of an fp16 step",
        allreduce_and_scatter="replaced by reduce_scatter_v",
        _lazy_init_hp_params_optimizer_state="called at start, to link optimizer states",
        _link_all_hp_params="followed under HSDP: it binds accessors anew",
        refresh_fp32_params="made to wait for hidden gathers and published updates",
        _restore_from_bit16_weights="left out where a load has filled the masters",
    ),
    *_of(
        _ZERO12,
        "instance",
        bit16_groups_flat="flat 16-bit weights: where each parameter lies",
        single_partition_of_fp32_groups="flat master weights: the leaves",
        averaged_gradients="reduced gradients, which HSDP reduces again",
        model_parallel_group="replaced under HSDP: norms and overflow cover the replicas",
        model_parallel_rank="replaced under HSDP, likewise",
        allgather_bucket_size="width of the slices of a hidden gather",
        use_multi_rank_bucket_allreduce="set by reduce_scatter_v: one call for all ranks' slices",
        dp_process_group="the group that gradients are reduced over",
        communication_data_type="what gradients are reduced in",
        overlap_comm="whether buckets are reduced on a stream of their own",
        reduction_stream="that stream",
        bit16_groups="parameters, of which buckets are made",
        reduce_bucket_size="how large a bucket may be",
        parallel_partitioned_bit16_groups="16-bit weights that published updates go to",
        _hp_optimizer_states_linked="cleared after a load, so that states are linked again",
    ),
    *_of(
        _ZERO12,
        "class",
        OFFLOAD,
        _use_compact_grad_partition_buffer="how gradients get to the host",
        _restore_cpu_offload_grad_to_gpu="what an earlier micro-batch left on the host",
    ),
    *_of(
        _ZERO12,
        "instance",
        OFFLOAD,
        cpu_offload="whether leaves are on the host",
        params_in_partition="whose gradients go to this rank's leaf",
        norm_for_param_grads="which gradients the last micro-batch brought",
        grad_position="where a gradient belongs in the leaf",
        accumulated_grads_in_cpu="gradients of earlier micro-batches",
        _offload_accumulated_param_ids="whose gradients those are",
    ),
    *_of(_ZERO12_MODULE, "class", all_gather_dp_groups="replaced where the gather is hidden"),
    *_of(
        _ZERO3,
        "class",
        _update_scale="deferred to the end of an fp16 step",
        _restore_from_bit16_weights="left out where a load has filled the masters",
    ),
    *_of(
        _ZERO3,
        "instance",
        fp16_groups="sub-groups: which parameters share a leaf",
        fp32_partitioned_groups_flat="flat master weights: the leaves",
        fp16_partitioned_groups_flat="16-bit weights that published updates go to",
        averaged_gradients="reduced gradients, which HSDP reduces again",
        model_parallel_group="replaced under HSDP: norms and overflow cover the replicas",
        model_parallel_rank="replaced under HSDP, likewise",
        parameter_offload="leads to the coordinator, which frees parameters",
        persistent_parameters="shortened where reshard_after_forward rules instead",
        offload_optimizer="whether leaves are on the host",
        grad_partitions_flat_buffer="reduced gradients, zeroed between steps",
    ),
    *_of(
        _ZERO3,
        "class",
        OFFLOAD,
        _offload_grad_partition_at_boundary="how a gradient gets to the host",
    ),
    *_of(
        _ZERO3,
        "instance",
        OFFLOAD,
        norm_for_param_grads="which gradients the last micro-batch brought",
        grad_position="where a gradient belongs in the leaf",
        _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition="gradients on the device",
        _offload_boundary_param_ids="whose gradients are on the way to the host",
    ),
    *_of(
        _BF16,
        "class",
        _restore_from_bit16_weights="left out where a load has filled the masters",
        _lazy_init_hp_params_optimizer_state="called at start, to link optimizer states",
    ),
    *_of(
        _BF16,
        "instance",
        bf16_groups_flat="flat 16-bit weights: where each parameter lies",
        fp32_groups_flat_partition="flat master weights: the leaves",
        _hp_optimizer_states_linked="cleared after a load, so that states are linked again",
    ),
    *_of(_UNFUSED, "class", _update_scale="deferred to the end of an fp16 step"),
    *_of(
        _UNFUSED,
        "instance",
        fp32_groups="master weights: the leaves",
        loss_scale_config="the loss scale, which a load sets",
        _global_grad_norm="corrected, since it carries the loss scale",
    ),
    *_of(_OFFLOAD, "class", get_param_coordinator="the coordinator, which frees parameters"),
    *_of(_OFFLOAD, "instance", persistent_parameters="shortened, like the optimizer's"),
    *_of(
        _COORDINATOR,
        "class",
        _PartitionedParameterCoordinator__release_param="replaced by reshard_after_forward",
        release_sub_module="replaced by reshard_after_forward",
        release_and_reset_all="replaced by reshard_after_forward",
    ),
    *_of(
        _PARAMETER,
        "instance",
        all_gather="a gather, which waits for published updates",
        all_gather_coalesced="the gather of a fetch, which owner_broadcast replaces",
        partition="the end of a gather; after a write, owners' copies are stale",
        ds_tensor="this rank's piece of a parameter",
        ds_shape="a partitioned parameter's own shape",
        ds_status="whether a parameter is gathered",
        ds_persist="cleared where reshard_after_forward rules instead",
        ds_process_group="the group that a parameter is partitioned over",
    ),
    *_of(
        _INIT,
        "class",
        "hsdp at stage 3, from deepspeed 0.19.3",
        _partition_world_size="each parameter may have a group of its own",
    ),
    *_of(
        "torch.nn.modules.module:Module",
        "instance",
        _non_persistent_buffers_set="buffers that are in no state dict",
    ),
    *_of(_GROUPS, "class", _get_sequence_parallel_world_size="refusal of sequence parallelism"),
)
_BY_KEY = {(seam.owner, seam.name): seam for seam in SEAMS}


def private(owner: Any, name: str) -> Any:
    """Read an attribute that is in the table.

    Raises:
        AssertionError: it is not.
        RuntimeError: this DeepSpeed does not have it.
    """
    seam = _seam(owner, name)
    if not hasattr(owner, name):
        raise RuntimeError(_report([str(seam)]))
    return getattr(owner, name)


def override(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute that is in the table.

    Raises:
        AssertionError: it is not.
        RuntimeError: this DeepSpeed does not have it, so that nobody would look at the new value.
    """
    private(owner, name)
    setattr(owner, name, value)


def available(owner: Any, name: str) -> bool:
    """Whether this DeepSpeed has an attribute that only one feature needs."""
    return hasattr(owner, _seam(owner, name).name)


def _seam(owner: Any, name: str) -> Seam:
    for key in _owner_keys(owner):
        if (key, name) in _BY_KEY:
            return _BY_KEY[key, name]
    raise AssertionError(f"{_owner_keys(owner)[0]} {name!r} is not in zero/seams.py's table")


def _owner_keys(owner: Any) -> list[str]:
    if isinstance(owner, ModuleType):
        return [owner.__name__]
    kind = owner if isinstance(owner, type) else type(owner)
    return [f"{c.__module__}:{c.__qualname__}" for c in kind.__mro__]


def missing_from_classes() -> list[str]:
    """What the installed DeepSpeed's classes and modules lack, in words."""
    lacking = []
    for seam in SEAMS:
        if seam.level == "class" and seam.only_for is None:
            try:
                owner = _import(seam.owner)
            except (ImportError, AttributeError):
                owner = None
            if not hasattr(owner, seam.name):
                lacking.append(str(seam))
    return lacking


def missing_from(instances: Iterable[Any]) -> list[str]:
    """What some objects of DeepSpeed lack, in words."""
    lacking = []
    for instance in instances:
        keys = _owner_keys(instance)
        lacking += [
            str(seam)
            for seam in SEAMS
            if seam.level == "instance"
            and seam.owner in keys
            and seam.only_for is None
            and not hasattr(instance, seam.name)
        ]
    return lacking


def require_classes() -> None:
    """Stop before anything is hooked, if the installed DeepSpeed lacks what ds_muon needs.

    Raises:
        RuntimeError: names everything that is missing.
    """
    if lacking := missing_from_classes():
        raise RuntimeError(_report(lacking))


def require_instances(*instances: Any) -> None:
    """Stop before an engine is changed, if one of its objects lacks what ds_muon needs.

    Raises:
        RuntimeError: names everything that is missing.
    """
    if lacking := missing_from(instances):
        raise RuntimeError(_report(lacking))


def _import(owner: str) -> Any:
    module, _, name = owner.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def _report(lacking: Sequence[str]) -> str:
    listed = "".join(f"\n  {text}" for text in lacking)
    return (
        f"DMuon needs attributes that deepspeed {deepspeed.__version__} does not have:{listed}\n"
        f"ds_muon is tested with deepspeed {', '.join(TESTED_VERSIONS)}; install one of these, as "
        f"in: pip install deepspeed=={TESTED_VERSIONS[-1]}"
    )


def version_warning(installed: str) -> str | None:
    """Say that a version is outside the tested ones, or nothing; the probe has passed by then."""
    first, last = TESTED_VERSIONS[0], TESTED_VERSIONS[-1]
    if _numbers(first) <= _numbers(installed) <= _numbers(last):
        return None
    return (
        f"deepspeed {installed} is outside the versions that ds_muon is tested with, {first} to "
        f"{last}. It has every attribute that ds_muon looks for, so training goes on; compare a "
        "run with `ds_muon selftest` first"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version, without what builds append ("0.19.8+abc", "0.20.0rc1")."""
    numbers = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits or 0))
    return tuple(numbers)


def parsed_config(engine: Any) -> Any:
    """The engine's DeepSpeedConfig."""
    return private(engine, "_config")


def user_config(engine: Any) -> dict[str, Any]:
    """ds_config.json as the user wrote it."""
    return private(parsed_config(engine), "_param_dict")


def world_timeout() -> timedelta:
    """The time-out of the world's communicator; a new group would take torch's own otherwise."""
    device = torch.device(deepspeed.get_accelerator().device_name())
    try:
        return torch.distributed.group.WORLD._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return default_pg_timeout
