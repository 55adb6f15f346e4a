# SPDX-License-Identifier: Apache-2.0
"""Support: every DeepSpeed regime is exact and tested, or refused at start by one rule here.

Owns: the table of regimes; docs/support.md is generated from it (scripts/gen_docs.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.utils import groups
from torch._dynamo.eval_frame import OptimizedModule

from ds_muon.config import DMuonConfig, require_stage
from ds_muon.zero.offload import is_on_host, offload_device
from ds_muon.zero.seams import parsed_config, private


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A regime that is not exact yet.

    Attributes:
        regime: its name.
        key: what in ds_config.json, or in the call, asks for it.
        remedy: what to do instead.
        is_asked: whether an engine under construction asks for it.
    """

    regime: str
    key: str
    remedy: str
    is_asked: Callable[[Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Supported:
    """A regime whose parity with a one-process reference is tested, and the test."""

    regime: str
    precision: str
    test: str


SUPPORTED: tuple[Supported, ...] = (
    Supported(
        regime="no ZeRO (stage 0)",
        precision="fp32, bf16, fp16",
        test="tests/distributed/test_parity.py, test_fp16.py",
    ),
    Supported(
        regime="ZeRO-1",
        precision="fp32, bf16, fp16",
        test="tests/distributed/test_parity.py, test_fp16.py",
    ),
    Supported(
        regime="ZeRO-1 with fp32 gradient accumulation (BF16_Optimizer)",
        precision="bf16",
        test="tests/distributed/test_layouts.py, test_checkpoint.py",
    ),
    Supported(
        regime="ZeRO-2",
        precision="fp32, bf16, fp16",
        test="tests/distributed/test_parity.py, test_fp16.py",
    ),
    Supported(
        regime="ZeRO-3, with and without zero.Init, any sub_group_size",
        precision="fp32, bf16, fp16",
        test="tests/distributed/test_parity.py, test_layouts.py, test_fp16.py",
    ),
    Supported(
        regime="HSDP on ZeRO-1, 2, 3 (`hsdp`), with and without zero.Init",
        precision="fp32, bf16, fp16",
        test="tests/distributed/test_hsdp.py, test_hsdp_checkpoint.py",
    ),
    Supported(
        regime="CPU offload: `offload_optimizer` at ZeRO-1, 2, 3, `offload_param` at ZeRO-3",
        precision="fp32, bf16, fp16",
        test="tests/distributed/test_offload.py",
    ),
)


def _zero(engine: Any) -> Any:
    return parsed_config(engine).zero_config


def _param(engine: Any, key: str) -> Any:
    """A key of `optimizer.params` as written; other rules say what is wrong with its value."""
    return (engine.optimizer_params() or {}).get(key)


def _expert_parallel(engine: Any) -> bool:
    # Absent before DeepSpeed 0.19.2.
    config = getattr(parsed_config(engine), "expert_parallel_config", None)
    return engine.has_moe_layers or bool(config is not None and config.enabled)


def _model_parallel(engine: Any) -> bool:
    mpu = engine.mpu
    size = getattr(mpu, "get_model_parallel_world_size", lambda: 1)
    return mpu is not None and size() > 1


def _has_no_masters(engine: Any) -> bool:
    if engine.zero_optimization() or engine.bfloat16_enabled() or engine.fp16_enabled():
        return False
    return any(p.requires_grad and p.dtype != torch.float32 for p in engine.module.parameters())


def _wraps_compiled(engine: Any) -> bool:
    """A wrapper keeps a plain dict of parameters, and ZeRO-3's forward marks DeepSpeed's own."""
    wrapped = any(isinstance(m, OptimizedModule) for m in engine.module.modules())
    return wrapped and int(engine.zero_optimization_stage()) == 3


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        regime="automatic tensor parallelism (AutoTP)",
        key="tensor_parallel.autotp_size",
        remedy="set it to 1 or remove tensor_parallel",
        is_asked=lambda e: e.autotp_size() > 1,
    ),
    Refusal(
        regime="tensor parallelism by a model-parallel unit",
        key="deepspeed.initialize(mpu=...)",
        remedy="train without model parallelism",
        is_asked=_model_parallel,
    ),
    Refusal(
        regime="expert parallelism (DeepSpeed MoE layers, AutoEP)",
        key="deepspeed.moe.layer.MoE, expert_parallel.enabled",
        remedy="keep experts as ordinary parameters, which every ZeRO stage shards",
        is_asked=_expert_parallel,
    ),
    Refusal(
        regime="pipeline parallelism",
        key="deepspeed.pipe.PipelineModule",
        remedy="train without a PipelineModule",
        is_asked=lambda e: e.pipeline_parallelism,
    ),
    Refusal(
        regime="sequence parallelism (Ulysses)",
        key="sequence_parallel_size",
        remedy="set it to 1",
        is_asked=lambda e: private(groups, "_get_sequence_parallel_world_size")() > 1,
    ),
    Refusal(
        regime="hierarchical partitioning (ZeRO++ hpZ)",
        key="zero_optimization.zero_hpz_partition_size",
        remedy="set it to 1",
        is_asked=lambda e: _zero(e).zero_hpz_partition_size > 1,
    ),
    Refusal(
        regime="quantized ZeRO++",
        key="zero_optimization.zero_quantized_weights, zero_quantized_nontrainable_weights, "
        "zero_quantized_gradients",
        remedy="set them to false",
        is_asked=lambda e: (
            _zero(e).zero_quantized_weights
            or _zero(e).zero_quantized_nontrainable_weights
            or _zero(e).zero_quantized_gradients
        ),
    ),
    Refusal(
        regime="ZenFlow",
        key="zero_optimization.zenflow",
        remedy="remove it",
        is_asked=lambda e: _zero(e).zenflow is not None,
    ),
    Refusal(
        regime="SuperOffload",
        key="zero_optimization.offload_optimizer.super_offload",
        remedy="set it to false",
        is_asked=lambda e: bool(e.super_offload()),
    ),
    Refusal(
        regime="offload to NVMe",
        key="zero_optimization.offload_optimizer.device, offload_param.device = nvme",
        remedy="set it to cpu",
        is_asked=lambda e: (
            OffloadDeviceEnum.nvme in (offload_device(e, "optimizer"), offload_device(e, "param"))
        ),
    ),
    Refusal(
        regime="parameter offload below ZeRO-3, where DeepSpeed ignores it",
        key="zero_optimization.offload_param, zero_optimization.stage",
        remedy="remove offload_param, or set stage to 3",
        is_asked=lambda e: is_on_host(e, "param") and int(e.zero_optimization_stage()) < 3,
    ),
    Refusal(
        regime="partial optimizer offload (Twin-Flow)",
        key="zero_optimization.offload_optimizer.ratio",
        remedy="set it to 1.0",
        is_asked=lambda e: is_on_host(e, "optimizer") and e.zero_partial_offload() != 1.0,
    ),
    Refusal(
        regime="HSDP with offload",
        key="optimizer.params.hsdp, zero_optimization.offload_optimizer, offload_param",
        remedy="remove one of them; without hsdp ZeRO shards over all ranks",
        is_asked=lambda e: (
            _param(e, "hsdp") is not None and (is_on_host(e, "optimizer") or is_on_host(e, "param"))
        ),
    ),
    Refusal(
        regime="owners' copies of matrices with parameter offload",
        key="optimizer.params.param_source, zero_optimization.offload_param",
        remedy="leave param_source at shards: owners keep whole matrices on the device, where "
        "offload_param wants none",
        is_asked=lambda e: (
            _param(e, "param_source") == "owner_broadcast" and is_on_host(e, "param")
        ),
    ),
    Refusal(
        regime="low-precision master weights, gradients or optimizer states",
        key="fp16.fp16_master_weights_and_grads, bf16.bf16_master_weights_and_grads, "
        "bf16.bf16_optimizer_states",
        remedy="set them to false",
        is_asked=lambda e: (
            e.fp16_master_weights_and_gradients()
            or e.bf16_master_weights_and_gradients()
            or e.bf16_optimizer_states()
        ),
    ),
    Refusal(
        regime="low-precision weights without fp32 masters",
        key="a model in bf16 or fp16, without ZeRO and without bf16.enabled or fp16.enabled",
        remedy="enable bf16 or fp16 in the configuration",
        is_asked=_has_no_masters,
    ),
    Refusal(
        regime="torch autocast",
        key="torch_autocast.enabled",
        remedy="use bf16.enabled or fp16.enabled",
        is_asked=lambda e: e.torch_autocast_enabled(),
    ),
    Refusal(
        regime="elastic checkpoints",
        key="zero_optimization.elastic_checkpoint",
        remedy="set it to false",
        is_asked=lambda e: e.zero_elastic_checkpoint(),
    ),
    Refusal(
        regime="DeepCompile",
        key="compile.deepcompile",
        remedy="set it to false; model.compile() is exact at every stage",
        is_asked=lambda e: e.is_deepcompile_enabled(),
    ),
    Refusal(
        regime="ZeRO-3 with modules that torch.compile wraps",
        key="torch.compile(model)",
        remedy="compile in place: model.compile(), or engine.compile() after "
        "deepspeed.initialize; or use stage 0, 1 or 2",
        is_asked=_wraps_compiled,
    ),
)


def _makes_bf16_optimizer(engine: Any) -> bool:
    """Whether DeepSpeed wraps the optimizer in its BF16_Optimizer, which replaces ZeRO-1's own."""
    _, accumulation = engine.get_data_types()
    low = engine.bfloat16_enabled() and accumulation == torch.float32
    on_device = not is_on_host(engine, "optimizer")
    return low and on_device and int(engine.zero_optimization_stage()) == 1


def refuse_unsupported(engine: Any, config: DMuonConfig) -> None:
    """Stop before anything is built, if the engine asks for a regime that is not exact.

    Raises:
        ValueError: names the regime, its key and the remedy.
    """
    for refusal in REFUSALS:
        if refusal.is_asked(engine):
            raise ValueError(
                f"DMuon does not support {refusal.regime} ({refusal.key}); {refusal.remedy}. "
                "docs/support.md lists what it supports"
            )
    require_stage(
        config,
        int(engine.zero_optimization_stage()),
        bf16_optimizer=_makes_bf16_optimizer(engine),
    )


def supported_table() -> str:
    """Return the regimes that are exact, as a Markdown table."""
    lines = ["| regime | precision | parity tested in |", "|---|---|---|"]
    lines += [f"| {s.regime} | {s.precision} | {s.test} |" for s in SUPPORTED]
    return "\n".join(lines) + "\n"


def refused_table() -> str:
    """Return the regimes that are refused at start, as a Markdown table."""
    lines = ["| refused at start | asked for by | instead |", "|---|---|---|"]
    lines += [f"| {r.regime} | `{r.key}` | {r.remedy} |" for r in REFUSALS]
    return "\n".join(lines) + "\n"
