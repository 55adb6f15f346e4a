# SPDX-License-Identifier: Apache-2.0
"""Other optimizers: their runs have the same bits with ds_muon installed and hooked in, or not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from tests.harness import models, ranks
from tests.harness.training import digest, ds_config, masters, start_engine, train_steps

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "SGD": {"type": "SGD", "params": {"lr": 1e-2}},
    "Muon": {"type": "Muon", "params": {"lr": 1e-2, "ns_method": "standard", "torch_adam": True}},
}


def train(*, optimizer: str, stage: int, hooked: bool) -> str:
    """Run on a rank: with DMuon's hooks in place, or with DeepSpeed's own methods put back."""
    assert torch.optim.DMuon is not None
    names = ("_configure_basic_optimizer", "_configure_optimizer")
    config = ds_config(stage, params={})
    config["optimizer"] = OPTIMIZERS[optimizer]
    config["zero_allow_untested_optimizer"] = True
    if optimizer == "Muon":
        config["zero_optimization"]["reduce_scatter"] = False
    methods = {n: getattr(DeepSpeedEngine, n) for n in names}
    if not hooked:
        methods = {n: method.__wrapped__ for n, method in methods.items()}
    with mock.patch.multiple(DeepSpeedEngine, **methods):
        engine = start_engine(config)
    train_steps(engine, models.global_batches(3))
    return digest(masters(engine))


@pytest.mark.parametrize(
    ("optimizer", "stage"),
    [("AdamW", 0), ("AdamW", 2), ("AdamW", 3), ("SGD", 1), ("Muon", 1), ("Muon", 2), ("Muon", 3)],
)
def test_bits_do_not_depend_on_the_hooks(optimizer: str, stage: int) -> None:
    with_hooks = ranks.run(2, train, optimizer=optimizer, stage=stage, hooked=True)
    without = ranks.run(2, train, optimizer=optimizer, stage=stage, hooked=False)
    assert with_hooks == without


def tagged(*, stage: int) -> dict[str, Any]:
    """Run on a rank: tags of the built-in, kept by the user, under DMuon."""
    model = models.build("llama")
    for name, p in model.named_parameters():
        p.use_muon = models.is_matrix(name) and "o_proj" not in name
    import deepspeed
    from deepspeed.runtime.zero.muon import original_muon

    config = ds_config(
        stage,
        params={"lr": 1e-2, "muon_lr": 1e-2, "adam_lr": 1e-3, "momentum": 0.9, "ns_method": "gram"},
    )
    with mock.patch.object(original_muon, "muon_update", mock.Mock(side_effect=AssertionError)):
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        train_steps(engine, models.global_batches(2))
    groups = engine.basic_optimizer.preparation.groups
    spec = engine.basic_optimizer.preparation.spec
    return {
        "muon": sorted(r.name for g in groups if g.kind == "muon" for r in g.routes),
        "tags": {n: p.use_muon for n, p in engine.module.named_parameters()},
        "gram": spec.uses_gram(33, 47) and not spec.uses_gram(33, 33),
        "momentum": {g["momentum"] for g in engine.basic_optimizer.param_groups},
    }


# Case C14: a configuration and tags written for the built-in.
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tags_and_keys_of_the_built_in_are_honoured(stage: int) -> None:
    names = [n for n, _ in models.build("llama").named_parameters()]
    wanted = sorted(n for n in names if models.is_matrix(n) and "o_proj" not in n)
    for out in ranks.run(2, tagged, stage=stage):
        assert out["muon"] == wanted
        assert out["tags"] == {n: n in wanted for n in names}
        assert out["gram"]
        assert out["momentum"] == {0.9}
