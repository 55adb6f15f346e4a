# SPDX-License-Identifier: Apache-2.0
"""Degenerate models and gradients (cases C10 and C11): no crash, no hang, a stated rule."""

from __future__ import annotations

from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from torch import Tensor, nn

from ds_muon import log
from tests.harness import models, ranks
from tests.harness.training import ds_config, masters, start_engine, train_steps


def train_part(*, stage: int, keep: str, tags: bool = False) -> dict[str, Any]:
    """Run on a rank: train only the parameters that `keep` names."""
    model = models.build("llama")
    rules = {
        "vectors": lambda n, p: p.ndim == 1,
        "matrices": lambda n, p: models.is_matrix(n),
        "one matrix": lambda n, p: n == "layers.0.up_proj.weight",
        "two vectors": lambda n, p: n in ("norm.weight", "layers.0.input_norm.weight"),
    }
    for name, p in model.named_parameters():
        p.requires_grad_(rules[keep](name, p))
    params = {"lr": 1e-2, "ns_dtype": "fp32"}
    warnings: list[str] = []
    with mock.patch.object(log.logger, "log", lambda level, text: warnings.append(text)):
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            config=ds_config(stage, params=params),
        )
    start = masters(engine)
    losses = train_steps(engine, models.global_batches(2))
    end = masters(engine)
    trained = [n for n, p in engine.module.named_parameters() if p.requires_grad]
    return {
        "moved": all(not torch.equal(start[n], end[n]) for n in trained),
        "finite": all(bool(torch.isfinite(m).all()) for m in end.values()),
        "losses": losses,
        "warned": any("NO matrix" in w for w in warnings),
    }


@pytest.mark.parametrize("keep", ["vectors", "matrices", "one matrix", "two vectors"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_partly_frozen_models_train(stage: int, keep: str) -> None:
    out = ranks.run(4, train_part, stage=stage, keep=keep)
    for rank, o in enumerate(out):
        assert o["moved"] and o["finite"]
        assert o["warned"] is ("vectors" in keep and rank == 0)


class Lora(nn.Module):
    """A frozen linear with a trained low-rank pair, as PEFT names them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 32).requires_grad_(False)
        self.lora_A = nn.Linear(32, 4, bias=False)
        self.lora_B = nn.Linear(4, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + self.lora_B(self.lora_A(x))).square().mean()


def train_lora(*, stage: int) -> list[str]:
    """Run on a rank."""
    torch.manual_seed(0)
    model = Lora()
    warnings: list[str] = []
    with mock.patch.object(log.logger, "log", lambda level, text: warnings.append(text)):
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            config=ds_config(stage, params={"lr": 1e-2}),
        )
    engine.backward(engine(torch.randn(4, 32)))
    engine.step()
    return [w for w in warnings if "NO matrix" in w]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_lora_run_warns_loudly_and_trains(stage: int) -> None:
    first, second = ranks.run(2, train_lora, stage=stage)
    assert len(first) == 1 and "2 x LoRA factor" in first[0] and not second


class TwoPaths(nn.Module):
    """Uses `extra` on rank 0 only: elsewhere its gradient is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(8, 8)
        self.extra = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, use_extra: bool) -> Tensor:
        x = self.always(x)
        return (self.extra(x) if use_extra else x).square().mean()


def missing_gradient(*, stage: int, everywhere: bool) -> dict[str, Any]:
    """Run on a rank: one parameter without a gradient, on one rank or on all."""
    torch.manual_seed(0)
    config = ds_config(stage, params={"lr": 1e-2, "ns_dtype": "fp32"})
    engine, *_ = deepspeed.initialize(model=TwoPaths(), config=config)
    start = masters(engine)
    use = torch.distributed.get_rank() == 0 and not everywhere
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8), use_extra=use))
        engine.step()
    end = masters(engine)
    return {"start": start, "end": end}


# Under ZeRO-1, 2 and 3 DeepSpeed's own reduction needs the same parameters to get gradients on
# every rank, for any optimizer: its buckets do not match otherwise.
def test_a_gradient_missing_on_one_rank_counts_as_zero_there() -> None:
    out = ranks.run(2, missing_gradient, stage=0, everywhere=False)
    assert all(torch.equal(out[0]["end"][n], out[1]["end"][n]) for n in out[0]["end"])
    assert not torch.equal(out[0]["start"]["extra.weight"], out[0]["end"]["extra.weight"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_missing_on_all_ranks_counts_as_zero(stage: int) -> None:
    out = ranks.run(2, missing_gradient, stage=stage, everywhere=True)
    # A zero matrix has a zero update: only the decay is left.
    decayed = out[0]["start"]["extra.weight"] * (1 - 1e-2 * 0.1) ** 2
    assert torch.allclose(out[0]["end"]["extra.weight"], decayed, rtol=1e-6, atol=0)


def scaled_loss(*, stage: int, factor: float) -> dict[str, Tensor]:
    """Run on a rank: one step on a loss of any size."""
    params = {"lr": 1e-2, "weight_decay": 0.0, "ns_dtype": "fp32"}
    engine = start_engine(ds_config(stage, params=params))
    start = masters(engine)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batch = models.global_batches(1)[0].chunk(world)[rank]
    engine.backward(engine(batch) * factor)
    engine.step()
    return {n: m - start[n] for n, m in masters(engine).items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_the_size_of_the_loss_does_not_matter(stage: int) -> None:
    base = ranks.run(2, scaled_loss, stage=stage, factor=1.0)[0]
    for factor in (1e-10, 1e12):
        other = ranks.run(2, scaled_loss, stage=stage, factor=factor)[0]
        for name, update in base.items():
            if models.is_matrix(name):
                # fp32 rounding of the scaled gradients, lifted by five quintic steps.
                assert (other[name] - update).norm() < 1e-4 * update.norm(), (factor, name)
