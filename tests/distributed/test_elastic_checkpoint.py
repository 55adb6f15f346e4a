# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that move: other world sizes, stages, precisions, replicas, and other optimizers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

from ds_muon.zero.checkpoint.convert import to_universal
from tests.harness import models, ranks, reference
from tests.harness.training import ds_config, masters, start_engine, train_steps

PARAMS = {"lr": 1e-2, "muon_lr": 2e-2, "adam_weight_decay": 0.03, "ns_dtype": "fp32"}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}}
BF16_OPTIMIZER = {"dtype": "bf16", "data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
STATES = {True: ("momentum_buffer",), False: ("exp_avg", "exp_avg_sq")}


def config_of(shape: dict[str, Any]) -> dict[str, Any]:
    """A ds_config.json of a run's shape: stage, hsdp, and what ds_config takes."""
    shape = dict(shape)
    hsdp = shape.pop("hsdp", None)
    params = {**PARAMS, **({"hsdp": {"shard_size": hsdp}} if hsdp else {})}
    shape.pop("zero_init", None)
    return ds_config(shape.pop("stage"), params=params, scheduler=SCHEDULER, **shape)


def whole_states(engine: Any) -> dict[str, Tensor]:
    """Masters and optimizer states by name; a collective."""
    found = masters(engine)
    for name, p in engine.module.named_parameters():
        for key in STATES[models.is_matrix(name)]:
            own = engine.basic_optimizer.state.get(p, {}).get(key)
            whole = safe_get_full_optimizer_state(p, key) if own is None else own
            found[f"{name} {key}"] = whole.detach().clone()
    return found


def report(engine: Any) -> dict[str, Any]:
    """What a load has to bring back."""
    groups = [
        {k: v for k, v in group.items() if k != "params"}
        for group in engine.basic_optimizer.param_groups
    ]
    keep = torch.distributed.get_rank() == 0
    found = whole_states(engine)
    return {
        "states": found if keep else None,
        "groups": groups,
        "steps": {float(s["step"]) for s in engine.basic_optimizer.state.values() if "step" in s},
        "weights": [p.dtype for p in engine.module.parameters()][0],
        "lr": engine.get_lr(),
        "global_steps": engine.global_steps,
        "scale": getattr(engine.optimizer, "cur_scale", None),
    }


def save(*, folder: str, shape: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """Run on a rank: train, save, report; then one step more."""
    engine = start_engine(config_of(shape), zero_init=shape.get("zero_init", False))
    batches = models.global_batches(steps + 1)
    train_steps(engine, batches[:steps])
    engine.save_checkpoint(folder, client_state={"mine": 7})
    out = report(engine)
    train_steps(engine, batches[steps:])
    out["next"] = masters(engine)
    return out


def load(*, folder: str, shape: dict[str, Any], steps: int = 2, **options: Any) -> dict[str, Any]:
    """Run on a rank: load, report; then one step more."""
    engine = start_engine(config_of(shape), zero_init=shape.get("zero_init", False))
    path, client_state = engine.load_checkpoint(folder, **options)
    out = {**report(engine), "path": path, "mine": client_state.get("mine"), "client": client_state}
    weights = {n: p for n, p in engine.module.named_parameters() if p.numel()}
    rounded = {n: out["states"][n].to(p.dtype) for n, p in weights.items() if out["states"]}
    out["weights follow"] = all(torch.equal(weights[n], w) for n, w in rounded.items())
    out["client"] = sorted(client_state)
    train_steps(engine, models.global_batches(steps + 1)[steps:])
    out["next"] = masters(engine)
    return out


SAVED: dict[str, tuple[int, dict[str, Any]]] = {
    "4 ranks, stage 2": (4, {"stage": 2}),
    "2 ranks, stage 3": (2, {"stage": 3, "zero": {"sub_group_size": 700}, "zero_init": True}),
    "2x2, stage 3": (4, {"stage": 3, "hsdp": 2}),
    "2 ranks, BF16_Optimizer": (2, {"stage": 1, **BF16_OPTIMIZER}),
    "2 ranks, stage 0": (2, {"stage": 0}),
}
LOADED: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks, stage 3": (2, {"stage": 3}),
    "3 ranks, stage 1": (3, {"stage": 1}),
    "3 ranks, stage 2, round robin": (3, {"stage": 2, "zero": {"round_robin_gradients": True}}),
    "2x2, stage 2": (4, {"stage": 2, "hsdp": 2}),
    "2x2, stage 3": (4, {"stage": 3, "hsdp": 2, "zero_init": True}),
    "3 ranks, stage 3, bf16": (3, {"stage": 3, "dtype": "bf16"}),
    "3 ranks, BF16_Optimizer": (3, {"stage": 1, **BF16_OPTIMIZER}),
    "2 ranks, stage 0": (2, {"stage": 0}),
    "2 ranks, stage 3, offload": (2, {"stage": 3, "zero": OFFLOAD}),
}
# The reduction order of fp32 gradients differs between worlds and stages.
NEXT_STEP = 1e-5
# bf16 gradients are rounded on every rank before they are summed.
NEXT_STEP_BF16 = 5e-2


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (
            "4 ranks, stage 2",
            ("2 ranks, stage 3", "3 ranks, stage 1", "2x2, stage 2", "2x2, stage 3"),
        ),
        ("2 ranks, stage 3", ("3 ranks, stage 1", "2 ranks, stage 0")),
        ("2x2, stage 3", ("3 ranks, stage 1", "2 ranks, stage 3, offload")),
        ("2 ranks, BF16_Optimizer", ("3 ranks, stage 3, bf16", "3 ranks, BF16_Optimizer")),
        ("2 ranks, stage 0", ("2 ranks, stage 3", "3 ranks, stage 1")),
    ],
)
def test_a_checkpoint_loads_in_another_shape(saved: str, loaded: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world, shape = SAVED[saved]
        before = ranks.run(world, save, folder=folder, shape=shape)[0]
        start = before["states"]
        for target in loaded:
            world, shape = LOADED[target]
            for rank, out in enumerate(ranks.run(world, load, folder=folder, shape=shape)):
                assert out["path"] is not None
                assert out["mine"] == 7
                assert "ds_muon" not in out["client"]
                assert out["weights follow"], target
                for key in ("groups", "steps", "lr", "global_steps"):
                    assert out[key] == before[key], (target, key)
                if rank == 0:
                    assert out["states"].keys() == start.keys()
                    for name, value in start.items():
                        assert torch.equal(out["states"][name], value), (target, name)
            names = list(before["next"])
            expected = {n: t.double() for n, t in before["next"].items()}
            error = reference.update_error(out["next"], expected, start, names)
            print(f"{saved} -> {target}: next update {error:.1e}")
            assert error < (NEXT_STEP_BF16 if "dtype" in shape else NEXT_STEP), target


def foreign_config(kind: str, stage: int) -> dict[str, Any]:
    """AdamW's or the built-in Muon's."""
    params = {"lr": 5e-3, "torch_adam": True}
    zero = {}
    if kind == "Muon":
        params["ns_method"] = "standard"
        zero["reduce_scatter"] = stage < 3
    config = ds_config(stage, params=params, scheduler=SCHEDULER, zero=zero)
    config["optimizer"]["type"] = kind
    return config


def save_foreign(*, folder: str, kind: str, stage: int) -> dict[str, Any]:
    """Run on a rank: train with another optimizer, save, report by DeepSpeed's accessors."""
    engine = start_engine(foreign_config(kind, stage))
    if kind == "Muon":
        for name, p in engine.module.named_parameters():
            assert p.use_muon is models.is_matrix(name)
    train_steps(engine, models.global_batches(2))
    engine.save_checkpoint(folder)
    found = masters(engine)
    base = engine.optimizer.optimizer
    for name, p in engine.module.named_parameters():
        if kind == "Muon" and models.is_matrix(name):
            found[f"{name} momentum_buffer"] = builtin_momentum(engine, p, stage)
            continue
        for key in ("exp_avg", "exp_avg_sq"):
            # The built-in's groups differ in their keys, and DeepSpeed links those of the first.
            flat = kind == "Muon" and stage < 3
            whole = flat_state(base, p, key) if flat else safe_get_full_optimizer_state(p, key)
            found[f"{name} {key}"] = whole.clone()
    return {"states": found, "lr": base.param_groups[0]["lr"]}


def flat_state(base: Any, parameter: Any, key: str) -> Tensor:
    """A state of one parameter, from the flat leaf that its mapping points into; a collective."""
    whole = torch.zeros(parameter.numel())
    if parameter._hp_mapping is not None:
        mapping = parameter._hp_mapping
        at, part = mapping.hp_fragment_address, mapping.lp_fragment_address
        [leaf] = [
            leaf
            for group in base.param_groups
            for leaf in group["params"]
            if leaf.untyped_storage().data_ptr() == mapping.hp_fragment.untyped_storage().data_ptr()
        ]
        values = base.state[leaf][key][at.start : at.start + at.numel]
        whole[part.start : part.start + part.numel] = values
    torch.distributed.all_reduce(whole)
    return whole.view(parameter.shape)


def builtin_momentum(engine: Any, parameter: Any, stage: int) -> Tensor | None:
    """The built-in's momentum: whole on every holder at ZeRO-1/2, which its own order locates."""
    zero = engine.optimizer
    if stage == 3:
        return safe_get_full_optimizer_state(parameter, "momentum_buffer").clone()
    for index, group in enumerate(zero.params_in_partition):
        start = 0
        for member in group:
            if member is parameter:
                leaf = zero.optimizer.param_groups[index]["params"][0]
                buffer = zero.optimizer.state[leaf]["momentum_buffer"]
                return buffer[start : start + member.numel()].view(member.shape).clone()
            start += member.numel()
    return None


@pytest.mark.parametrize(
    ("kind", "stage", "target"),
    [
        ("Muon", 1, {"stage": 2}),
        ("Muon", 2, {"stage": 3}),
        ("Muon", 3, {"stage": 2}),
        ("AdamW", 2, {"stage": 3}),
        ("AdamW", 3, {"stage": 1}),
    ],
)
def test_another_optimizers_checkpoint_is_taken_over(
    kind: str, stage: int, target: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = ranks.run(2, save_foreign, folder=folder, kind=kind, stage=stage)
        out = ranks.run(3, load, folder=folder, shape=target)[0]
    expected: dict[str, Tensor] = {}
    for of_rank in saved:
        expected.update({n: t for n, t in of_rank["states"].items() if t is not None})
    for name, value in out["states"].items():
        # AdamW's exp_avg is the same running mean of gradients that momentum is.
        from_adam = kind == "AdamW" and name.endswith("momentum_buffer")
        source = name.replace("momentum_buffer", "exp_avg") if from_adam else name
        assert torch.equal(value, expected[source].to(value.dtype)), name
    assert out["steps"] == {2.0}
    own = {group["name"]: group for group in out["groups"]}
    assert own["muon"]["lr_ratio"] == 2.0
    assert own["adamw"]["weight_decay"] == 0.03
    assert own["muon"]["lr"] == saved[0]["lr"]


def save_and_convert(*, folder: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Run on a rank: save, convert on rank 0."""
    out = save(folder=folder, shape=shape)
    if torch.distributed.get_rank() == 0:
        assert to_universal(Path(folder), Path(folder) / "universal") == 23
        whole = get_fp32_state_dict_from_zero_checkpoint(folder)
        for name, value in whole.items():
            assert torch.equal(value, out["states"][name]), f"zero_to_fp32: {name}"
        assert whole.keys() == {n for n in out["states"] if " " not in n}
    torch.distributed.barrier()
    return out


@pytest.mark.parametrize(("stage", "target"), [(1, 3), (2, 1), (3, 2), (2, 0)])
def test_universal_round_trip(stage: int, target: int) -> None:
    universal = {"checkpoint": {"load_universal": True}}
    with tempfile.TemporaryDirectory() as folder:
        before = ranks.run(2, save_and_convert, folder=folder, shape={"stage": stage})[0]
        shape = {"stage": target, **universal}
        out = ranks.run(3, load, folder=folder, shape=shape)[0]
    assert out["path"] is not None
    for key in ("groups", "steps", "lr", "global_steps"):
        assert out[key] == before[key], key
    assert len({group["weight_decay"] for group in out["groups"]}) == 3
    for name, value in before["states"].items():
        assert torch.equal(out["states"][name], value), name
    assert out["weights follow"]


class WithFrozen(torch.nn.Module):
    """A frozen layer, a buffer and a trained one, all different in every run that is started."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(33, 21)
        self.trained = torch.nn.Linear(21, 35)
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.randn(33))

    def forward(self, tokens: Tensor) -> Tensor:
        grid = torch.arange(33, device=tokens.device)
        x = (torch.sin(tokens[:, :1] * (grid + 1) * 0.37) + self.shift).to(
            self.trained.weight.dtype
        )
        return self.trained(torch.tanh(self.frozen(x))).square().mean()


def frozen_run(*, folder: str, shape: dict[str, Any], seed: int, load: bool) -> dict[str, Any]:
    """Run on a rank: save one model's run, or load it into another's; whole values by name."""
    config = config_of(shape)
    torch.manual_seed(seed)
    module = WithFrozen()
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=config
    )
    if load:
        engine.load_checkpoint(folder)
    else:
        train_steps(engine, models.global_batches(2))
        engine.save_checkpoint(folder)
    found = {"shift": engine.module.shift.clone()}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().float().clone()
    return {"values": found, "scale": getattr(engine.optimizer, "loss_scale", None)}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ({"stage": 3}, {"stage": 2}),
        ({"stage": 1}, {"stage": 3, "hsdp": 1}),
        ({"stage": 2, "dtype": "fp16"}, {"stage": 3, "dtype": "fp16"}),
        ({"stage": 2, "dtype": "fp16"}, {"stage": 0, "dtype": "fp16"}),
        ({"stage": 0, "dtype": "fp16"}, {"stage": 1, "dtype": "fp16"}),
    ],
)
def test_what_no_optimizer_trains_moves_too(saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    if "dtype" in saved:
        fp16 = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 1}
        saved, loaded = {**saved, "fp16": fp16}, {**loaded, "fp16": fp16}
    with tempfile.TemporaryDirectory() as folder:
        before = ranks.run(2, frozen_run, folder=folder, shape=saved, seed=1, load=False)[0]
        for out in ranks.run(3, frozen_run, folder=folder, shape=loaded, seed=2, load=True):
            for name, value in before["values"].items():
                assert torch.equal(out["values"][name], value), name
            assert out["scale"] == before["scale"]
    if "dtype" in saved:
        assert before["scale"] > 64, "the scale has not grown"


def moved(*, folder: str, saved: dict[str, Any], loaded: dict[str, Any], **options: Any) -> Any:
    """Run on a rank: two saves, the first loaded into another run of this world; what it has."""
    engine = start_engine(config_of(saved))
    train_steps(engine, models.global_batches(2))
    engine.save_checkpoint(folder, tag="first")
    want = masters(engine)
    train_steps(engine, models.global_batches(1))
    engine.save_checkpoint(folder, tag="second")
    other = start_engine(config_of(loaded))
    try:
        other.load_checkpoint(folder, tag="first", **options)
    except (RuntimeError, ValueError) as error:
        return str(error)
    found = masters(other)
    train_steps(other, models.global_batches(1))
    after = masters(other)
    scaler = type(getattr(other.optimizer, "loss_scaler", None)).__name__
    return {
        "equal": all(torch.equal(found[n], want[n]) for n in want),
        "goes on": all(float((after[n] - found[n]).norm()) < 1.0 for n in want),
        "scaler": scaler,
    }


FP16 = {"dtype": "fp16", "fp16": {"enabled": True, "initial_scale_power": 4}}


@pytest.mark.parametrize(
    ("saved", "loaded", "options", "scaler"),
    [
        # At an unchanged shape DeepSpeed's own load takes `latest`, nothing, or rounded masters.
        ({"stage": 3, "dtype": "bf16"}, {"stage": 3, "dtype": "bf16"}, False, "LossScaler"),
        ({"stage": 2, "dtype": "bf16"}, {"stage": 2, "dtype": "bf16"}, False, "LossScaler"),
        ({"stage": 0, "dtype": "bf16"}, {"stage": 0, "dtype": "bf16"}, False, "NoneType"),
        # The loss scale of another precision is not this run's.
        ({"stage": 2}, {"stage": 2, **FP16}, True, "DynamicLossScaler"),
        ({"stage": 3, **FP16}, {"stage": 3}, True, "LossScaler"),
        ({"stage": 0, "dtype": "bf16"}, {"stage": 0}, True, "NoneType"),
    ],
)
def test_an_unchanged_shape_is_no_shortcut(
    saved: dict[str, Any], loaded: dict[str, Any], options: bool, scaler: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kwargs = {"saved": saved, "loaded": loaded, "load_optimizer_states": options}
        for out in ranks.run(2, moved, folder=folder, **kwargs):
            assert out == {"equal": True, "goes on": True, "scaler": scaler}


def overwritten(*, folder: str) -> bool:
    """Run on a rank: one tag, written at stage 3 and then at stage 2."""
    for stage in (3, 2):
        engine = start_engine(config_of({"stage": stage}))
        train_steps(engine, models.global_batches(stage))
        engine.save_checkpoint(folder, tag="one")
    other = start_engine(config_of({"stage": 1}))
    other.load_checkpoint(folder)
    found = masters(other)
    return all(torch.equal(found[n], value) for n, value in masters(engine).items())


def test_a_tag_of_another_shape_may_be_overwritten() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert all(ranks.run(2, overwritten, folder=folder))


def with_lambda(config: dict[str, Any]) -> tuple[Any, Any]:
    """An engine under torch's LambdaLR, as the HF Trainer makes it."""
    config.pop("scheduler", None)
    module = models.build("llama")
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=module.parameters(),
        config=config,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    )
    return engine, engine.lr_scheduler


def taken_over_with_lambda(*, folder: str, universal: bool) -> dict[str, Any]:
    """Run on a rank: AdamW with one group, continued by DMuon with three."""
    engine, _ = with_lambda(foreign_config("AdamW", 2))
    train_steps(engine, models.global_batches(2))
    engine.save_checkpoint(folder)
    config = config_of({"stage": 3})
    if universal:
        config["checkpoint"] = {"load_universal": True}
        if torch.distributed.get_rank() == 0:
            to_universal(Path(folder), Path(folder) / "universal")
        torch.distributed.barrier()
    other, _ = with_lambda(config)
    other.load_checkpoint(folder)
    before = [group["lr"] for group in other.basic_optimizer.param_groups]
    train_steps(other, models.global_batches(1))
    after = [group["lr"] for group in other.basic_optimizer.param_groups]
    return {"before": before, "after": after, "lr": engine.get_lr()[0]}


@pytest.mark.parametrize("universal", [False, True])
def test_a_scheduler_goes_on_with_other_groups(universal: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for out in ranks.run(2, taken_over_with_lambda, folder=folder, universal=universal):
            assert out["before"] == [out["lr"]] * 3
            assert out["after"] == [out["lr"] / 2] * 3


def other_scheduler(*, folder: str) -> str:
    """Run on a rank: saved under LambdaLR, loaded under WarmupLR."""
    engine, _ = with_lambda(config_of({"stage": 2}))
    engine.save_checkpoint(folder)
    try:
        start_engine(config_of({"stage": 2})).load_checkpoint(folder)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "loaded"


def test_a_scheduler_of_another_kind_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for text in ranks.run(2, other_scheduler, folder=folder):
            assert "of another kind than this run's WarmupLR" in text
