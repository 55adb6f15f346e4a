# SPDX-License-Identifier: Apache-2.0
"""fp16: loss scales never reach the update, and skipped steps leave no trace (case C4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import models, ranks
from tests.harness.reference import update_error
from tests.harness.training import ds_config, masters, start_engine, train_steps

STAGES = [0, 1, 2, 3]


def train(*, stage: int, fp16: dict[str, Any], steps: int = 4, clip: float = 0.5) -> dict[str, Any]:
    """Run on a rank."""
    params = {"lr": 1e-2, "ns_dtype": "fp32", "wire_dtype": "fp32"}
    config = ds_config(
        stage, params=params, dtype="fp16", clip=clip, fp16={"enabled": True, **fp16}
    )
    engine = start_engine(config)
    start = masters(engine)
    train_steps(engine, models.global_batches(steps))
    return {
        "start": start,
        "masters": masters(engine),
        "scale": engine.optimizer.loss_scale,
        "skipped": engine.skipped_steps,
    }


# fp16 gradients: small ones lose bits to fp16's subnormal range at scale 1, so runs differ in what
# fp16 can represent, not in how the scale is undone. A scale that was not undone changes u by 2 or
# more in one step, which moves the update by over 0.3 (a grown scale that halves one gradient).
SCALE_TOLERANCE = 2e-2


@pytest.mark.parametrize("stage", STAGES)
def test_static_scales_and_growth_give_the_same_update(stage: int) -> None:
    settings = {
        "static 16": {"loss_scale": 16},
        "static 1": {"loss_scale": 1},
        "static 1024": {"loss_scale": 1024},
        "growing": {"loss_scale": 0, "initial_scale_power": 6, "loss_scale_window": 2},
    }
    runs = {k: ranks.run(2, train, stage=stage, fp16=v)[0] for k, v in settings.items()}
    base = runs["static 16"]
    expected = {n: t.double() for n, t in base["masters"].items()}
    assert runs["growing"]["scale"] > 2**6, "the scale never grew, the test shows nothing"
    for key, run in runs.items():
        assert run["skipped"] == 0, key
        for matrices in (True, False):
            names = [n for n in expected if models.is_matrix(n) is matrices]
            error = update_error(run["masters"], expected, base["start"], names)
            print(f"stage {stage} {key} matrices={matrices}: {error:.1e}")
            assert error < SCALE_TOLERANCE, (key, matrices)


def overflow(*, stage: int, offload: bool) -> dict[str, Any]:
    """Run on a rank: step 2 of 4 meets an infinite gradient on rank 1 only."""
    params = {"lr": 1e-2}
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    config = ds_config(stage, params=params, dtype="fp16", fp16=fp16)
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine = start_engine(config)
    optimizer, batches = engine.basic_optimizer, models.global_batches(4)
    train_steps(engine, batches[:1])
    before, state_before = masters(engine), _state(optimizer)
    named = dict(engine.module.named_parameters())
    poison = named["layers.1.up_proj.weight"].register_hook(
        lambda g: torch.full_like(g, float("inf")) if torch.distributed.get_rank() == 1 else g
    )
    train_steps(engine, batches[1:2])
    poison.remove()
    after, state_after = masters(engine), _state(optimizer)
    skipped = engine.skipped_steps
    train_steps(engine, batches[2:])
    return {
        "weights": all(torch.equal(before[n], after[n]) for n in before),
        "state": all(torch.equal(a, b) for a, b in zip(state_before, state_after, strict=True)),
        "skipped": skipped,
        "moved_on": any(not torch.equal(after[n], m) for n, m in masters(engine).items()),
        "skipped_later": engine.skipped_steps - skipped,
    }


def _state(optimizer: Any) -> list[torch.Tensor]:
    return [v.clone() for s in optimizer.state.values() for v in s.values()]


@pytest.mark.parametrize(
    ("stage", "offload"), [*((stage, False) for stage in STAGES), (2, True), (3, True)]
)
def test_a_skipped_step_leaves_no_trace(stage: int, offload: bool) -> None:
    for out in ranks.run(2, overflow, stage=stage, offload=offload):
        assert out == {
            "weights": True,
            "state": True,
            "skipped": 1,
            "moved_on": True,
            "skipped_later": 0,
        }
