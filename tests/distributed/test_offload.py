# SPDX-License-Identifier: Apache-2.0
"""CPU offload (case C9): the same bits with and without it, and Newton-Schulz still once a matrix.

Publicly reported failure: under offload the built-in Muon orthogonalises every matrix on all ranks.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch

from ds_muon.run.crossing import HostBuffers
from tests.distributed.test_checkpoint import full_state, resume
from tests.distributed.test_degenerate import TwoPaths
from tests.harness import models, ranks
from tests.harness.reference import update_error
from tests.harness.training import (
    counting_newton_schulz,
    ds_config,
    masters,
    start_engine,
    train_steps,
)

STEPS = 3
OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
UNPINNED = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
PARAM = {"offload_param": {"device": "cpu"}}


def train(*, stage: int, params: dict[str, Any], zero_init: bool, **config: Any) -> dict[str, Any]:
    """Train on this rank; return what it left and what it did."""
    built = ds_config(stage, params={"lr": 1e-2, "ns_dtype": "fp32", **params}, **config)
    engine = start_engine(built, zero_init=zero_init)
    crossed: Counter[str] = Counter()
    copy = HostBuffers._copy

    def counted(self: Any, turn: int, target: torch.Tensor, source: torch.Tensor) -> None:
        crossed["elements"] += target.numel()
        copy(self, turn, target, source)

    with counting_newton_schulz() as shapes, mock.patch.object(HostBuffers, "_copy", counted):
        losses = train_steps(engine, models.global_batches(STEPS))
    plans = engine.basic_optimizer.binding.engine.plans
    rank = torch.distributed.get_rank()
    owned = [
        (m.rows, m.cols)
        for plan in plans
        for m, owner in zip(plan.layout.matrices, plan.owners, strict=True)
        if owner == rank
    ]
    held = sum(
        plan.layout.held_numel(i, rank) for plan in plans for i in range(len(plan.layout.matrices))
    )
    return {
        "masters": masters(engine),
        "losses": losses,
        "norm": engine.get_global_grad_norm(),
        "shapes": Counter(shapes),
        "owned": Counter(owned),
        "held": held,
        "crossed": crossed["elements"],
        "skipped": engine.skipped_steps,
    }


def both(
    *, offload: dict[str, Any], zero: dict[str, Any] | None = None, **cell: Any
) -> dict[str, Any]:
    """Run on a rank: train without and with offload; compare."""
    cell = {"params": {}, "zero_init": False, **cell}
    plain = train(zero=zero, **cell)
    moved = train(zero={**(zero or {}), **offload}, **cell)
    a, b = plain["masters"], moved["masters"]
    norms = [None if o["norm"] is None else float(o["norm"]) for o in (plain, moved)]
    return {
        "equal": [n for n in a if torch.equal(a[n], b[n])],
        "names": list(a),
        "gap": max(float((a[n] - b[n]).abs().max() / a[n].abs().max()) for n in a),
        "losses": plain["losses"] == moved["losses"],
        "norms": norms,
        "plain_crossed": plain["crossed"],
        **{k: moved[k] for k in ("shapes", "owned", "held", "crossed", "skipped")},
    }


CELLS: dict[str, dict[str, Any]] = {
    "stage 1, accumulation": {"world": 3, "stage": 1, "offload": OPTIMIZER, "accumulation": 2},
    "stage 2, clipping, two buckets": {
        "world": 2,
        "stage": 2,
        "offload": UNPINNED,
        "clip": 0.3,
        "params": {"max_inflight_buckets": 2, "workspace_mb": 1, "verify_every": 2},
    },
    "stage 2 fp16, hidden gather": {
        "world": 2,
        "stage": 2,
        "offload": OPTIMIZER,
        "fp16": {"enabled": True, "initial_scale_power": 15, "loss_scale_window": 1},
        "params": {"hide_param_gather": True},
    },
    "stage 3, zero.Init, sub-groups, Z3": {
        "world": 3,
        "stage": 3,
        "offload": {**OPTIMIZER, **PARAM},
        "zero": {"sub_group_size": 700},
        "zero_init": True,
        "clip": 0.3,
        "params": {"reshard_after_forward": True},
    },
    "stage 3 bf16, owners, Z2": {
        "world": 2,
        "stage": 3,
        "offload": OPTIMIZER,
        "dtype": "bf16",
        "accumulation": 2,
        "params": {"param_source": "owner_broadcast", "reshard_after_forward": False},
    },
    "stage 3, parameters only": {"world": 2, "stage": 3, "offload": PARAM},
}


@pytest.mark.parametrize("name", CELLS)
def test_offload_changes_no_bit_and_no_owner(name: str) -> None:
    cell = dict(CELLS[name])
    world, on_host = cell.pop("world"), "offload_optimizer" in cell["offload"]
    out = ranks.run(world, both, **cell)
    steps = STEPS - out[0]["skipped"]
    for o in out:
        # Elementwise passes see the same ranges, AdamW is the same kernel. Clipping: ZeRO sums the
        # norm by parameters instead of by partitions, which may round the factor differently
        # (and bf16 weights would make another trajectory of that).
        if cell.get("clip"):
            assert o["gap"] < 1e-6
            assert o["norms"][1] == pytest.approx(o["norms"][0], rel=1e-6)
        else:
            assert o["equal"] == o["names"] and o["losses"]
        # An owner runs its own matrices once a step, and nobody else does.
        assert o["shapes"] == Counter({s: n * steps for s, n in o["owned"].items()})
        # u goes to the arena, the update comes back, and nothing else crosses.
        assert o["crossed"] == (2 * o["held"] * steps if on_host else 0)
        assert o["plain_crossed"] == 0
    assert sum(sum(o["owned"].values()) for o in out) == 14
    assert (0 < steps < STEPS) if "fp16" in cell else steps == STEPS


def alternating(*, stage: int, uses: list[list[bool]], **config: Any) -> dict[str, Any]:
    """Run on a rank: a layer that only some micro-batches use, the same ones on all ranks."""
    torch.manual_seed(0)
    params = {"lr": 1e-2, "ns_dtype": "fp32"}
    built = ds_config(stage, params=params, accumulation=len(uses[0]), **config)
    engine, *_ = deepspeed.initialize(model=TwoPaths(), config=built)
    start, norms = masters(engine), []
    generator = torch.Generator().manual_seed(10 + torch.distributed.get_rank())
    for step in uses:
        for use in step:
            batch = torch.randn(2, 8, generator=generator)
            batch = batch.to(engine.module.always.weight.dtype)
            engine.backward(engine(batch, use_extra=use))
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return {"start": start, "end": masters(engine), "norms": norms}


USES = [[True, True], [True, False], [False, True], [False, False]]
WIDE = {"dtype": "bf16", "data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    ("stage", "zero", "config"),
    [(1, OPTIMIZER, {}), (2, OPTIMIZER, WIDE), (3, OPTIMIZER, {}), (3, {}, {})],
)
def test_no_gradient_is_left_over_from_another_step_or_lost(
    stage: int, zero: dict[str, Any], config: dict[str, Any]
) -> None:
    right = ranks.run(2, alternating, stage=2, uses=USES, **config)[0]
    found = ranks.run(2, alternating, stage=stage, zero=zero, uses=USES, **config)[0]
    # Partitions are cut and summed in another order.
    assert found["norms"] == pytest.approx(right["norms"], rel=1e-6)
    expected = {n: w.double() for n, w in right["end"].items()}
    assert update_error(found["end"], expected, right["start"], list(expected)) < 1e-5


@pytest.mark.parametrize(
    "config",
    [
        {
            "stage": 2,
            "fp16": {"enabled": True, "initial_scale_power": 8},
            "zero": OPTIMIZER,
        },
        {"stage": 3, "dtype": "bf16", "zero": {**OPTIMIZER, **PARAM}},
    ],
    ids=["stage 2", "stage 3"],
)
def test_checkpoints_continue_bit_equal_and_states_are_readable(config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for o in ranks.run(
            2, resume, folder=folder, momentum_dtype="fp32", first_steps=3, **config
        ):
            assert o["path"] is not None and o["lr"]
            assert o["equal"]
    with tempfile.TemporaryDirectory() as folder:
        out = ranks.run(2, full_state, folder=folder, load=True, **config)
    assert all(size > 0 for size in out[0]["before"] + out[0]["after"]) and out[0] == out[1]


def moved_states(*, stage: int, move: bool) -> dict[str, Any]:
    """Run on a rank: engine.offload_states between steps, where the optimizer is offloaded."""
    engine = start_engine(ds_config(stage, params={"lr": 1e-2}, dtype="bf16", zero=OPTIMIZER))
    train_steps(engine, models.global_batches(1))
    if move:
        engine.offload_states()
        engine.reload_states()
    train_steps(engine, models.global_batches(2))
    leaf = engine.basic_optimizer.binding.leaf_sets[0][0]
    return {"masters": masters(engine), "keys": set(engine.basic_optimizer.state[leaf])}


@pytest.mark.parametrize("stage", [2, 3])
def test_offload_states_leaves_what_is_offloaded_already(stage: int) -> None:
    one, other = (ranks.run(2, moved_states, stage=stage, move=m)[0] for m in (False, True))
    assert one["keys"] == other["keys"] == {"momentum_buffer"}
    assert all(torch.equal(w, other["masters"][n]) for n, w in one["masters"].items())
