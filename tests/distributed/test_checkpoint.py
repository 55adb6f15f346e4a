# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saving and loading in the same world continues with the same bits (case C5)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state

from tests.harness import models, ranks
from tests.harness.training import digest, ds_config, masters, start_engine, train_steps

WRAPPERS: dict[str, dict[str, Any]] = {
    "stage 0 fp32": {"stage": 0},
    "stage 0 bf16": {"stage": 0, "dtype": "bf16"},
    "stage 0 fp16": {"stage": 0, "dtype": "fp16"},
    "stage 1": {"stage": 1},
    "stage 2 bf16": {"stage": 2, "dtype": "bf16"},
    "stage 2 fp16": {"stage": 2, "dtype": "fp16"},
    "BF16_Optimizer": {
        "stage": 1,
        "dtype": "bf16",
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "stage 3": {"stage": 3},
    "stage 3 bf16": {"stage": 3, "dtype": "bf16", "zero": {"sub_group_size": 700}},
}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}


def resume(
    *, folder: str, momentum_dtype: str, first_steps: int, stage: int, **config: Any
) -> dict[str, Any]:
    """Run on a rank: train through; train, save; start anew, load, train on."""
    params = {"lr": 1e-2, "muon_lr": 2e-2, "momentum_dtype": momentum_dtype}
    built = ds_config(stage, params=params, scheduler=SCHEDULER, **config)
    batches = models.global_batches(first_steps + 3)
    engine = start_engine(built)
    train_steps(engine, batches[:first_steps])
    engine.save_checkpoint(folder)
    train_steps(engine, batches[first_steps:])
    straight = digest(masters(engine))
    other = start_engine(built)
    path, _ = other.load_checkpoint(folder)
    momentum = {
        v.dtype for s in other.basic_optimizer.state.values() for k, v in s.items() if k[0] == "m"
    }
    train_steps(other, batches[first_steps:])
    return {
        "path": path,
        "equal": digest(masters(other)) == straight,
        "momentum": momentum,
        "lr": other.get_lr() == engine.get_lr(),
    }


@pytest.mark.parametrize(
    ("name", "momentum_dtype", "first_steps"),
    [
        *((name, dtype, 3) for name in WRAPPERS for dtype in ("fp32", "bf16")),
        *((name, "fp32", 0) for name in ("stage 0 fp32", "stage 2 bf16", "stage 3")),
    ],
)
def test_resume_continues_bit_equal(name: str, momentum_dtype: str, first_steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = ranks.run(
            2,
            resume,
            folder=folder,
            momentum_dtype=momentum_dtype,
            first_steps=first_steps,
            **WRAPPERS[name],
        )
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[momentum_dtype]
    for o in out:
        assert o["path"] is not None
        assert o["equal"]
        assert o["momentum"] == {dtype}
        assert o["lr"]


def saved_entry(*, folder: str, stage: int) -> list[dict[str, Any]]:
    """Run on a rank: save, and read the optimizer files back with the weights-only loader."""
    engine = start_engine(ds_config(stage, params={"lr": 1e-2}))
    train_steps(engine, models.global_batches(1))
    own = engine.basic_optimizer.state_dict if stage < 3 else engine.optimizer.state_dict
    state = own() if stage < 3 else own()["optimizer_state_dict"]
    path = Path(folder) / f"own_{torch.distributed.get_rank()}.pt"
    torch.save(state, path)
    return [torch.load(path, weights_only=True)["ds_muon"]]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_entry_names_every_element_of_every_parameter_once(stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        entries = [e for out in ranks.run(3, saved_entry, folder=folder, stage=stage) for e in out]
    expected = {n: tuple(p.shape) for n, p in models.build("llama").named_parameters()}
    for rank, entry in enumerate(entries):
        assert entry["version"] == 1
        assert (entry["world_size"], entry["rank"], entry["stage"]) == (3, rank, stage)
        assert entry["recipe"]["name"] == "moonlight"
    if stage == 0:
        entries = entries[:1]
    found: dict[str, list[tuple[int, int]]] = {}
    for entry in entries:
        for leaf in entry["leaves"]:
            for item in leaf["slices"]:
                assert tuple(item["shape"]) == expected[item["name"]]
                assert item["kind"] == ("muon" if models.is_matrix(item["name"]) else "adamw")
                found.setdefault(item["name"], []).append((item["parameter_offset"], item["numel"]))
    for name, shape in expected.items():
        covered = 0
        for offset, numel in sorted(found[name]):
            assert offset == covered
            covered += numel
        assert covered == torch.Size(shape).numel()


def full_state(*, stage: int, load: bool, folder: str, **config: Any) -> dict[str, Any]:
    """Run on a rank: read whole states by DeepSpeed's own accessor, before and after steps."""
    built = ds_config(stage, params={"lr": 1e-2}, **config)
    engine = start_engine(built)
    if load:
        train_steps(engine, models.global_batches(2))
        engine.save_checkpoint(folder)
        engine = start_engine(built)
        engine.load_checkpoint(folder)
    sizes = []
    for _ in range(2):
        for name, p in engine.module.named_parameters():
            keys = ["momentum_buffer"] if models.is_matrix(name) else ["exp_avg", "exp_avg_sq"]
            sizes += [float(safe_get_full_optimizer_state(p, key).float().norm()) for key in keys]
        train_steps(engine, models.global_batches(1))
    return {"before": sizes[: len(sizes) // 2], "after": sizes[len(sizes) // 2 :]}


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("name", ["stage 1", "stage 2 bf16", "BF16_Optimizer", "stage 3"])
def test_safe_get_full_optimizer_state(name: str, load: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = ranks.run(2, full_state, folder=folder, load=load, **WRAPPERS[name])
    for o in out:
        assert all((size > 0) is load for size in o["before"])
        assert all(size > 0 for size in o["after"])
        assert o == out[0]
