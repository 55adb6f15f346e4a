# SPDX-License-Identifier: Apache-2.0
"""accelerate: prepare() trains as deepspeed.initialize does; groups; and every error text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from tests.harness import huggingface as hf
from tests.harness import ranks
from tests.harness.training import masters

STEPS = 3
DOCS = Path(__file__).parents[2] / "docs" / "huggingface.md"


def config_of(stage: int) -> dict[str, Any]:
    """accelerate_zero3.json, or the same without a scheduler and in fp32 at stage 2."""
    config = hf.example("accelerate_zero3")
    if stage == 2:
        del config["scheduler"]
        config["bf16"]["enabled"] = False
        config["zero_optimization"] = {"stage": 2}
        config["optimizer"]["params"]["adam_lr"] = 5e-3
    return config


def groups_of(model: Any) -> list[dict[str, Any]]:
    """The embedding learns slower and is not decayed."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for n, p in named.items() if "embed" not in n]},
        {"params": [named["model.embed_tokens.weight"]], "lr": 1e-3, "weight_decay": 0.0},
    ]


def prepared(*, stage: int) -> dict[str, Any]:
    """Run on a rank: a loop as accelerate's documentation writes it."""
    from accelerate.utils import DummyOptim, DummyScheduler
    from torch.utils.data import DataLoader

    accelerator = hf.start_accelerator(config_of(stage))
    model = hf.new_llama()
    loader = DataLoader(hf.samples(4 * STEPS), batch_size=2)
    optimizer = DummyOptim(groups_of(model), lr=1e-2, weight_decay=0.02)
    objects = [model, optimizer, loader]
    if stage == 3:
        # accelerate divides the steps by the ranks.
        objects.append(DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=2))
    model, optimizer, loader, *scheduler = accelerator.prepare(*objects)
    lrs = []
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        for s in scheduler:
            s.step()
        optimizer.zero_grad()
        lrs.append(optimizer.param_groups[0]["lr"])
    return {
        "masters": masters(model),
        "options": hf.options_of(model),
        "lrs": lrs,
        "config": accelerator.deepspeed_config,
    }


def plain(*, config: dict[str, Any]) -> dict[str, Any]:
    """Run on a rank: the same with the filled configuration and deepspeed alone."""
    from transformers.integrations import HfDeepSpeedConfig

    kept = HfDeepSpeedConfig(config)
    model = hf.new_llama()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups_of(model), config=copy.deepcopy(config)
    )
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rows = [sample["input_ids"] for sample in hf.samples(4 * STEPS)]
    for step in range(STEPS):
        first = 2 * (step * world + rank)
        tokens = torch.stack(rows[first : first + 2])
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    del kept
    return {"masters": masters(engine)}


@pytest.mark.parametrize("stage", [2, 3])
def test_prepare_trains_as_initialize_does(stage: int) -> None:
    found = ranks.run(2, prepared, stage=stage)
    expected = ranks.run(2, plain, config=found[0]["config"])
    for rank in range(2):
        for name, tensor in expected[rank]["masters"].items():
            assert torch.equal(found[rank]["masters"][name], tensor), name
    if stage == 3:
        assert found[0]["lrs"] == pytest.approx([0.0, 1e-2, 1e-2])
        return
    # The caller's group wins over lr, adam_lr and the decay; the rest keeps the ratio.
    got = [
        (g["kind"], g["lr"], g["lr"] * g["lr_ratio"], g["weight_decay"])
        for g in found[0]["options"]
    ]
    assert got == [
        ("muon", 1e-2, 1e-2, 0.02),
        ("adamw", 1e-2, 5e-3, 0.02),
        ("adamw", 1e-2, 5e-3, 0.0),
        ("adamw", 1e-3, 1e-3, 0.0),
    ]
