# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of HSDP: one replica writes, any number of replicas reads, and a run continues."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state

from tests.harness import models, ranks
from tests.harness.training import digest, ds_config, masters, start_engine, train_steps


def config_of(
    *, stage: int, shard_size: int | None, hide: bool = False, **config: Any
) -> dict[str, Any]:
    params: dict[str, Any] = {"lr": 1e-2, "hide_param_gather": hide}
    if shard_size is not None:
        params["hsdp"] = {"shard_size": shard_size}
    return ds_config(stage, params=params, **config)


def contents(engine: Any) -> dict[str, str]:
    """Hashes of whole masters and states by name; a collective."""
    found = {"masters": digest(masters(engine))}
    named = dict(engine.module.named_parameters())
    for key, chosen in (("momentum_buffer", True), ("exp_avg", False), ("exp_avg_sq", False)):
        found[key] = digest(
            {
                n: safe_get_full_optimizer_state(p, key).clone()
                for n, p in named.items()
                if models.is_matrix(n) is chosen
            }
        )
    return found


def resume(*, folder: str, **config: Any) -> dict[str, Any]:
    """Run on a rank: train through; train, save; start anew, load, train on."""
    built = config_of(**config)
    batches = models.global_batches(5)
    engine = start_engine(built)
    train_steps(engine, batches[:2])
    written: list[str] = []
    save = engine.checkpoint_engine.save

    def counted_save(state: Any = None, path: str = "", **kwargs: Any) -> Any:
        written.append(Path(path).name)
        return save(kwargs.get("state_dict", state), path)

    with mock.patch.object(engine.checkpoint_engine, "save", counted_save):
        engine.save_checkpoint(folder)
    saved = contents(engine)
    train_steps(engine, batches[2:])
    straight = digest(masters(engine))
    other = start_engine(built)
    other.load_checkpoint(folder)
    loaded = contents(other)
    train_steps(other, batches[2:])
    return {
        "written": written,
        "saved": saved,
        "loaded": loaded,
        "equal": digest(masters(other)) == straight,
    }


def loaded_contents(*, folder: str, **config: Any) -> dict[str, str]:
    """Run on a rank: load a checkpoint that others wrote, and train on it."""
    engine = start_engine(config_of(**config))
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    found = contents(engine)
    train_steps(engine, models.global_batches(1))
    found["finite"] = str(all(bool(t.isfinite().all()) for t in masters(engine).values()))
    return found


@pytest.mark.parametrize(
    ("stage", "config"),
    [(1, {}), (2, {"dtype": "bf16", "hide": True}), (3, {}), (3, {"dtype": "bf16"})],
)
def test_checkpoints_continue_and_move_between_numbers_of_replicas(
    stage: int, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = str(tmp_path)
    out = ranks.run(4, resume, folder=folder, stage=stage, shard_size=2, **config)
    assert all(o["equal"] for o in out), "a restart continues with the same bits"
    written = [name for o in out for name in o["written"]]
    assert len(written) == len(set(written)), "no two ranks write one file"
    assert all(o["written"] == [] for o in out[2:]), "replica 0 alone writes"
    assert sum("optim_states" in name for name in written) == 2
    contents_saved = out[0]["saved"]
    assert all(o["saved"] == o["loaded"] == contents_saved for o in out)
    for world, shard_size in ((6, 2), (2, None)):
        for found in ranks.run(
            world, loaded_contents, folder=folder, stage=stage, shard_size=shard_size, **config
        ):
            assert found.pop("finite") == "True"
            assert found == contents_saved


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_without_replicas_gains_them(stage: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    saved = ranks.run(2, resume, folder=folder, stage=stage, shard_size=None)[0]["saved"]
    for found in ranks.run(4, loaded_contents, folder=folder, stage=stage, shard_size=2):
        assert found.pop("finite") == "True"
        assert found == saved


def saved_then_killed(*, folder: str, stage: int) -> tuple[str, float]:
    """Run on a rank: rank 1 dies in the middle of a step; what the others get, and how late."""
    engine = start_engine(config_of(stage=stage, shard_size=2))
    train_steps(engine, models.global_batches(1))
    engine.save_checkpoint(folder)
    run = engine.basic_optimizer.binding.engine.run

    def dying(*args: Any) -> None:
        if torch.distributed.get_rank() == 1:
            ranks.die()
        run(*args)

    engine.basic_optimizer.binding.engine.run = dying
    start = time.monotonic()
    try:
        train_steps(engine, models.global_batches(2))
    except RuntimeError as error:
        return f"error: {error}", time.monotonic() - start
    return "no error", 0.0


TIMEOUT = timedelta(seconds=8)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_killed_rank_ends_all_and_the_last_checkpoint_loads(stage: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    out = ranks.run_with_deaths(
        4, saved_then_killed, collective_timeout=TIMEOUT, folder=folder, stage=stage
    )
    assert out[1] is None, "rank 1 is dead"
    for text, seconds in (out[rank] for rank in (0, 2, 3)):
        assert text.startswith("error: ")
        # At most one collective waits for the time-out; the rest of the steps is short.
        assert seconds < TIMEOUT.total_seconds() + 5
    found = ranks.run(4, loaded_contents, folder=folder, stage=stage, shard_size=2)
    assert all(f["finite"] == "True" for f in found)
