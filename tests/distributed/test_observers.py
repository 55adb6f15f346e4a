# SPDX-License-Identifier: Apache-2.0
"""What `metrics` records and what `verify_every` finds."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.utils import safe_get_full_grad

import ds_muon.run.step as step_module
from tests.harness import models, ranks
from tests.harness.training import ds_config, masters, start_engine, train_steps


def recorded(*, stage: int, folder: str) -> dict[str, Any]:
    """Run on a rank: four steps, every second one recorded, beside norms taken independently."""
    params = {
        "lr": 1e-2,
        "adam_lr": 2e-3,
        "weight_decay": 0.0,
        "adam_weight_decay": 0.0,
        "metrics": {"every": 2, "buckets": True},
    }
    monitor = {"enabled": True, "output_path": folder, "job_name": "run"}
    engine = start_engine(ds_config(stage, params=params, csv_monitor=monitor))
    optimizer = engine.basic_optimizer
    seen: list[int] = []
    optimizer.binding.recorder.sinks.append(lambda stats: seen.append(stats.step))
    batches = models.global_batches(4)
    train_steps(engine, batches[:3])
    before = masters(engine)
    own = batches[3].chunk(engine.world_size)[torch.distributed.get_rank()]
    engine.backward(engine(own))
    named = dict(engine.module.named_parameters())
    grads = {n: safe_get_full_grad(p) for n, p in named.items()} if stage else {}
    engine.step()
    after = masters(engine)
    squares = {"muon": [0.0, 0.0, 0], "adamw": [0.0, 0.0, 0]}
    for name, old in before.items():
        sums = squares["muon" if models.is_matrix(name) else "adamw"]
        sums[0] += float((after[name].double() - old.double()).square().sum())
        sums[1] += float(grads[name].double().square().sum()) if stage else 0.0
        sums[2] += old.numel()
    stats = optimizer.last_stats
    return {
        "seen": seen,
        "stats": stats.as_dict(),
        "update_rms": {k: (s[0] / s[2]) ** 0.5 for k, s in squares.items()},
        "grad_norm": {k: s[1] ** 0.5 for k, s in squares.items()},
        "exchange": [
            bucket.buffers.nbytes
            for buckets in optimizer.binding.engine._schedules
            for bucket in buckets
        ],
        "plans": [[len(r.matrices) for r in p.routes] for p in optimizer.binding.engine.plans],
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_records_say_what_the_step_did(stage: int, tmp_path: Path) -> None:
    out = ranks.run(2, recorded, stage=stage, folder=str(tmp_path))
    for o in out:
        stats = o["stats"]
        assert o["seen"] == [2, 4] and stats["step"] == 4
        for name in ("muon", "adamw"):
            # Differences of fp32 weights near 0.1 carry their rounding, 2^-27, against 1e-3.
            assert stats["update_rms"][name] == pytest.approx(o["update_rms"][name], rel=1e-4)
            if stage:
                assert stats["grad_norm"][name] == pytest.approx(o["grad_norm"][name], rel=1e-5)
            assert stats["grad_norm"][name] > 0
        assert [b["matrices"] for b in stats["buckets"]] == [n for p in o["plans"] for n in p]
        assert [b["exchange_bytes"] for b in stats["buckets"]] == o["exchange"]
        for bucket in stats["buckets"]:
            assert all(bucket["milliseconds"][p] > 0 for p in ("in", "ns", "out"))
            assert bucket["allocated_peak"] >= bucket["allocated_before"] > 0
            assert len(bucket["names"]) == len(bucket["shapes"]) == bucket["matrices"]
        assert stats["ns_balance"] >= 1.0 <= stats["planned_balance"]
    assert out[0]["stats"]["update_rms"] == out[1]["stats"]["update_rms"]
    assert sum(b["owned"] for o in out for b in o["stats"]["buckets"]) == 14
    [written] = tmp_path.rglob("*DMuon_ns_balance.csv")
    rows = list(csv.reader(written.open()))[1:]
    assert float(rows[-1][1]) == pytest.approx(out[0]["stats"]["ns_balance"])
    assert [float(row[0]) for row in rows] == [2 * models.GLOBAL_BATCH, 4 * models.GLOBAL_BATCH]


def off() -> bool:
    """Run on a rank: without the key nothing is observed."""
    engine = start_engine(ds_config(1, params={"lr": 1e-2}))
    train_steps(engine, models.global_batches(1))
    binding = engine.basic_optimizer.binding
    with mock.patch.object(step_module.torch.linalg, "vector_norm", side_effect=AssertionError):
        binding.engine._phase(0, 0, "in")
    return (binding.recorder, binding.verifier, binding.engine.recorder) == (None, None, None)


def test_nothing_is_observed_unless_asked_for() -> None:
    assert all(ranks.run(2, off))


def flip(tensor: torch.Tensor, position: int, bit: int) -> None:
    flat = tensor.detach().view(-1)
    bits = flat.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    bits[position] ^= 1 << bit


def until_found(*, stage: int, dtype: str, where: str, every: int) -> dict[str, Any]:
    """Run on a rank: sound steps, then one bit flipped on rank 1; steps until it is found."""
    params = {"lr": 1e-2, "verify_every": every}
    engine = start_engine(ds_config(stage, params=params, dtype=dtype))
    optimizer = engine.basic_optimizer
    verifier = optimizer.binding.verifier
    batches = models.global_batches(20)
    train_steps(engine, batches[:3])
    sound = verifier.checks
    real = step_module.apply_update

    def damaged(leaf: torch.Tensor, update: torch.Tensor, **options: Any) -> None:
        real(leaf, update, **options)
        flip(leaf, 0, 20)

    weight = dict(engine.module.named_parameters())[WEIGHT].detach()
    if torch.distributed.get_rank() == 1 and where == "weight":
        flip(weight, 3, 2)
    if torch.distributed.get_rank() == 1 and where == "sign":
        weight.view(-1)[3].neg_()
    if torch.distributed.get_rank() == 1 and where == "order":
        weight.copy_(weight.flip(0))
    if torch.distributed.get_rank() == 1 and where == "master":
        flip(optimizer.binding.leaf_sets[0][0], 3, 2)
    found, error = 0, ""
    broken = where == "update" and torch.distributed.get_rank() == 1
    with mock.patch.object(step_module, "apply_update", damaged if broken else real):
        for batch in batches[3:]:
            found += 1
            try:
                train_steps(engine, [batch])
            except RuntimeError as raised:
                error = str(raised)
                break
    return {"sound": sound, "steps": found, "error": error}


WEIGHT = next(n for n, _ in models.build("llama").named_parameters() if n.endswith("o_proj.weight"))
CASES = [
    (0, "fp32", "weight", WEIGHT),
    (1, "fp32", "weight", WEIGHT),
    (2, "bf16", "weight", WEIGHT),
    (1, "fp32", "sign", WEIGHT),
    (2, "bf16", "sign", WEIGHT),
    (1, "fp32", "order", WEIGHT),
    (0, "bf16", "master", "master weights of layers.0.attention.q_proj.weight"),
    (1, "bf16", "master", "rank 1: master weights"),
    (3, "bf16", "master", "rank 1: master weights"),
    (1, "fp32", "update", "held by rank 1"),
    (3, "fp32", "update", "held by rank 1"),
]


@pytest.mark.parametrize(("stage", "dtype", "where", "words"), CASES)
def test_a_flipped_bit_is_found_within_k_steps(
    stage: int, dtype: str, where: str, words: str
) -> None:
    every = 1 if where == "update" else 2
    out = ranks.run(2, until_found, stage=stage, dtype=dtype, where=where, every=every)
    for o in out:
        assert o["sound"] == 3 // every
        assert words in o["error"], "found, named, and on all ranks"
        # Each check takes another of the 14 matrices' updates.
        assert o["steps"] <= (every if where != "update" else 14)
    assert out[0]["error"] == out[1]["error"]


def verified(*, stage: int, dtype: str) -> int:
    """Run on a rank: every matrix has its turn, across a save and a load."""
    engine = start_engine(ds_config(stage, params={"lr": 1e-2, "verify_every": 1}, dtype=dtype))
    batches = models.global_batches(20)
    train_steps(engine, batches[:15])
    return engine.basic_optimizer.binding.verifier.checks


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sound_training_passes_every_check(stage: int, dtype: str) -> None:
    assert ranks.run(4, verified, stage=stage, dtype=dtype) == [15] * 4


def restored(*, stage: int, folder: str) -> int:
    """Run on a rank: loading a checkpoint is no difference."""
    engine = start_engine(ds_config(stage, params={"lr": 1e-2, "verify_every": 1}))
    batches = models.global_batches(3)
    train_steps(engine, batches[:1])
    engine.save_checkpoint(folder)
    train_steps(engine, batches[1:2])
    engine.load_checkpoint(folder)
    train_steps(engine, batches[2:])
    engine.load_checkpoint(folder, load_optimizer_states=False)
    train_steps(engine, batches[2:])
    return engine.basic_optimizer.binding.verifier.checks


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_loading_is_no_difference(stage: int, tmp_path: Path) -> None:
    assert ranks.run(2, restored, stage=stage, folder=str(tmp_path)) == [4, 4]
