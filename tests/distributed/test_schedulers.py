# SPDX-License-Identifier: Apache-2.0
"""Schedulers: muon_lr : adam_lr survives whatever they write (case C6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import models, ranks, reference
from tests.harness.training import ds_config, masters, start_engine, train_steps

SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": 2e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
    "WarmupDecayLR": {"warmup_max_lr": 2e-2, "warmup_num_steps": 2, "total_num_steps": 8},
    "WarmupCosineLR": {"warmup_num_steps": 2, "total_num_steps": 8},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 2e-2, "cycle_first_step_size": 3},
}


def lengths(*, scheduler: str | None, params: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Run on a rank: (logged lr, Muon's, AdamW's length of each step), measured on the weights.

    The gradients are the same in every step, so each half's update per unit of lr is known.
    """
    extra = {}
    if scheduler in SCHEDULERS:
        extra = {"scheduler": {"type": scheduler, "params": SCHEDULERS[scheduler]}}
    params = {"lr": 1e-2, "weight_decay": 0.0, "ns_dtype": "fp32", **params}
    engine = start_engine(ds_config(1, params=params, **extra))
    if scheduler == "LambdaLR":
        engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            engine.basic_optimizer, lambda step: 0.5 + 0.25 * step
        )
    found = []
    optimizer = engine.basic_optimizer
    steps: dict[str, float] = {}
    real_adam, real_run = optimizer._adam.step, optimizer.binding.engine.run

    def adam_step() -> None:
        steps["adamw"] = optimizer._adam.param_groups[0]["lr"]
        real_adam()

    def run(index: int, leaves: Any) -> None:
        steps["muon"] = leaves[0].lr
        real_run(index, leaves)

    optimizer._adam.step, optimizer.binding.engine.run = adam_step, run
    for batch in models.global_batches(6):
        logged = engine.get_lr()[0]
        train_steps(engine, [batch])
        found.append((logged, steps["muon"], steps["adamw"]))
    return found


@pytest.mark.parametrize("scheduler", [None, "LambdaLR", *SCHEDULERS])
def test_the_ratio_of_the_halves_survives(scheduler: str | None) -> None:
    params = {"muon_lr": 3e-2, "adam_lr": 5e-3}
    [found, _] = ranks.run(2, lengths, scheduler=scheduler, params=params)
    for logged, muon, adamw in found:
        assert muon == pytest.approx(3.0 * logged)
        assert adamw == pytest.approx(0.5 * logged)
    if scheduler:
        assert len({round(logged, 9) for logged, _, _ in found}) > 2, "the scheduler did nothing"


def own_groups() -> list[dict[str, Any]]:
    """Run on a rank: groups of the caller's, with an lr and a decay of their own."""
    config = ds_config(
        2, params={"lr": 1e-2, "muon_lr": 2e-2, "weight_decay": 0.1, "adam_weight_decay": 0.0}
    )
    model = models.build("llama")
    named = dict(model.named_parameters())
    slow = [p for n, p in named.items() if n.startswith("layers.0")]
    fast = [p for n, p in named.items() if not n.startswith("layers.0")]
    groups = [{"params": slow, "lr": 1e-3, "weight_decay": 0.5}, {"params": fast}]
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    keys = ("name", "kind", "lr", "lr_ratio", "weight_decay")
    return [{k: g[k] for k in keys} for g in engine.basic_optimizer.param_groups]


def test_the_callers_groups_win() -> None:
    [groups] = ranks.run(1, own_groups)
    got = [(g["kind"], g["lr"] * g["lr_ratio"], g["weight_decay"]) for g in groups]
    assert got == [
        ("muon", 1e-3, 0.5),
        ("adamw", 1e-3, 0.5),
        ("muon", 2e-2, 0.1),
        ("adamw", 1e-2, 0.0),
        ("adamw", 1e-2, 0.0),
    ]


def separate_rates() -> dict[str, Any]:
    """Run on a rank."""
    params = {"lr": 1e-2, "adam_lr": 2e-3, "ns_dtype": "fp32"}
    engine = start_engine(ds_config(2, params=params))
    train_steps(engine, models.global_batches(3))
    return {"masters": masters(engine)}


def test_adam_lr_reaches_the_update() -> None:
    out = ranks.run(2, separate_rates)
    start = {n: p.detach().clone() for n, p in models.build("llama").named_parameters()}
    end = reference.train(
        models.build("llama"),
        models.global_batches(3),
        models.is_matrix,
        reference.Settings(adam_lr=2e-3),
    )
    rest = [n for n in end if not models.is_matrix(n)]
    assert reference.update_error(out[0]["masters"], end, start, rest) < 1e-4
