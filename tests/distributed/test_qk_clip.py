# SPDX-License-Identifier: Apache-2.0
"""QK-clip under ZeRO: parity with one float64 process, bits over ranks, skips, calls, metrics."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.test_parity import MATRIX_TOLERANCE, REST_TOLERANCE
from tests.harness import models, ranks, reference
from tests.harness.training import (
    counting_collectives,
    digest,
    ds_config,
    masters,
    start_engine,
    train_steps,
)

WIDTH, HEADS, KEYS, STEPS = 20, 4, 2, 3


def rotate(x: Tensor) -> Tensor:
    """Rotary positions of (batch, heads, length, 2 * pairs)."""
    position = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    angle = (position[:, None] / (1 + torch.arange(first.shape[-1]))).to(x.dtype)
    sin, cos = angle.sin(), angle.cos()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Biased(nn.Linear):
    """Linear with a large bias, drawn where zero.Init has not partitioned it yet."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.bias, std=0.5)


class Rotary(nn.Module):
    """Grouped attention with rotary positions and with biases on queries and keys (Qwen2)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj = Biased(width, HEADS * 6), Biased(width, KEYS * 6)
        self.v_proj = nn.Linear(width, KEYS * 6, bias=False)
        self.o_proj = nn.Linear(HEADS * 6, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, 6)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q), rotate(k)
        self.attended = (q.detach(), k.detach())
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Clipped(models.LlamaLike):
    """LlamaLike with that attention."""

    layers_of_blocks, recompute = 2, None

    def __init__(self) -> None:
        with mock.patch.object(models, "Attention", Rotary):
            super().__init__(width=WIDTH, layers=self.layers_of_blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens[:, :-1])
        for layer in self.layers:
            if self.recompute is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.recompute)
        logits = self.lm_head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class OneLayer(Clipped):
    layers_of_blocks = 1


class Recomputed(Clipped):
    recompute = False


class RecomputedReentrant(Clipped):
    recompute = True


MODELS = {c.__name__: c for c in (Clipped, OneLayer, Recomputed, RecomputedReentrant)}


def largest_of(attention: Rotary) -> Tensor:
    """(heads,) largest causal logits of the last forward, all at once."""
    q, k = attention.attended
    logits = q @ k.repeat_interleave(HEADS // KEYS, dim=1).mT / math.sqrt(6)
    return logits.masked_fill(torch.ones(logits.shape[-2:]).tril() == 0, -math.inf).amax((0, 2, 3))


@lru_cache
def expected(tau: float) -> tuple[dict[str, Tensor], dict[str, Tensor], list[list[float]]]:
    """Start and end of a float64 run in one process, and each step's largest logits."""
    seen: list[list[float]] = []

    def clip(model: Any) -> None:
        seen.append([])
        for layer in model.layers:
            attention = layer.attention
            largest = largest_of(attention).tolist()
            seen[-1] += largest
            gamma = [min(1.0, tau / s) if s > 0 else 1.0 for s in largest]
            for key in range(KEYS):
                own = range(2 * key, 2 * key + 2)
                shared = math.sqrt(min(gamma[h] for h in own))
                for p in (attention.k_proj.weight, attention.k_proj.bias):
                    p[6 * key : 6 * key + 6] *= shared
                for h in own:
                    for p in (attention.q_proj.weight, attention.q_proj.bias):
                        p[6 * h : 6 * h + 6] *= gamma[h] / shared

    with mock.patch.object(models, "LlamaLike", Clipped):
        start = {n: p.detach().clone() for n, p in models.build("llama").named_parameters()}
        settings = reference.Settings(clip=0.5)
        batches = models.global_batches(STEPS)
        end = reference.train(models.build("llama"), batches, models.is_matrix, settings, clip)
    return start, end, seen


def middle_tau() -> float:
    """Above some heads' largest logits in every step, and below others'."""
    return sorted(expected(math.inf)[2][0])[4]


def train(
    *,
    stage: int,
    tau: float | None,
    model: str = "Clipped",
    dtype: str = "fp32",
    zero_init: bool = False,
    params: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run on a rank."""
    clip = {} if tau is None else {"qk_clip": {"tau": tau}, "metrics": {"every": 1}}
    params = {"lr": 1e-2, "ns_dtype": "fp32", **clip, **(params or {})}
    config = ds_config(stage, params=params, clip=0.5, accumulation=2, dtype=dtype, zero=zero)
    with mock.patch.object(models, "LlamaLike", MODELS[model]):
        engine = start_engine(config, zero_init=zero_init)
    seen = []
    with counting_collectives() as counts:
        for batch in models.global_batches(STEPS):
            train_steps(engine, [batch])
            stats = engine.basic_optimizer.last_stats
            seen.append(0.0 if stats is None else stats.scalars()["max_attention_logit"])
        calls = counts["calls"]["all_reduce"]
    engine.eval()
    engine(batch[:2])
    found = masters(engine)
    live = {n: p.detach().float() for n, p in engine.module.named_parameters()}
    cast = {n: t.to(torch.bfloat16).float() for n, t in found.items()}
    return {
        "masters": found if torch.distributed.get_rank() == 0 else None,
        "digest": digest(found),
        "live": stage == 3 or dtype == "fp32" or all(torch.equal(live[n], cast[n]) for n in cast),
        "seen": seen,
        "calls": calls,
    }


def require_parity(out: list[dict[str, Any]], tau: float) -> None:
    start, end, seen = expected(tau)
    found = out[0]["masters"]
    for matrices, tolerance in ((True, MATRIX_TOLERANCE), (False, REST_TOLERANCE)):
        names = [n for n in end if models.is_matrix(n) is matrices]
        error = reference.update_error(found, end, start, names)
        unclipped = reference.update_error(expected(math.inf)[1], end, start, names)
        print(f"matrices={matrices}: {error:.1e}, without clipping {unclipped:.1e}")
        assert error < tolerance < unclipped / 30
    assert len({o["digest"] for o in out}) == 1
    for o in out:
        assert o["seen"] == pytest.approx([max(s) for s in seen], rel=1e-4)


CELLS: list[tuple[int, dict[str, Any]]] = [
    (2, {"stage": 0}),
    (3, {"stage": 1}),
    (2, {"stage": 2, "params": {"hide_param_gather": True}}),
    (3, {"stage": 3, "zero": {"sub_group_size": 300}}),
    (2, {"stage": 3, "zero_init": True}),
    (2, {"stage": 3, "model": "RecomputedReentrant"}),
    (2, {"stage": 2, "model": "Recomputed", "params": {"verify_every": 1}}),
]


@pytest.mark.parametrize(("world", "cell"), CELLS)
def test_parity_with_one_process(world: int, cell: dict[str, Any]) -> None:
    tau = middle_tau()
    require_parity(ranks.run(world, train, tau=tau, **cell), tau)


@pytest.mark.parametrize(("world", "cell"), CELLS[:4])
def test_a_tau_out_of_reach_changes_no_bit_and_costs_one_call(
    world: int, cell: dict[str, Any]
) -> None:
    plain, huge = (ranks.run(world, train, tau=t, **cell) for t in (None, 1e9))
    assert {o["digest"] for o in huge} == {o["digest"] for o in plain}
    # Recording a step gathers, it does not reduce.
    assert [o["calls"] for o in huge] == [o["calls"] + STEPS for o in plain]


def test_projections_in_both_halves_and_in_parts() -> None:
    """Which half trains a projection, or as how many matrices, is nothing to the clip."""
    params = {"exclude": ["*q_proj*"], "split": {"*k_proj.weight": {"heads": KEYS}}}
    params["hsdp"] = {"shard_size": 2}
    out = ranks.run(4, train, stage=3, tau=middle_tau(), params=params)
    plain = ranks.run(4, train, stage=3, tau=None, params=params)
    assert len({o["digest"] for o in out}) == 1
    assert out[0]["digest"] != plain[0]["digest"]
    clipped = ranks.run(2, train, stage=1, tau=middle_tau(), params={**params, "hsdp": None})
    # Other orders of sums.
    for name, master in out[0]["masters"].items():
        torch.testing.assert_close(master, clipped[0]["masters"][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stage", [2, 3])
def test_updates_of_other_replicas_are_scaled_too(stage: int) -> None:
    tau = middle_tau()
    hidden, plain = (
        ranks.run(
            4,
            train,
            stage=stage,
            tau=tau,
            params={"hsdp": {"shard_size": 2, "publish": publish}},
        )
        for publish in ("async", "sync")
    )
    require_parity(hidden, tau)
    assert {o["digest"] for o in hidden} == {o["digest"] for o in plain}


@pytest.mark.parametrize("stage", [1, 3])
def test_low_precision_weights_are_the_scaled_ones(stage: int) -> None:
    out = ranks.run(2, train, stage=stage, tau=middle_tau(), dtype="bf16")
    assert all(o["live"] for o in out) and len({o["digest"] for o in out}) == 1
    # Logits and weights have 8 bits.
    assert out[0]["seen"] == pytest.approx([max(s) for s in expected(middle_tau())[2]], rel=0.05)


def bounded(*, stage: int) -> list[float]:
    """Run on a rank: largest logits of equal batches, where nothing but QK-clip changes weights."""
    params = {"lr": 0.0, "qk_clip": {"tau": 0.2}}
    with mock.patch.object(models, "LlamaLike", OneLayer):
        engine = start_engine(ds_config(stage, params=params, accumulation=2))
    found = []
    for _ in range(2):
        train_steps(engine, models.global_batches(1))
        found.append(engine.basic_optimizer.binding.clip.largest())
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_after_a_step_no_logit_of_its_batch_exceeds_tau(stage: int) -> None:
    for before, after in ranks.run(2, bounded, stage=stage):
        assert before > 0.4
        # Rounding of two scaled rows and their product, to fp32.
        assert after == pytest.approx(0.2, rel=1e-5)


def overflow(*, stage: int) -> dict[str, Any]:
    """Run on a rank: a step of large logits that is skipped, then an ordinary one."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    params = {"lr": 0.0, "qk_clip": {"tau": 0.2}}
    with mock.patch.object(models, "LlamaLike", OneLayer):
        engine = start_engine(ds_config(stage, params=params, dtype="fp16", fp16=fp16))
    clip = engine.basic_optimizer.binding.clip
    named = dict(engine.module.named_parameters())
    before = masters(engine)
    poison = named["norm.weight"].register_hook(
        lambda g: torch.full_like(g, float("inf")) if torch.distributed.get_rank() == 1 else g
    )
    loud = engine.module.layers[0].attention.register_forward_pre_hook(lambda m, x: (x[0] * 5,))
    train_steps(engine, models.global_batches(1))
    poison.remove()
    loud.remove()
    after, skipped = masters(engine), engine.skipped_steps
    train_steps(engine, models.global_batches(1))
    attention = engine.module.layers[0].attention
    seen = largest_of(attention).max()
    torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
    return {
        "skipped": skipped,
        "kept": all(torch.equal(before[n], after[n]) for n in before),
        "later": clip.largest() / float(seen),
        "clipped_later": any(not torch.equal(after[n], m) for n, m in masters(engine).items()),
    }


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_skipped_step_clips_nothing_and_is_forgotten(stage: int) -> None:
    for out in ranks.run(2, overflow, stage=stage):
        assert out.pop("later") == pytest.approx(1.0, rel=1e-2)  # fp16
        assert out == {"skipped": 1, "kept": True, "clipped_later": True}


def refused() -> str:
    """Run on a rank: a model without attention."""
    try:
        start_engine(ds_config(2, params={"lr": 1e-2, "qk_clip": {}}), model="mlp")
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_model_without_attention_is_refused() -> None:
    assert all("q_proj and k_proj" in text for text in ranks.run(2, refused))
