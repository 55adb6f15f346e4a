# SPDX-License-Identifier: Apache-2.0
"""Traffic and memory: elements, calls, Newton-Schulz runs and persistent state, as formulas."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.harness import models, ranks
from tests.harness.training import (
    counting_collectives,
    counting_newton_schulz,
    ds_config,
    start_engine,
    train_steps,
)


def one_step(
    *, stage: int, params: dict[str, Any] | None = None, zero: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run on a rank: warm up, then count the collectives of one optimizer step alone."""
    params = {"lr": 1e-2, "ns_dtype": "fp32", **(params or {})}
    zero = {"stage3_param_persistence_threshold": 0, **(zero or {})} if stage == 3 else zero
    engine = start_engine(ds_config(stage, params=params, zero=zero))
    optimizer = engine.basic_optimizer
    counts: list[Any] = []
    step = optimizer.step

    def counted_step(closure: None = None) -> None:
        with counting_collectives() as counter:
            step(closure)
        counts.append(counter)

    train_steps(engine, models.global_batches(1))
    optimizer.step = counted_step
    with counting_newton_schulz() as shapes:
        train_steps(engine, models.global_batches(1))
    binding = optimizer.binding
    rank = torch.distributed.get_rank()
    plans = binding.engine.plans
    moved = [
        m.numel - p.layout.held_numel(i, p.owners[i])
        for p in plans
        for i, m in enumerate(p.layout.matrices)
    ]
    leaves = [leaf for leaves in binding.leaf_sets for leaf in leaves]
    state = [optimizer.state[leaf] for leaf in leaves]
    return {
        "received": sum(c["elements"]["all_to_all_single"] for c in counts),
        "calls": sum(c["calls"]["all_to_all_single"] for c in counts),
        "others": {n: k for c in counts for n, k in c["calls"].items() if n != "all_to_all_single"},
        "predicted": sum(p.received_numel()[rank] for p in plans),
        "buckets": sum(len(p.routes) for p in plans),
        "moved": sum(moved),
        "num_split": sum(len(p.layout.holders(i)) > 1 for p in plans for i in range(len(p.owners))),
        "num_moved": sum(m > 0 for m in moved),
        "matrix_numel": sum(m.numel for p in plans for m in p.layout.matrices),
        "ns_shapes": shapes,
        "state": [(k, tuple(v.shape), v.dtype) for s in state for k, v in s.items()],
        "leaf_shapes": [tuple(leaf.shape) for leaf in leaves],
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_newton_schulz_runs_once_per_matrix_in_the_world(world: int, stage: int) -> None:
    out = ranks.run(world, one_step, stage=stage)
    shapes = sorted(s for o in out for s in o["ns_shapes"])
    model = models.build("llama")
    assert shapes == sorted(
        tuple(p.shape) for n, p in model.named_parameters() if models.is_matrix(n)
    )


@pytest.mark.parametrize("world", [2, 3, 4])
def test_zero3_exchange_is_the_formula_and_nothing_else(world: int) -> None:
    out = ranks.run(world, one_step, stage=3)
    total = sum(o["received"] for o in out)
    assert total == 2 * out[0]["moved"]
    assert [o["received"] for o in out] == [o["predicted"] for o in out]
    assert all(o["others"] == {} for o in out), "another collective than the exchange in the step"
    assert all(o["calls"] == 2 * o["buckets"] for o in out)
    print(f"mean {total / world:.0f}, busiest {max(o['received'] for o in out)} elements")


def even_step() -> dict[str, Any]:
    """Run on a rank: a model whose matrices divide evenly by the world."""
    build = models.LlamaLike
    models.LlamaLike = lambda: build(width=32, heads=4, hidden=48)  # type: ignore[misc]
    try:
        return one_step(stage=3)
    finally:
        models.LlamaLike = build


@pytest.mark.parametrize("world", [2, 4])
def test_zero3_exchange_where_the_world_divides(world: int) -> None:
    out = ranks.run(world, even_step)
    numel = out[0]["matrix_numel"]
    assert sum(o["received"] for o in out) == 2 * (world - 1) * numel // world


def test_straddlers_move_only_split_matrices() -> None:
    out = ranks.run(4, one_step, stage=2, params={"owner_scope": "straddlers"})
    assert sum(o["received"] for o in out) == 2 * out[0]["moved"]
    assert 0 < out[0]["num_moved"] == out[0]["num_split"] < 14
    balanced = ranks.run(4, one_step, stage=2)
    assert balanced[0]["moved"] > out[0]["moved"]


def test_no_zero_publishes_updates_and_gathers_nothing() -> None:
    out = ranks.run(3, one_step, stage=0)
    numel = out[0]["matrix_numel"]
    assert sum(o["received"] for o in out) == 2 * numel, "each of 2 others receives each update"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_persistent_state_is_one_momentum_of_the_partition(stage: int) -> None:
    for out in ranks.run(4, one_step, stage=stage):
        assert out["state"] == [
            ("momentum_buffer", shape, torch.float32) for shape in out["leaf_shapes"]
        ]


def living_between_steps(*, stage: int) -> dict[str, int]:
    """Run on a rank: elements of all living tensors after one step and after three."""
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else None
    engine = start_engine(ds_config(stage, params={"lr": 1e-2}, zero=zero))
    found = {}
    for steps in (1, 2):
        train_steps(engine, models.global_batches(steps))
        gc.collect()
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if isinstance(t, torch.Tensor) and t.untyped_storage().nbytes()
        }
        found[f"after {steps}"] = sum(storages.values())
    found["workspace"] = engine.basic_optimizer.binding.engine.arena.nbytes
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_leave_nothing_behind(stage: int) -> None:
    for out in ranks.run(4, living_between_steps, stage=stage):
        assert out["after 1"] == out["after 2"]
        # bf16 pieces both ways: less than two copies of all matrices, and more than nothing.
        assert 0 < out["workspace"] < 2 * 2 * 4 * 15114
