# SPDX-License-Identifier: Apache-2.0
"""Logical matrices and neighbours: experts, convolutions, splits, two engines in one process.

On two ranks a sum has one order, so every stage has the bits of stage 0, where nothing is cut.
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

from tests.harness import models, ranks
from tests.harness.training import digest, ds_config, masters, start_engine, train_steps


class Zoo(nn.Module):
    """A convolution, a stack of experts, a fused projection, and a frozen layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.experts = nn.Parameter(torch.randn(3, 5, 8) * 0.3)
        self.fused = nn.Linear(5, 12)
        self.frozen = nn.Linear(12, 7).requires_grad_(False)
        self.out = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).mean((2, 3))
        h = torch.einsum("bi,eoi->bo", h, self.experts).tanh()
        h = self.frozen(self.fused(h).tanh())
        return self.out(h).square().mean()


def train_zoo(
    *, stage: int, zero_init: bool = False, zero: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run on a rank."""
    params = {"lr": 1e-2, "ns_dtype": "fp32", "split": {"fused.weight": {"rows": [4, 8]}}}
    config = ds_config(stage, params=params, zero=zero)
    init = deepspeed.zero.Init(config_dict_or_path=config)
    with init if zero_init else contextlib.nullcontext():
        torch.manual_seed(3)
        model = Zoo()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config=config,
    )
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        own = torch.randn(8, 3, 6, 6, generator=generator).chunk(world)[rank]
        engine.backward(engine(own))
        engine.step()
    found = masters(engine)
    trained = {n: found[n] for n in found if not n.startswith("frozen")}
    plans = engine.basic_optimizer.binding.engine.plans
    shapes = {m.name: (m.rows, m.cols) for p in plans for m in p.layout.matrices}
    return {"digest": digest(trained), "shapes": shapes}


STAGES: tuple[dict[str, Any], ...] = (
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "zero_init": True},
    {"stage": 3, "zero": {"sub_group_size": 40}},
)


@pytest.mark.parametrize("run", STAGES, ids=str)
def test_logical_matrices_have_the_same_bits_at_every_stage(run: dict[str, Any]) -> None:
    expected = ranks.run(2, train_zoo, stage=0)
    assert expected[0]["shapes"] == {
        "conv.weight": (8, 27),
        "experts[0]": (5, 8),
        "experts[1]": (5, 8),
        "experts[2]": (5, 8),
        "fused.weight[rows 0:4]": (4, 5),
        "fused.weight[rows 4:12]": (8, 5),
    }
    assert ranks.run(2, train_zoo, **run) == expected


def two_engines(*, stage: int) -> bool:
    """Run on a rank: two models trained in turn, and the first one again alone."""
    params = {"lr": 1e-2, "ns_dtype": "fp32"}
    first = start_engine(ds_config(stage, params=params))
    second = start_engine(ds_config(stage, params={**params, "lr": 3e-2}), model="mlp")
    for batch in models.global_batches(3):
        train_steps(first, [batch])
        train_steps(second, [batch])
    alone = start_engine(ds_config(stage, params=params))
    train_steps(alone, models.global_batches(3))
    return digest(masters(first)) == digest(masters(alone))


@pytest.mark.parametrize("stage", [1, 3])
def test_two_engines_in_one_process_do_not_meet(stage: int) -> None:
    assert all(ranks.run(2, two_engines, stage=stage))


def weights_only(*, stage: int, folder: str) -> dict[str, Any]:
    """Run on a rank: load weights without optimizer state, under another lr."""
    engine = start_engine(ds_config(stage, params={"lr": 1e-2}))
    train_steps(engine, models.global_batches(2))
    engine.save_checkpoint(folder)
    other = start_engine(ds_config(stage, params={"lr": 5e-3}))
    other.load_checkpoint(folder, load_optimizer_states=False)
    state = other.basic_optimizer.state.values()
    return {
        "weights": digest(masters(other)) == digest(masters(engine)),
        "momentum": any(bool(s["momentum_buffer"].any()) for s in state if "momentum_buffer" in s),
        "lr": other.get_lr()[0],
    }


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_can_be_loaded_alone(stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for out in ranks.run(2, weights_only, stage=stage, folder=folder):
            assert out == {"weights": True, "momentum": False, "lr": 5e-3}
