# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from pydantic import ValidationError

from ds_muon.config import DMuonConfig, parse, require_stage
from ds_muon.ortho.recipes import resolve


def test_defaults_are_the_contract() -> None:
    config = parse({})
    assert (config.lr, config.weight_decay, config.momentum) == (1e-3, 0.1, 0.95)
    assert (config.betas, config.eps, config.recipe) == ((0.9, 0.95), 1e-8, "moonlight")
    assert (config.workspace_mb, config.max_inflight_buckets) == (512, 1)
    assert config == parse(None)


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError):
        parse({}).lr = 1.0


@pytest.mark.parametrize(
    ("params", "parts"),
    [
        ({"lrr": 1e-3}, ["optimizer.params.lrr", "'lr'"]),
        ({"momentm": 0.9}, ["momentm", "'momentum'"]),
        ({"amsgrad": True}, ["optimizer.params.amsgrad", "False"]),
        ({"exclude": "up*"}, ["optimizer.params.exclude", "list"]),
        ({"zzz": 1}, ["zzz", "valid keys"]),
        ({"recipe": "moonligth"}, ["optimizer.params.recipe", "'moonlight'"]),
        ({"lr": "auto"}, ["optimizer.params.lr", '"auto"', "write a value"]),
        ({"momentum": "auto"}, ["optimizer.params.momentum", '"auto"']),
        ({"weight_decay": -0.1}, ["optimizer.params.weight_decay", "-0.1"]),
        ({"momentum": 1.0}, ["optimizer.params.momentum", "less than 1"]),
        ({"betas": [0.9, 1.5]}, ["betas", "[0.9, 1.5]"]),
        ({"lr": "fast"}, ["optimizer.params.lr", "'fast'"]),
        ({"lr": 0.0, "muon_lr": 1e-3}, ["muon_lr", "lr = 0.0"]),
        ({"max_inflight_buckets": 3}, ["optimizer.params.max_inflight_buckets", "3"]),
        ({"hsdp": {"shardsize": 2}}, ["optimizer.params.hsdp"]),
        ({"lr": True}, ["optimizer.params.lr", "must be a number"]),
        ({"betas": [True, 0.9]}, ["optimizer.params.betas", "must be a number"]),
        ({"metrics": {"every": True}}, ["optimizer.params.metrics.every", "must be a number"]),
        ({"qk_clip": {"tau": True}}, ["optimizer.params.qk_clip.tau", "must be a number"]),
        ({"workspace_mb": False}, ["optimizer.params.workspace_mb", "must be a number"]),
        ({"max_grad_norm": 1.0}, ["max_grad_norm is not a key", "as gradient_clipping"]),
        ({"split": {"*": {"rows": []}}}, ["split['*'].rows"]),
        ({"split": {"*": {"heads": True}}}, ["split['*'].heads"]),
        ({"split": {"*": {"rows": [1], "heads": 2}}}, ["split['*']"]),
    ],
)
def test_an_error_names_key_rule_and_remedy(params: dict, parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        parse(params)
    for part in parts:
        assert part in str(error.value)


def test_zero_and_false_are_values_and_null_is_not() -> None:
    config = parse({"weight_decay": 0.0, "nesterov": False, "eps": None, "muon_lr": 0.0})
    assert config.weight_decay == 0.0
    assert config.muon_lr == 0.0
    assert config.eps == 1e-8
    assert resolve(config).nesterov is False


def test_keys_of_the_built_in_are_accepted() -> None:
    built_in = {
        "lr": 2e-2,
        "muon_lr": 2e-2,
        "adam_lr": 3e-4,
        "momentum": 0.95,
        "weight_decay": 0.0,
        "betas": [0.9, 0.999],
        "eps": 1e-10,
        "ns_method": "standard",
        "adam_w_mode": True,
        "torch_adam": True,
        "fp32_optimizer_states": True,
        "per_head_muon": False,
    }
    config = parse(built_in)
    assert config.adam_lr == 3e-4
    assert resolve(config).gram_from is None


def test_keys_of_deepspeeds_adamw_are_accepted() -> None:
    params = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert parse({**params, "bias_correction": True, "amsgrad": False}).lr == 1e-3


def test_the_list_of_keys_is_the_contract() -> None:
    """A key is an interface: adding or dropping one has to be said here."""
    assert len(DMuonConfig.model_fields) == 43


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (8, "hsdp must be an object of shard_size, publish; got 8"),
        ({"shard_size": 0}, "hsdp.shard_size"),
        ({"shardsize": 2}, "did you mean 'shard_size'"),
        ({"shard_size": 2, "publish": "later"}, "hsdp.publish"),
    ],
)
def test_hsdp_is_checked(value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse({"hsdp": value})
    assert parse({"hsdp": {"shard_size": 8}}).hsdp.publish == "async"


@pytest.mark.parametrize(
    ("params", "stages", "words"),
    [
        ({"hsdp": {"shard_size": 2}}, (1, 2, 3), "hsdp"),
        ({"param_source": "owner_broadcast"}, (3,), "param_source"),
        ({"hide_param_gather": True}, (1, 2), "hide_param_gather"),
        ({"reshard_after_forward": False}, (3,), "reshard_after_forward"),
    ],
)
def test_keys_name_the_stages_they_are_for(
    params: dict[str, object], stages: tuple[int, ...], words: str
) -> None:
    for stage in range(4):
        if stage in stages:
            require_stage(parse(params), stage, bf16_optimizer=False)
        else:
            with pytest.raises(ValueError, match=f"{words}.*stage is {stage}"):
                require_stage(parse(params), stage, bf16_optimizer=False)


def test_metrics_are_off_by_default_and_checked() -> None:
    assert parse({}).metrics.every == parse({"metrics": {}}).metrics.every == 0
    assert parse({"metrics": {"every": 10}}).metrics.monitor
    for wrong, words in (({"evry": 1}, "metrics.evry"), ({"every": -1}, "metrics.every")):
        with pytest.raises(ValueError, match=words):
            parse({"metrics": wrong})
