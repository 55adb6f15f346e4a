# SPDX-License-Identifier: Apache-2.0
"""hide_param_gather: the same bits, the same elements, and waits inside the next forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ds_muon.zero.parameters.hidden_gather as hidden_gather
from tests.harness import models, ranks
from tests.harness.training import (
    counting_collectives,
    digest,
    ds_config,
    masters,
    start_engine,
    train_steps,
)


class Borrowing(models.LlamaLike):
    """The first block's output projection is also read by the embedding's caller, before its own
    module is called, and one module is never called at all."""

    def __init__(self) -> None:
        super().__init__()
        self.unused_call = nn.Linear(33, 33, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens[:, :-1])
        x = x + 0.1 * nn.functional.linear(x, self.layers[1].attention.o_proj.weight)
        x = x + 0.1 * nn.functional.linear(x, self.unused_call.weight)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def trained(
    *, stage: int, hide: bool, dtype: str = "fp32", kind: str = "plain", **zero: Any
) -> dict[str, Any]:
    """Run on a rank: five steps with two micro-batches each, and what the last step moved."""
    params = {"lr": 1e-2, "hide_param_gather": hide}
    config = ds_config(stage, params=params, dtype=dtype, accumulation=2, zero=zero, clip=0.5)
    model = {"plain": models.LlamaLike, "borrowing": Borrowing}[kind]
    with mock.patch.object(models, "LlamaLike", model):
        engine = start_engine(config)
    train_steps(engine, models.global_batches(4))
    own = models.global_batches(5)[4].chunk(engine.world_size)[torch.distributed.get_rank()]
    losses = []
    for micro in own.chunk(2):
        loss = engine(micro)
        losses.append(float(loss))
        engine.backward(loss)
        with counting_collectives() as counts:
            engine.step()
    weights = {n: p.detach().clone() for n, p in engine.module.state_dict().items()}
    return {
        "digest": digest(masters(engine)),
        "weights": digest(weights),
        "losses": losses,
        "calls": dict(counts["calls"]),
        "gathered": counts["elements"]["broadcast"] + counts["elements"]["all_gather_into_tensor"],
        "numel": sum(p.numel() for p in engine.module.parameters()),
    }


@pytest.mark.parametrize("kind", ["plain", "borrowing"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_hiding_does_not_change_a_bit(stage: int, dtype: str, kind: str) -> None:
    runs = [
        ranks.run(3, trained, stage=stage, hide=hide, dtype=dtype, kind=kind)
        for hide in (False, True)
    ]
    for key in ("digest", "weights"):
        assert len({o[key] for out in runs for o in out}) == 1
    assert [o["losses"] for o in runs[0]] == [o["losses"] for o in runs[1]]


@pytest.mark.parametrize("bucket", [5e8, 500])
def test_every_rank_receives_what_the_gather_would_bring(bucket: float) -> None:
    shown = ranks.run(4, trained, stage=2, hide=False)
    hidden = ranks.run(4, trained, stage=2, hide=True, allgather_bucket_size=bucket)
    assert "all_gather_into_tensor" in shown[0]["calls"]
    assert all("all_gather_into_tensor" not in o["calls"] for o in hidden)
    total = sum(o["gathered"] for o in hidden)
    # 3 N elements of every parameter, but for ZeRO's padding at the ends of its groups.
    assert 3 * hidden[0]["numel"] <= total <= sum(o["gathered"] for o in shown)
    assert (hidden[0]["calls"]["broadcast"] > 20) is (bucket == 500)


def traced(*, stage: int) -> list[str]:
    """Run on a rank: events of one step and the forward after it."""
    engine = start_engine(ds_config(stage, params={"lr": 1e-2, "hide_param_gather": True}))
    batches = models.global_batches(3)
    train_steps(engine, batches[:1])
    events: list[str] = []
    real_wait, real_broadcast = hidden_gather.HiddenGather.wait, engine.optimizer.step

    def wait(self: Any, slices: Any = None) -> None:
        waiting = [s for s in (self._order if slices is None else slices) if s in self._open]
        if waiting:
            events.append(f"wait for {len(waiting)}")
        real_wait(self, slices)

    for name, module in engine.module.named_modules():
        module.register_forward_hook(lambda *_, name=name: events.append(f"after {name}"))
    own = batches[1].chunk(engine.world_size)[torch.distributed.get_rank()]
    with mock.patch.object(hidden_gather.HiddenGather, "wait", wait):
        engine.backward(engine(own))
        events.clear()
        real_broadcast()
        events.append("step returned")
        engine.optimizer.zero_grad()
        engine(own)
    return events


@pytest.mark.parametrize("stage", [1, 2])
def test_waits_happen_inside_the_next_forward(stage: int) -> None:
    for events in ranks.run(3, traced, stage=stage):
        assert events[0] == "step returned", "the step waits for nothing"
        waits = [i for i, e in enumerate(events) if e.startswith("wait")]
        first_module = next(i for i, e in enumerate(events) if e.startswith("after"))
        assert waits[0] == 1 < first_module, "the first module waits for its own"
        assert waits[-1] > first_module, "a later module waits later"


class Switching(models.LlamaLike):
    """Outside training a weight is used early, by another module than its own."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens[:, :-1])
        if not self.training:
            x = x + 0.1 * nn.functional.linear(x, self.layers[1].attention.o_proj.weight)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def evaluated(*, hide: bool, hsdp: bool) -> tuple[list[float], str]:
    """Run on a rank: losses of an evaluation right after each step."""
    params: dict[str, Any] = {"lr": 1e-2, "hide_param_gather": hide}
    if hsdp:
        params["hsdp"] = {"shard_size": 2}
    # Small slices, so that waiting for one is not waiting for all.
    config = ds_config(2, params=params, zero={"allgather_bucket_size": 300})
    with mock.patch.object(models, "LlamaLike", Switching):
        engine = start_engine(config)
    losses = []
    for batch in models.global_batches(4):
        train_steps(engine, [batch])
        engine.eval()
        with torch.no_grad():
            losses.append(float(engine(batch[:2])))
        engine.train()
    return losses, digest(masters(engine))


@pytest.mark.parametrize("hsdp", [False, True])
def test_a_forward_may_take_another_path_than_the_first(hsdp: bool) -> None:
    shown, hidden = (ranks.run(4, evaluated, hide=hide, hsdp=hsdp) for hide in (False, True))
    assert shown == hidden


def moved(*, how: str, hide: bool, hsdp: bool) -> str:
    """Run on a rank: weights are moved or replaced right after a step."""
    params: dict[str, Any] = {"lr": 1e-2, "hide_param_gather": hide}
    if hsdp:
        params["hsdp"] = {"shard_size": 2}
    engine = start_engine(ds_config(2, params=params, clip=0.5))
    batches = models.global_batches(5)
    train_steps(engine, batches[:1])
    kept = {k: v.clone() for k, v in engine.module.state_dict().items()}
    for batch in batches[1:3]:
        train_steps(engine, [batch])
        if how == "offloaded":
            engine.offload_states()
            engine.reload_states()
    if how == "replaced":
        engine.module.load_state_dict(kept)
        engine.optimizer.refresh_fp32_params()
        train_steps(engine, batches[:1])
    return digest(masters(engine))


@pytest.mark.parametrize("how", ["offloaded", "replaced"])
@pytest.mark.parametrize("hsdp", [False, True])
def test_weights_may_be_moved_and_replaced_between_steps(how: str, hsdp: bool) -> None:
    digests = {
        d for hide in (False, True) for d in ranks.run(4, moved, how=how, hide=hide, hsdp=hsdp)
    }
    assert len(digests) == 1


def saved(*, folder: str) -> tuple[str, str]:
    """Run on a rank: weights are read right after a step, without a forward between."""
    engine = start_engine(ds_config(2, params={"lr": 1e-2, "hide_param_gather": True}))
    train_steps(engine, models.global_batches(2))
    state = engine.module.state_dict()
    whole = digest({n: p.clone() for n, p in state.items()})
    train_steps(engine, models.global_batches(1))
    engine.save_checkpoint(folder)
    file = torch.load(next(Path(folder).rglob("mp_rank_00*")), weights_only=False)
    expected = masters(engine)
    same = all(torch.equal(file["module"][n], expected[n]) for n in expected)
    return whole, str(same)


def test_weights_are_whole_wherever_they_are_read(tmp_path: Path) -> None:
    out = ranks.run(3, saved, folder=str(tmp_path))
    assert len({whole for whole, _ in out}) == 1
    assert {same for _, same in out} == {"True"}


def refused(*, stage: int, dtype: str, extra: dict[str, Any]) -> str:
    """Run on a rank: the key where there is no such gather."""
    with pytest.raises((ValueError, RuntimeError)) as caught:
        start_engine(ds_config(stage, params={"hide_param_gather": True}, dtype=dtype, **extra))
    return str(caught.value)


@pytest.mark.parametrize(
    ("stage", "dtype", "extra"),
    [
        (0, "fp32", {}),
        (3, "fp32", {}),
        (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
    ],
)
def test_it_needs_zero_1_or_2(stage: int, dtype: str, extra: dict[str, Any]) -> None:
    for error in ranks.run(2, refused, stage=stage, dtype=dtype, extra=extra):
        assert "hide_param_gather" in error and "remove the key" in error
