# SPDX-License-Identifier: Apache-2.0
"""Traffic and memory: elements, calls, Newton-Schulz runs and persistent state, as formulas."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensor

from tests.harness import models, ranks
from tests.harness.training import (
    CountingTransport,
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


def experts_step(*, experts: int) -> dict[str, Any]:
    """Run on a rank: a stack of expert matrices beside one dense matrix, at ZeRO-3."""

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(torch.randn(experts, 24, 40) / 8)
            self.down = torch.nn.Parameter(torch.randn(experts, 40, 24) / 8)
            self.dense = torch.nn.Linear(24, 24, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            grid = torch.arange(24, device=tokens.device)
            x = self.dense(torch.sin(tokens[:, :1] * (grid + 1) * 0.37))
            hidden = torch.relu(torch.einsum("bi,eio->ebo", x, self.up))
            return torch.einsum("ebo,eoi->bi", hidden, self.down).square().mean()

    params = {"lr": 1e-2, "split": {"up": {"experts": True}, "down": {"experts": True}}}
    zero = {"stage3_param_persistence_threshold": 0}
    with mock.patch.object(models, "LlamaLike", Experts):
        engine = start_engine(ds_config(3, params=params, zero=zero))
    binding = engine.basic_optimizer.binding
    transport = binding.engine.transport = CountingTransport(binding.engine.transport)
    train_steps(engine, models.global_batches(1))
    [plan] = binding.engine.plans
    world = transport.world_size
    dense = [i for i, m in enumerate(plan.layout.matrices) if m.name.startswith("dense")]
    moved = {m.name for i, m in enumerate(plan.layout.matrices) if len(plan.layout.holders(i)) > 1}
    return {
        "received": sum(transport.received.values()),
        "dense": 2 * 24 * 24 * (world - 1) // world,
        "matrices": len(plan.owners) - len(dense),
        "owners": {
            i: plan.owners[i] in plan.layout.holders(i)
            for i in range(len(plan.owners))
            if i not in dense
        },
        "moved": moved,
    }


@pytest.mark.parametrize("world", [2, 4])
def test_whole_experts_cost_no_exchange(world: int) -> None:
    out = ranks.run(world, experts_step, experts=8)
    assert sum(o["received"] for o in out) == out[0]["dense"], "only the dense matrix travels"
    assert out[0]["matrices"] == 16 and all(out[0]["owners"].values())
    assert out[0]["moved"] == {"dense.weight"}


def engine_step(*, built_in: bool) -> dict[str, float]:
    """Run on a rank: what engine.step() receives at ZeRO-3, in parameters of the model."""
    zero: dict[str, Any] = {"stage3_param_persistence_threshold": 0}
    config = ds_config(3, params={"lr": 1e-2}, dtype="bf16", zero=zero)
    if built_in:
        config["optimizer"] = {"type": "Muon", "params": {"lr": 1e-2, "torch_adam": True}}
        config["zero_optimization"]["reduce_scatter"] = False
    engine = start_engine(config)
    train_steps(engine, models.global_batches(1))
    batch = models.global_batches(1)[0].chunk(engine.world_size)[torch.distributed.get_rank()]
    engine.backward(engine(batch))
    with counting_collectives() as counts:
        engine.step()
    parameters = sum(p.numel() for p in models.build("llama").parameters())
    return {"received": sum(counts["elements"].values()) / parameters}


def test_zero3_step_receives_an_eighth_of_the_built_ins() -> None:
    mean = {
        built_in: sum(o["received"] for o in ranks.run(4, engine_step, built_in=built_in)) / 4
        for built_in in (False, True)
    }
    print(f"step elements per rank: DMuon {mean[False]:.3f} P, built-in {mean[True]:.3f} P")
    assert 8 * mean[False] <= mean[True]


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
            if isinstance(t, torch.Tensor)
            and not isinstance(t, FakeTensor)
            and t.untyped_storage().nbytes()
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
