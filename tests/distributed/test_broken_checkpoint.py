# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that cannot be honoured: a clear error on all ranks, nothing changed, others load."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch

from tests.harness import models, ranks
from tests.harness.training import digest, ds_config, masters, start_engine, train_steps

PARAMS = {"lr": 1e-2}
OPTIMIZER_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def cut_short(tag: Path) -> None:
    path = tag / OPTIMIZER_1
    path.write_bytes(path.read_bytes()[:-1000])


def empty_model(tag: Path) -> None:
    next(tag.glob("*model_states.pt")).write_bytes(b"")


def lose_shard(tag: Path) -> None:
    (tag / OPTIMIZER_1).unlink()


def lose_model(tag: Path) -> None:
    next(tag.glob("*model_states.pt")).unlink()


def mix_saves(tag: Path) -> None:
    shutil.copyfile(tag.parent / "first" / OPTIMIZER_1, tag / OPTIMIZER_1)


BREAKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a truncated file": (cut_short, "cannot be read"),
    "an empty model file": (empty_model, "cannot be read"),
    "a missing shard": (lose_shard, "no *optim_states.pt of rank 1"),
    "a missing model file": (lose_model, "no *model_states.pt of rank"),
    "files of two saves": (mix_saves, "another save"),
}


def break_and_load(*, folder: str, stage: int, again: int) -> dict[str, Any]:
    """Run on a rank: two tags; every break of the second; then the first loads."""
    home, world = Path(folder), torch.distributed.get_world_size()
    engine = start_engine(ds_config(stage, params=PARAMS))
    batches = models.global_batches(2)
    train_steps(engine, batches[:1])
    engine.save_checkpoint(folder, tag="first")
    first = digest(masters(engine))
    train_steps(engine, batches[1:])
    engine.save_checkpoint(folder, tag="second")
    latest = (home / "latest").read_text()
    other = start_engine(ds_config(again, params=PARAMS))
    start = digest(masters(other))
    errors = {}
    for name, (damage, _) in BREAKS.items():
        if torch.distributed.get_rank() == 0:
            shutil.copytree(home / "second", home / "broken")
            damage(home / "broken")
        torch.distributed.barrier()
        try:
            other.load_checkpoint(folder, tag="broken")
        except (ValueError, RuntimeError) as error:
            errors[name] = str(error)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(home / "broken")
        torch.distributed.barrier()
    unchanged = digest(masters(other)) == start
    other.load_checkpoint(folder, tag="first")
    return {
        "errors": errors,
        "unchanged": unchanged,
        "first": digest(masters(other)) == first,
        "latest": latest,
        "world": world,
    }


@pytest.mark.parametrize(("stage", "again"), [(2, 2), (2, 3), (3, 3)])
def test_broken_tags_are_refused_on_all_ranks(stage: int, again: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for out in ranks.run(2, break_and_load, folder=folder, stage=stage, again=again):
            assert out["latest"] == "second"
            for name, (_, text) in BREAKS.items():
                assert text in out["errors"].get(name, "loaded"), name
                assert "first" in out["errors"][name], "no other tag is named"
            assert out["unchanged"]
            assert out["first"]


def refused(*, folder: str, saved: dict[str, Any], loaded: dict[str, Any], model: str) -> str:
    """Run on a rank: save, load into another run; return the error if nothing changed."""
    engine = start_engine(ds_config(2, params=PARAMS))
    train_steps(engine, models.global_batches(1))
    engine.save_checkpoint(folder)
    other = start_engine(ds_config(2, params={**PARAMS, **loaded}), model=model)
    before = digest(masters(other))
    try:
        other.load_checkpoint(folder, **saved)
    except (ValueError, RuntimeError) as error:
        return str(error) if digest(masters(other)) == before else "weights changed"
    return "no error"


@pytest.mark.parametrize(
    ("loaded", "model", "options", "text"),
    [
        (
            {"exclude": ["*.o_proj.weight"]},
            "llama",
            {},
            "it has no exp_avg, exp_avg_sq, step of layers.",
        ),
        ({"include": ["lm_head.weight"]}, "llama", {}, "no momentum_buffer of lm_head.weight"),
        ({}, "mlp", {}, "another model: it has no "),
        (
            {"exclude": ["*.o_proj.weight"]},
            "llama",
            {"custom_load_fn": shutil.copyfile},
            "custom_load_fn",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    loaded: dict[str, Any], model: str, options: dict[str, Any], text: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kwargs = {"saved": options, "loaded": loaded, "model": model}
        for found in ranks.run(2, refused, folder=folder, **kwargs):
            assert text in found


def weights_only(*, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run on a rank: routing changed; the weights alone can be taken."""
    engine = start_engine(ds_config(2, params=PARAMS))
    train_steps(engine, models.global_batches(1))
    engine.save_checkpoint(folder)
    other = start_engine(ds_config(3, params={**PARAMS, "exclude": ["*.o_proj.weight"]}))
    other.load_checkpoint(folder, **options)
    moved = [float(v.norm()) for s in other.basic_optimizer.state.values() for v in s.values()]
    return {"equal": digest(masters(other)) == digest(masters(engine)), "moved": sum(moved)}


@pytest.mark.parametrize("options", [{"load_optimizer_states": False}, {"load_module_only": True}])
def test_weights_alone_are_taken_where_states_do_not_fit(options: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for out in ranks.run(2, weights_only, folder=folder, options=options):
            assert out["equal"]
            assert out["moved"] == 0


class Growing(torch.nn.Module):
    """Two layers, of which the first may be frozen; a third where `added`."""

    def __init__(self, *, frozen: bool, added: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(33, 21)
        self.second = torch.nn.Linear(21, 33)
        self.first.requires_grad_(not frozen)
        if added:
            self.third = torch.nn.Linear(33, 35)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.sin(tokens[:, :1] * (torch.arange(33, device=tokens.device) + 1) * 0.37)
        x = self.second(torch.tanh(self.first(x.to(self.second.weight.dtype))))
        return (self.third(x) if hasattr(self, "third") else x).square().mean()


def growing(config: dict[str, Any], *, seed: int, **shape: bool) -> Any:
    torch.manual_seed(seed)
    module = Growing(**shape)
    return deepspeed.initialize(model=module, config=config, model_parameters=module.parameters())[
        0
    ]


def whole_weights(engine: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    return found


def grown(*, folder: str, stage: int, optimizer: str, target: int) -> dict[str, Any]:
    """Run on a rank: weights of a smaller, partly frozen model go into one that trains more."""
    saved, loaded = ds_config(stage, params=PARAMS), ds_config(target, params=PARAMS)
    saved["optimizer"].update(type=optimizer, params={**PARAMS, "torch_adam": True})
    if optimizer != "DMuon" and stage:
        saved["zero_optimization"]["round_robin_gradients"] = True
    engine = growing(saved, seed=1, frozen=True, added=False)
    train_steps(engine, models.global_batches(1))
    engine.save_checkpoint(folder)
    want = whole_weights(engine)
    engine = growing(loaded, seed=2, frozen=False, added=True)
    before, errors = whole_weights(engine), {}
    for name, options in {
        "states": {},
        "strict": {"load_optimizer_states": False},
        "loose": {"load_optimizer_states": False, "load_module_strict": False},
    }.items():
        try:
            engine.load_checkpoint(folder, **options)
        except (ValueError, RuntimeError) as error:  # this rank's, or another's
            errors[name] = str(error)
            assert digest(whole_weights(engine)) == digest(before), name
    found = whole_weights(engine)
    train_steps(engine, models.global_batches(1))
    return {
        "errors": errors,
        "taken": all(torch.equal(found[name], value) for name, value in want.items()),
        "kept": all(torch.equal(found[n], v) for n, v in before.items() if n.startswith("third")),
    }


@pytest.mark.parametrize(
    ("stage", "optimizer", "target"),
    [(2, "DMuon", 3), (3, "DMuon", 1), (0, "AdamW", 2), (2, "AdamW", 2)],
)
def test_weights_move_into_a_model_that_trains_more(
    stage: int, optimizer: str, target: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kwargs = {"stage": stage, "optimizer": optimizer, "target": target}
        for out in ranks.run(2, grown, folder=folder, **kwargs):
            assert out["taken"]
            assert out["kept"]
            assert list(out["errors"]) == ["states", "strict"]
            assert "third." in out["errors"]["strict"]
            assert "load_module_strict=False" in out["errors"]["strict"]


class WithRest(torch.nn.Module):
    """A trained layer, and a rest: a frozen table, one that no group trains, a buffer."""

    def __init__(self, *, rows: int = 1, width: int = 3, layers: int = 1) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(33, 33) for _ in range(layers))
        self.table = torch.nn.Embedding(rows, 33)
        self.table.requires_grad_(False)
        self.apart = torch.nn.Linear(33, 5)
        self.register_buffer("shift", torch.randn(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.sin(tokens[:, :1] * (torch.arange(33, device=tokens.device) + 1) * 0.37)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def rest(*, folder: str, stage: int, target: int) -> dict[str, Any]:
    """Run on a rank: a run with a rest, loaded into runs whose rest differs."""

    def start(config: dict[str, Any], seed: int, *, apart: bool = False, **shape: int) -> Any:
        torch.manual_seed(seed)
        module = WithRest(**shape)
        trained = [p for n, p in module.named_parameters() if apart or not n.startswith("apart.")]
        return deepspeed.initialize(model=module, config=config, model_parameters=trained)[0]

    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    engine = start(ds_config(stage, params=PARAMS), 1, apart=True, layers=2)
    train_steps(engine, models.global_batches(1))
    engine.save_checkpoint(folder)
    want, found = {**whole_weights(engine), "shift": engine.module.shift.clone()}, {}
    for name, shape, options in (
        ("table", {"rows": 4, "layers": 2}, {"load_module_strict": False}),
        ("shift", {"width": 1, "layers": 2}, {}),
        ("fewer", {"layers": 1}, {}),
        ("fits", {"layers": 2}, {}),
        ("loose", {"layers": 1}, {"load_module_strict": False}),
        ("module", {"layers": 2}, {"load_module_only": True}),
    ):
        config = ds_config(target, params=PARAMS)
        if name == "module":
            config["scheduler"] = scheduler
        other = start(config, 2, **shape)
        before = digest(whole_weights(other))
        try:
            other.load_checkpoint(folder, **options)
        except (ValueError, RuntimeError) as error:
            kept = digest(whole_weights(other)) == before and other.global_steps == 0
            found[name] = str(error) if kept else "changed"
        else:
            own = {**whole_weights(other), "shift": other.module.shift}
            found[name] = [n for n, value in own.items() if not torch.equal(value, want[n])]
    return found


@pytest.mark.parametrize(("stage", "target"), [(2, 3), (2, 1), (3, 2)])
def test_what_no_group_trains_is_checked_and_filled(stage: int, target: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for out in ranks.run(2, rest, folder=folder, stage=stage, target=target):
            assert "table.weight is (1, 33) there and (4, 33) here" in out["table"]
            assert "shift is (3,) there and (1,) here" in out["shift"]
            assert "this run has no layers.1." in out["fewer"]
            assert out["fits"] == out["loose"] == out["module"] == []


@torch._dynamo.config.patch(disable=False)
def rewrapped(*, folder: str) -> dict[str, Any]:
    """Run on a rank: a plain model's checkpoint into a compiled one of the same shape."""
    config, weights = ds_config(2, params=PARAMS), []
    for seed, compiled in ((1, False), (2, True)):
        torch.manual_seed(seed)
        module = Growing(frozen=True, added=False)
        engine, *_ = deepspeed.initialize(
            model=torch.compile(module, backend="eager") if compiled else module,
            model_parameters=module.parameters(),
            config=config,
        )
        if compiled:
            engine.load_checkpoint(folder)
        else:
            train_steps(engine, models.global_batches(1))
            engine.save_checkpoint(folder)
        weights.append({n: p.detach().clone() for n, p in module.named_parameters()})
    first, second = weights
    return {"equal": all(torch.equal(first[name], second[name]) for name in first)}


def test_a_compiled_model_takes_a_plain_ones_checkpoint() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert all(out["equal"] for out in ranks.run(2, rewrapped, folder=folder))


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs, and no file is cleaned up."""


class KilledAt:
    """Ends a save at its n-th file operation, in the middle of what that writes."""

    def __init__(self, at: int | None, *, part: float = 0.5, die: Callable[[], None]) -> None:
        self.at, self.part, self.die, self.seen = at, part, die, 0
        self._patches = [
            mock.patch.object(torch, "save", self._counted(torch.save)),
            mock.patch.object(shutil, "copyfile", self._counted(shutil.copyfile)),
            mock.patch.object(os, "fsync", self._counted(os.fsync)),
            mock.patch.object(Path, "replace", self._counted(Path.replace)),
        ]

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            if self.at is not None and self.seen > self.at:
                if real is self._save:
                    real(*args, **kwargs)
                    path = Path(kwargs.get("path", args[1]))
                    path.write_bytes(path.read_bytes()[: int(self.part * path.stat().st_size)])
                self.die()
            return real(*args, **kwargs)

        return call

    _save = staticmethod(torch.save)

    def __enter__(self) -> KilledAt:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *error: Any) -> None:
        for patch in self._patches:
            patch.stop()


def killed() -> None:
    raise Killed


def killed_saves(*, folder: str, kills: int) -> list[dict[str, Any]]:
    """Run on one rank: saves that end at random points; what loads then?"""
    home = Path(folder)
    engine = start_engine(ds_config(2, params=PARAMS))
    train_steps(engine, models.global_batches(1))
    engine.save_checkpoint(folder, tag="first")
    first = digest(masters(engine))
    train_steps(engine, models.global_batches(1))
    with KilledAt(None, die=killed) as counted:
        engine.save_checkpoint(str(home.parent / "counted"), tag="second")
    draw, found = random.Random(5), []
    for _ in range(kills):
        work = home.parent / "work"
        shutil.copytree(home, work)
        at, ended = draw.randrange(counted.seen), False
        try:
            with KilledAt(at, part=draw.random(), die=killed):
                engine.save_checkpoint(str(work), tag="second")
        except Killed:
            ended = True
        other = start_engine(ds_config(2, params=PARAMS))
        path, _ = other.load_checkpoint(str(work))
        good = digest(masters(other)) == first and "/first/" in str(path)
        found.append({"at": at, "ended": ended, "good": good})
        shutil.rmtree(work)
    return found


def test_a_kill_at_any_point_of_a_save_leaves_a_tag_that_loads() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/home")
        [found] = ranks.run(1, killed_saves, folder=f"{folder}/home", kills=10)
    assert all(out["ended"] and out["good"] for out in found), found
    assert len({out["at"] for out in found}) > 3


def one_rank_dies(*, folder: str, stage: int) -> None:
    """Run on a rank: rank 1 dies before it has written its files of the second tag."""
    engine = start_engine(ds_config(stage, params=PARAMS))
    train_steps(engine, models.global_batches(1))
    engine.save_checkpoint(folder, tag="first")
    if torch.distributed.get_rank() == 1:
        with KilledAt(0, die=ranks.die):
            engine.save_checkpoint(folder, tag="second")
    try:
        engine.save_checkpoint(folder, tag="second")
    except RuntimeError:
        return
    raise AssertionError("saved without rank 1")


def loads(*, folder: str, stage: int) -> str:
    """Run on a rank: what a load without a tag takes."""
    engine = start_engine(ds_config(stage, params=PARAMS))
    path, _ = engine.load_checkpoint(folder)
    return str(path)


def test_latest_waits_for_every_rank() -> None:
    with tempfile.TemporaryDirectory() as folder:
        timeout = timedelta(seconds=10)
        ranks.run_with_deaths(2, one_rank_dies, collective_timeout=timeout, folder=folder, stage=3)
        assert (Path(folder) / "second").is_dir()
        for path in ranks.run(2, loads, folder=folder, stage=3):
            assert "/first/" in path
