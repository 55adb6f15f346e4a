# SPDX-License-Identifier: Apache-2.0
"""Fused equals separate: maps that share a parameter are trained as if each had its own."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state

from tests.harness import ranks
from tests.harness.fused import HEADS, Zoo, whole_maps
from tests.harness.training import counting_newton_schulz, ds_config, masters

# Gradients of three and more ranks are summed in another order where a bucket begins elsewhere, and
# columns are orthogonalised as the transposed of what rows are; both are roundings of fp32.
UPDATE_ERROR = 1e-5
# Jordan's polynomial enlarges what rounds in a small singular value by up to 3.4445^5 = 485, and a
# head of 4 rows has fewer large ones beside it than a whole map.
HEAD_UPDATE_ERROR = 1e-4


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
    binding = engine.basic_optimizer.binding
    layouts = [plan.layout for plan in binding.engine.plans]
    cut = sum(len(x.holders(i)) > 1 for x in layouts for i in range(len(x.matrices)))
    maps, momentum = whole_maps(model, masters(engine)), {}
    if engine.zero_optimization_stage():
        named = engine.module.named_parameters()
        whole = {n: safe_get_full_optimizer_state(p, "momentum_buffer") for n, p in named}
        momentum = whole_maps(model, whole)
    if binding.spread is not None:
        require_the_way_back(binding.spread)
    return {"maps": maps, "momentum": momentum, "shapes": shapes, "cut": cut}


def require_the_way_back(spread: Any) -> None:
    """What replica 0 brought together for a checkpoint gives each element back."""
    full = spread.full()
    for index, momentum in enumerate(full or ()):
        kept = spread.buffers[index].clone()
        spread.buffers[index].zero_()
        spread.cut(index, momentum)
        assert kept.any() and torch.equal(kept, spread.buffers[index])


def compare(
    *,
    stage: int,
    zero: Any = None,
    only_fused: Any = None,
    only_separate: Any = None,
    **params: Any,
) -> dict[str, Any]:
    """Run on a rank: the relative error of every map's update and momentum."""
    common = {"lr": 2e-2, "ns_dtype": "fp32", "lr_scale": "original", **params}
    fused, separate = (
        train(model, ds_config(stage, params={**common, **(own or {})}, zero=zero))
        for model, own in ((Zoo(), only_fused), (Zoo().separate(), only_separate))
    )
    start = whole_maps(Zoo(), dict(Zoo().named_parameters()))
    errors = {}
    for name, weight in fused["maps"].items():
        update = separate["maps"][name] - start[name]
        errors[name] = float((weight - separate["maps"][name]).norm() / update.norm())
    for name, momentum in fused["momentum"].items():
        other = separate["momentum"][name]
        errors[f"momentum of {name}"] = float((momentum - other).norm() / other.norm())
    shapes = [[tuple(sorted(shape)) for shape in run["shapes"]] for run in (fused, separate)]
    return {"errors": errors, "shapes": shapes, "cut": fused["cut"]}


def require_equal(
    out: list[dict[str, Any]], *, cut: int, matrices: int = 30, error: float = UPDATE_ERROR
) -> None:
    for of_rank in out:
        worst = max(of_rank["errors"], key=of_rank["errors"].get)
        assert of_rank["errors"][worst] < error, worst
        assert of_rank["cut"] >= cut, "no matrix was cut, the test shows nothing"
    fused, separate = (sorted(s for o in out for s in o["shapes"][i]) for i in range(2))
    assert len(fused) == 3 * matrices and fused == separate


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


def test_one_matrix_per_head() -> None:
    heads = {"heads": HEADS}
    fused = {"split": {}, "per_head_muon": True}
    by_hand = {f"units.{n}.linears.{p}.weight": heads for n in (3, 4) for p in "qkv"}
    separate = {"split": {"units.0.linears.q.weight": heads, **by_hand}}
    out = ranks.run(3, compare, stage=1, only_fused=fused, only_separate=separate)
    matrices = 30 + 7 * (HEADS - 1)
    require_equal(out, cut=2, matrices=matrices, error=HEAD_UPDATE_ERROR)


@pytest.mark.parametrize("stage", [2, 3])
def test_replicas(stage: int) -> None:
    out = ranks.run(4, compare, stage=stage, hsdp={"shard_size": 2}, verify_every=1)
    require_equal(out, cut={2: 1, 3: 5}[stage])
