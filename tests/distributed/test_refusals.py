# SPDX-License-Identifier: Apache-2.0
"""Refusals and disagreement: one clear error on every rank, in time, instead of a hang."""

from __future__ import annotations

from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from torch import nn

from tests.harness import models, ranks
from tests.harness.training import digest, ds_config, masters, start_engine

CPU = {"device": "cpu"}
ASKED: dict[str, dict[str, Any]] = {
    "zero_hpz_partition_size": {"stage": 3, "zero": {"zero_hpz_partition_size": 2}},
    "zero_quantized_weights": {"stage": 3, "zero": {"zero_quantized_weights": True}},
    "zero_quantized_gradients": {"stage": 3, "zero": {"zero_quantized_gradients": True}},
    "offload_optimizer.device, offload_param.device = nvme": {
        "stage": 3,
        "zero": {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}},
    },
    "offload_param, zero_optimization.stage": {"stage": 2, "zero": {"offload_param": CPU}},
    "offload_optimizer.ratio": {"stage": 3, "zero": {"offload_optimizer": {**CPU, "ratio": 0.5}}},
    "optimizer.params.hsdp": {
        "stage": 2,
        "params": {"hsdp": {"shard_size": 1}},
        "zero": {"offload_optimizer": CPU},
    },
    "optimizer.params.param_source": {
        "stage": 3,
        "params": {"param_source": "owner_broadcast"},
        "zero": {"offload_param": CPU},
    },
    "super_offload": {"stage": 3, "zero": {"offload_optimizer": {**CPU, "super_offload": True}}},
    "elastic_checkpoint": {"stage": 1, "zero": {"elastic_checkpoint": True}},
    "torch_autocast.enabled": {
        "stage": 2,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    },
    "bf16.bf16_master_weights_and_grads": {
        "stage": 2,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
    },
    "compile.deepcompile": {"stage": 3, "compile": {"deepcompile": True}},
}


def error_of(*, stage: int, params: dict[str, Any] | None = None, **config: Any) -> str:
    """Run on a rank: the error of deepspeed.initialize."""
    config.setdefault("dtype", "fp32")
    try:
        start_engine(ds_config(stage, params={"lr": 1e-2, **(params or {})}, **config))
    except (ValueError, RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("key", ASKED)
def test_an_inexact_regime_is_refused_by_its_key(key: str) -> None:
    for text in ranks.run(2, error_of, **ASKED[key]):
        assert text.startswith("ValueError: DMuon does not support"), text
        assert key in text
        assert "docs/support.md" in text


def initialize_error(model: nn.Module, config: dict[str, Any], parameters: Any = None) -> str:
    """The error of deepspeed.initialize on this rank, if any."""
    try:
        deepspeed.initialize(
            model=model, model_parameters=parameters or model.parameters(), config=config
        )
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def test_a_backend_that_this_device_cannot_run_is_refused_on_every_rank() -> None:
    for text in ranks.run(2, error_of, stage=2, params={"ns_backend": "graph"}):
        assert 'optimizer.params.ns_backend = "graph"' in text and 'use "eager"' in text


def bare_low_precision(*, stage: int) -> str:
    """Run on a rank: a bf16 model, and a configuration that does not say so."""
    return initialize_error(models.build("llama").bfloat16(), ds_config(stage, params={"lr": 1e-2}))


def test_weights_without_fp32_masters_are_refused() -> None:
    for text in ranks.run(2, bare_low_precision, stage=0):
        assert "without fp32 masters" in text and "enable bf16" in text
    assert ranks.run(2, bare_low_precision, stage=2) == ["no error", "no error"]


def odd_groups(settings: dict[str, Any]) -> str:
    """Run on a rank: all parameters in one group with `settings`."""
    model = models.build("llama")
    groups = [{"params": model.parameters(), **settings}]
    config = ds_config(1, params={"lr": 1e-2, "no_decay": "none"})
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    except ValueError as error:
        return str(error)
    return str(sorted({g["kind"] for g in engine.basic_optimizer.param_groups}))


def test_keys_of_parameter_groups_are_honoured_or_refused() -> None:
    assert ranks.run(1, odd_groups, settings={"use_muon": False}) == ["['adamw']"]
    assert ranks.run(1, odd_groups, settings={"momentum": 0.9}) == ["['adamw', 'muon']"]
    for key in ("kind", "lr_ratio", "muon_lr", "nesterov"):
        assert repr(key) in ranks.run(1, odd_groups, settings={key: 1})[0]


def every_rule() -> list[str]:
    """Run on a rank: ask each rule about an engine that wants its regime, and about a plain one."""
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    from ds_muon.zero import support

    engine = start_engine(ds_config(2, params={"lr": 1e-2}))
    wrong = [r.regime for r in support.REFUSALS if r.is_asked(engine)]
    wants: dict[str, Any] = {
        "tensor_parallel.autotp_size": {"autotp_size": lambda: 2},
        "deepspeed.initialize(mpu=...)": {
            "mpu": mock.Mock(get_model_parallel_world_size=lambda: 2)
        },
        "deepspeed.moe.layer.MoE, expert_parallel.enabled": {"has_moe_layers": True},
        "deepspeed.pipe.PipelineModule": {"pipeline_parallelism": True},
    }
    for refusal in support.REFUSALS:
        if refusal.key in wants:
            with mock.patch.multiple(engine, **wants[refusal.key]):
                if not refusal.is_asked(engine):
                    wrong.append(refusal.regime)
    zero = engine._config.zero_config
    with mock.patch.object(engine._config, "zero_config", mock.Mock(wraps=zero, zenflow=object())):
        rule = next(r for r in support.REFUSALS if r.key == "zero_optimization.zenflow")
        if not rule.is_asked(engine):
            wrong.append(rule.regime)
    path = "ds_muon.zero.support.groups._get_sequence_parallel_world_size"
    with mock.patch(path, lambda: 2):
        rule = next(r for r in support.REFUSALS if r.key == "sequence_parallel_size")
        if not rule.is_asked(engine):
            wrong.append(rule.regime)
    assert OffloadDeviceEnum.nvme != OffloadDeviceEnum.none
    return wrong


def test_rules_that_need_other_engines() -> None:
    assert ranks.run(1, every_rule) == [[]]


def own_params(by_rank: list[dict[str, Any]]) -> str:
    """Run on a rank: a configuration of this rank's own."""
    return error_of(stage=2, params=by_rank[torch.distributed.get_rank()])


def test_ranks_with_different_configurations_say_so_on_all_ranks() -> None:
    for text in ranks.run(2, own_params, by_rank=[{}, {"momentum": 0.9}]):
        assert text.startswith("RuntimeError")
        assert "optimizer.params.momentum" in text
        assert "0.95" in text and "0.9'" in text


def test_a_bad_key_on_one_rank_stops_all_ranks() -> None:
    texts = ranks.run(3, own_params, by_rank=[{}, {"momentm": 0.9}, {}])
    assert texts[1].startswith("ValueError") and "did you mean 'momentum'" in texts[1]
    for text in (texts[0], texts[2]):
        assert text.startswith("RuntimeError") and "rank 1" in text and "momentum" in text


def other_version() -> str:
    """Run on a rank: rank 1 has another torch."""
    import ds_muon.zero.prepare as prepare

    real = prepare.version
    rank = torch.distributed.get_rank()

    def version(package: str) -> str:
        return "9.9" if rank == 1 and package == "torch" else real(package)

    with mock.patch.object(prepare, "version", version):
        return error_of(stage=2)


def test_ranks_with_different_versions_say_so() -> None:
    for text in ranks.run(2, other_version):
        assert text.startswith("RuntimeError") and "torch version" in text and "9.9" in text


def other_cpu(params: dict[str, Any]) -> str:
    """Run on a rank: only rank 1's CPU multiplies bf16."""
    from ds_muon.ortho import arithmetic, recipes

    def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
        return torch.distributed.get_rank() == 1 or dtype == torch.float32

    with (
        mock.patch.object(recipes, "multiplies", multiplies),
        mock.patch.object(arithmetic, "multiplies", multiplies),
    ):
        return error_of(stage=2, params=params)


def test_ranks_on_unequal_cpus_say_so_and_what_makes_them_agree() -> None:
    for text in ranks.run(2, other_cpu, params={}):
        assert text.startswith("RuntimeError") and "unequal ones agree on ns_dtype fp32" in text
    assert ranks.run(2, other_cpu, params={"ns_dtype": "fp32"}) == ["no error"] * 2


def other_model() -> str:
    """Run on a rank: rank 1 freezes a matrix."""
    model = models.build("llama")
    if torch.distributed.get_rank() == 1:
        model.layers[0].up_proj.weight.requires_grad_(False)
    return initialize_error(model, ds_config(2, params={"lr": 1e-2}))


def test_ranks_with_different_models_say_so() -> None:
    for text in ranks.run(2, other_model):
        assert "routing" in text and "14 of" in text and "13 of" in text


def no_matrix() -> str:
    """Run on a rank: a model of vectors."""
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    return initialize_error(model, ds_config(1, params={"lr": 1e-2}))


def test_a_model_without_matrices_is_an_error() -> None:
    for text in ranks.run(2, no_matrix):
        assert "none of the 4 trainable parameters is a matrix" in text
        assert "AdamW" in text


def foreign_parameter() -> str:
    """Run on a rank."""
    model = models.build("llama")
    params = [*model.parameters(), nn.Parameter(torch.zeros(3, 3))]
    return initialize_error(model, ds_config(1, params={"lr": 1e-2}), params)


def test_a_parameter_that_is_not_the_models_is_an_error() -> None:
    assert "not a parameter of the model" in ranks.run(1, foreign_parameter)[0]


@torch._dynamo.config.patch(disable=False)
def compiled(how: str, stage: int) -> tuple[str, str]:
    """Run on a rank: the error at start, or else the weights' bits after a step."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    if how == "wrapped":
        model = torch.compile(model, backend="eager")
    elif how == "part":
        model[0] = torch.compile(model[0], backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    config = ds_config(stage, params={"lr": 1e-2})
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
    except ValueError as error:
        return str(error), ""
    engine.backward(engine(torch.ones(2, 4)).square().sum())
    engine.step()
    return "", digest(dict(enumerate_masters(engine)))


def enumerate_masters(engine: Any) -> list[tuple[str, torch.Tensor]]:
    """Masters without names, which a wrapper changes."""
    return [(str(i), tensor) for i, tensor in enumerate(masters(engine).values())]


def test_compiled_models_train_alike_or_are_refused_at_start() -> None:
    for how in ("wrapped", "part"):
        [text, _] = ranks.run(2, compiled, how=how, stage=3)[0]
        assert "ZeRO-3 with modules that torch.compile wraps" in text and "model.compile()" in text
    for how, stage in (("wrapped", 2), ("in place", 3)):
        plain = ranks.run(2, compiled, how="", stage=stage)
        assert ranks.run(2, compiled, how=how, stage=stage) == plain
        assert plain[0][0] == "" and plain[0][1]
