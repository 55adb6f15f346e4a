# SPDX-License-Identifier: Apache-2.0
"""Fused equals separate: maps that share a parameter are trained as if each had its own."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch

from tests.harness import ranks
from tests.harness.fused import Zoo, whole_maps
from tests.harness.training import counting_newton_schulz, ds_config, masters

# Gradients of three and more ranks are summed in another order where a bucket begins elsewhere, and
# columns are orthogonalised as the transposed of what rows are; both are roundings of fp32.
UPDATE_ERROR = 1e-5


def train(model: Zoo, config: dict[str, Any]) -> dict[str, Any]:
    """Maps after three steps, the shapes this rank orthogonalised, and matrices cut over ranks."""
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(5)
    with counting_newton_schulz() as shapes:
        for _ in range(3):
            own = torch.randn(24, 10, generator=generator).chunk(world)[rank]
            engine.backward(engine(own))
            engine.step()
    plans = engine.basic_optimizer.binding.engine.plans
    layouts = [plan.layout for plan in plans]
    cut = sum(len(x.holders(i)) > 1 for x in layouts for i in range(len(x.matrices)))
    return {"maps": whole_maps(model, masters(engine)), "shapes": shapes, "cut": cut}


def compare(*, stage: int, zero: Any = None, **params: Any) -> dict[str, Any]:
    """Run on a rank: the largest relative error of a map's update."""
    common = {"lr": 2e-2, "ns_dtype": "fp32", "lr_scale": "original", **params}
    config = ds_config(stage, params=common, zero=zero)
    start = whole_maps(Zoo(), dict(Zoo().named_parameters()))
    fused = train(Zoo(), config)
    separate = train(Zoo().separate(), config)
    errors = {}
    for name, weight in fused["maps"].items():
        update = separate["maps"][name] - start[name]
        errors[name] = float((weight - separate["maps"][name]).norm() / update.norm())
    shapes = [[tuple(sorted(shape)) for shape in run["shapes"]] for run in (fused, separate)]
    return {"errors": errors, "shapes": shapes, "cut": fused["cut"]}


def require_equal(out: list[dict[str, Any]], *, cut: int) -> None:
    for of_rank in out:
        worst = max(of_rank["errors"], key=of_rank["errors"].get)
        assert of_rank["errors"][worst] < UPDATE_ERROR, worst
        assert of_rank["cut"] >= cut, "no matrix was cut, the test shows nothing"
    fused, separate = (sorted(s for o in out for s in o["shapes"][i]) for i in range(2))
    assert len(fused) == 3 * 30 and fused == separate


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fused_is_trained_as_separate(world: int, stage: int) -> None:
    # Every step verified: the check knows where columns stand.
    out = ranks.run(world, compare, stage=stage, verify_every=1)
    require_equal(out, cut={0: 0, 1: 3, 2: 3, 3: 10}[stage])


def test_packed_owners_and_tiny_sub_groups() -> None:
    zero = {"sub_group_size": 120, "stage3_param_persistence_threshold": 0}
    out = ranks.run(3, compare, stage=3, zero=zero, param_source="owner_broadcast")
    require_equal(out, cut=10)


@pytest.mark.parametrize("stage", [2, 3])
def test_replicas(stage: int) -> None:
    out = ranks.run(4, compare, stage=stage, hsdp={"shard_size": 2}, verify_every=1)
    require_equal(out, cut={2: 1, 3: 5}[stage])
