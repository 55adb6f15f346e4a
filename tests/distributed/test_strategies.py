# SPDX-License-Identifier: Apache-2.0
"""Strategies: the traffic that plans predict, the reorder, overlap, and the same bits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import ds_muon.run.step as step_module
from ds_muon.comm.strategies import warm_up
from ds_muon.config import parse
from ds_muon.ortho.backends import Backend
from ds_muon.ortho.recipes import resolve
from ds_muon.plan.layout import Matrix, Placement, split_parameter_layout
from ds_muon.plan.memory import buffer_sets
from ds_muon.plan.plan import exchange_cost_bytes
from ds_muon.plan.traffic import STRATEGIES
from ds_muon.planning import plan_layout
from ds_muon.run.step import LeafStep, StepEngine
from ds_muon.run.views import view
from ds_muon.zero.transport import DeepSpeedTransport
from tests.harness import models, ranks
from tests.harness.training import CountingTransport, ds_config, start_engine, train_steps


def restore(*, strategy: str) -> dict[str, Any]:
    """Run on a rank: matrices cut over four ranks, A and D columns of one parameter."""
    shapes = {"A": (5, 7), "B": (2, 3), "C": (4, 4), "D": (5, 3)}
    generator = torch.Generator().manual_seed(1)
    whole = {n: torch.randn(r * c, generator=generator) for n, (r, c) in shapes.items()}
    matrices = {n: Matrix(name=n, rows=r, cols=c) for n, (r, c) in shapes.items()}
    parts = [-(-50 // 4), -(-6 // 4), -(-16 // 4)]
    layout = split_parameter_layout(
        [
            [
                Placement(matrix=matrices["A"], offset=0, run=7, stride=10),
                Placement(matrix=matrices["D"], offset=7, run=3, stride=10),
            ],
            [Placement(matrix=matrices["B"], offset=0)],
            [Placement(matrix=matrices["C"], offset=0)],
        ],
        partition_numels=parts,
        leaf_offsets=[0, parts[0], parts[0] + parts[1]],
        world_size=4,
    )
    config = parse({"ns_dtype": "fp32", "nesterov": False, "exchange": strategy})
    spec = resolve(config)
    plan = plan_layout(layout, config, spec, storage=torch.float32)
    transport = CountingTransport(DeepSpeedTransport())
    engine = StepEngine(
        transport,
        Backend(spec, torch.device("cpu")),
        [plan],
        inflight=1,
        keep_buffers=True,
    )
    grad = torch.zeros(sum(parts))
    for matrix, fragments in zip(layout.matrices, layout.fragments, strict=True):
        for f in fragments:
            if f.rank == transport.rank:
                source = whole[matrix.name][f.matrix_offset : f.matrix_offset + f.numel]
                view(grad, f.place).copy_(source.view(f.place.shape))
    seen: list[Tensor] = []

    def keep(x: Tensor, matrix: Tensor, *rest: Any) -> Tensor:
        seen.append(matrix.clone())
        return matrix

    weights = torch.zeros_like(grad)
    leaf = LeafStep(
        weights=weights,
        momentum=torch.zeros_like(grad),
        grad=grad,
        lr=1.0,
        weight_decay=0.0,
        mu=0.0,
    )
    with mock.patch.object(step_module, "orthogonalize_into", keep):
        engine.run(0, [leaf])
    restored = [
        any(torch.equal(m.reshape(-1), w) for w in whole.values() if w.numel() == m.numel())
        for m in seen
    ]
    back = all(
        torch.allclose(
            view(weights, f.place).reshape(-1),
            -0.2 * max(m.rows, m.cols) ** 0.5 * whole[m.name][f.matrix_offset :][: f.numel],
        )
        for m, fragments in zip(layout.matrices, layout.fragments, strict=True)
        for f in fragments
        if f.rank == transport.rank
    )
    return {
        "restored": restored,
        "back": back,
        "calls": dict(transport.calls),
        "buckets": len(plan.routes),
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_restores_every_matrix(strategy: str) -> None:
    out = ranks.run(4, restore, strategy=strategy)
    assert sum(len(o["restored"]) for o in out) == 4
    for o in out:
        assert all(o["restored"]) and o["back"]
        assert o["buckets"] == 1
        if strategy == "all_gather":
            assert o["calls"] == {"all_gather": 2}, "one collective per bucket and way"


def counted(*, stage: int, strategy: str) -> dict[str, Any]:
    """Run on a rank: one step, its traffic counted and predicted."""
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else None
    engine = start_engine(ds_config(stage, params={"lr": 1e-2, "exchange": strategy}, zero=zero))
    binding = engine.basic_optimizer.binding
    transport = binding.engine.transport = CountingTransport(binding.engine.transport)
    train_steps(engine, models.global_batches(1))
    rank = transport.rank
    legs = [leg for plan in binding.engine.plans for leg in plan.legs()]
    return {
        "received": sum(transport.received.values()),
        "calls": sum(transport.calls.values()),
        "predicted": sum(leg.received[rank] for leg in legs),
        "predicted_calls": sum(leg.calls[rank] for leg in legs),
        "padding": sum(leg.padding[rank] for leg in legs),
        "used": sorted(transport.calls),
        "numel": sum(m.numel for p in binding.engine.plans for m in p.layout.matrices),
        "owned": sum(
            m.numel
            for p in binding.engine.plans
            for m, o in zip(p.layout.matrices, p.owners, strict=True)
            if o == rank
        ),
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_traffic_is_what_plans_predict(stage: int, strategy: str) -> None:
    out = ranks.run(4, counted, stage=stage, strategy=strategy)
    expected = {
        "all_to_all": {"all_to_all"},
        "all_gather": {"all_gather"},
        "p2p": {"p2p"},
        "broadcast": {"broadcast"} if stage == 0 else {"all_to_all", "broadcast"},
    }
    for o in out:
        assert (o["received"], o["calls"]) == (o["predicted"], o["predicted_calls"])
        assert set(o["used"]) == expected[strategy]
        assert (o["padding"] > 0) <= (strategy == "all_gather")
        if strategy == "broadcast" and stage == 0:
            assert o["received"] == o["numel"] - o["owned"]


def watched(*, steps: int) -> list[bool]:
    """Run on a rank: compare all ranks' weights after every step, two buckets in flight."""
    import ds_muon.planning as planning

    params = {"lr": 1e-2, "max_inflight_buckets": 2, "workspace_mb": 1}
    with mock.patch.object(planning, "MIB", 1):
        engine = start_engine(ds_config(2, params=params))
    binding = engine.basic_optimizer.binding
    same = []
    for batch in models.global_batches(steps):
        train_steps(engine, [batch])
        bits = torch.cat(
            [p.detach().view(-1).view(torch.int32) for p in engine.module.parameters()]
        )
        low, high = bits.clone(), bits.clone()
        torch.distributed.all_reduce(low, torch.distributed.ReduceOp.MIN)
        torch.distributed.all_reduce(high, torch.distributed.ReduceOp.MAX)
        same.append(torch.equal(low, high))
    same.append(sum(len(p.routes) for p in binding.engine.plans) >= 3)
    same.append(bool(torch.isfinite(bits.view(torch.float32)).all()))
    return same


# Case C12 (nanochat#843): inputs of a collective live until it was waited for.
@pytest.mark.parametrize("steps", [50, 200])
def test_many_steps_with_two_buckets_in_flight(steps: int) -> None:
    for same in ranks.run(4, watched, steps=steps, timeout_s=300):
        assert all(same)


def test_auto_takes_the_cheapest_and_overlap_takes_more_buffers() -> None:
    layout = split_parameter_layout(
        [[Placement(matrix=Matrix(name=f"m{i}", rows=64, cols=64), offset=0)] for i in range(8)],
        partition_numels=[1024] * 8,
        leaf_offsets=[1024 * i for i in range(8)],
        world_size=4,
    )
    configs = {s: parse({"exchange": s}) for s in ("auto", *STRATEGIES)}
    plans = {
        s: plan_layout(layout, config, resolve(config), storage=torch.bfloat16)
        for s, config in configs.items()
    }
    costs = {s: exchange_cost_bytes(plans["auto"].loads(), s, 2) for s in STRATEGIES}
    assert costs[plans["auto"].exchange] == min(costs.values())
    assert buffer_sets(2) == 3


def warmed(*, strategy: str) -> dict[str, Any]:
    """Run on a rank: what connecting issues, to whom."""
    transport = CountingTransport(DeepSpeedTransport())
    warm_up(strategy, transport, torch.device("cpu"))
    return {"calls": dict(transport.calls), "received": dict(transport.received)}


@pytest.mark.parametrize(
    ("strategy", "calls"),
    [
        ("all_to_all", {"all_to_all": 1}),
        ("all_gather", {"all_gather": 1}),
        ("broadcast", {"all_to_all": 1, "broadcast": 3}),
        ("p2p", {"p2p": 4}),
    ],
)
def test_starting_connects_every_pair_of_ranks(strategy: str, calls: dict[str, int]) -> None:
    for out in ranks.run(3, warmed, strategy=strategy):
        assert out["calls"] == calls
        assert all(n in (2, 4) for n in out["received"].values()), "from both other ranks"
