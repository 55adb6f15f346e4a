# SPDX-License-Identifier: Apache-2.0
"""HSDP: parity, bits over replicas and settings, elements per axis, and when updates travel."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state

import ds_muon.run.step as step_module
from ds_muon.zero.hsdp import step as hsdp_step
from tests.distributed.test_lifetimes import MODELS
from tests.distributed.test_parity import (
    BF16_TOLERANCE,
    MATRIX_TOLERANCE,
    REST_TOLERANCE,
    errors,
    train,
)
from tests.grid import FULL_GRID
from tests.harness import models, ranks, reference
from tests.harness.training import (
    counting_collectives,
    digest,
    ds_config,
    masters,
    start_engine,
    train_steps,
)

SHAPES = [(4, 2), (6, 2), (6, 3)]  # ranks, ranks per row: 2x2, 3x2 and 2x3
BARE = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def hsdp(shard_size: int, publish: str = "async", **params: Any) -> dict[str, Any]:
    return {"lr": 1e-2, "hsdp": {"shard_size": shard_size, "publish": publish}, **params}


@pytest.mark.parametrize(("stage", "zero_init"), [(1, False), (2, False), (3, False), (3, True)])
@pytest.mark.parametrize(("world", "shard_size"), SHAPES)
def test_parity_with_one_process(world: int, shard_size: int, stage: int, zero_init: bool) -> None:
    out = ranks.run(
        world,
        train,
        stage=stage,
        zero_init=zero_init,
        clip=0.5,
        accumulation=2,
        params=hsdp(shard_size),
    )
    matrices, rest = errors(out[0]["masters"], settings=reference.Settings(clip=0.5))
    print(f"{world // shard_size}x{shard_size} stage {stage}: {matrices:.2e}, rest {rest:.2e}")
    assert matrices < MATRIX_TOLERANCE and rest < REST_TOLERANCE
    assert len({o["digest"] for o in out}) == 1
    assert sum(o["ns_calls"] for o in out) == 14 * 3, "once per matrix and step in the world"
    assert len({float(o["norm"]) for o in out}) == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_norm_is_that_of_the_whole_batch(stage: int) -> None:
    """Muon, and AdamW nearly, forget a gradient's scale, and clipping does; the norm does not."""
    plain, replicated = (
        float(ranks.run(4, train, stage=stage, params=params)[0]["norm"])
        for params in ({}, hsdp(2))
    )
    # Sums in another order.
    assert replicated == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [2, 3])
def test_parity_in_low_precision(stage: int, dtype: str) -> None:
    extra = {"fp16": {"enabled": True, "loss_scale": 128}} if dtype == "fp16" else {}
    params = hsdp(2, ns_dtype=None)
    out = ranks.run(4, train, stage=stage, dtype=dtype, clip=0.5, params=params, **extra)
    matrices, rest = errors(out[0]["masters"], settings=reference.Settings(clip=0.5))
    print(f"{dtype} stage {stage}: {matrices:.2e}, rest {rest:.2e}")
    assert matrices < BF16_TOLERANCE and rest < BF16_TOLERANCE
    assert len({o["digest"] for o in out}) == 1


@pytest.mark.parametrize("stage", [1, 3])
def test_a_row_of_one_rank(stage: int) -> None:
    out = ranks.run(2, train, stage=stage, clip=0.5, params=hsdp(1, hide_param_gather=stage == 1))
    matrices, rest = errors(out[0]["masters"], settings=reference.Settings(clip=0.5))
    assert matrices < MATRIX_TOLERANCE and rest < REST_TOLERANCE
    assert len({o["digest"] for o in out}) == 1


def test_one_row_is_no_hsdp() -> None:
    plain, one_row = (
        ranks.run(2, train, stage=2, params=params)[0]["digest"] for params in ({}, hsdp(2))
    )
    assert plain == one_row


def local_digests(
    *,
    stage: int,
    params: dict[str, Any],
    steps: int = 5,
    dtype: str = "fp32",
    zero: dict[str, Any] | None = None,
    kind: str = "plain",
) -> list[str]:
    """Run on a rank: hashes of this rank's master weights before every step.

    After a forward and a backward everything was needed, so that every update has been applied.
    """
    # Updates are applied after the scheduler has moved on, with the lr of their step.
    scheduler = {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 1e-3,
            "warmup_max_lr": 2e-2,
            "warmup_num_steps": steps,
            "warmup_type": "linear",
        },
    }
    config = ds_config(
        stage,
        params=params,
        dtype=dtype,
        clip=0.5,
        accumulation=2,
        zero=zero,
        scheduler=scheduler,
    )
    with mock.patch.object(models, "LlamaLike", MODELS[kind]):
        engine = start_engine(config)
    leaves = {str(i): leaf for i, leaf in enumerate(engine.basic_optimizer.binding.leaves)}
    found = []
    step = engine.optimizer.step

    def hashed_step(closure: None = None) -> None:
        found.append(digest(leaves))
        step(closure)

    engine.optimizer.step = hashed_step
    train_steps(engine, models.global_batches(steps))
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("world", "shard_size"), SHAPES)
def test_replicas_stay_equal_after_every_step(world: int, shard_size: int, stage: int) -> None:
    steps = (50 if world == 4 else 8) if FULL_GRID else 16
    out = ranks.run(world, local_digests, stage=stage, params=hsdp(shard_size), steps=steps)
    assert all(len(set(o)) == steps for o in out)
    for rank in range(world):
        assert out[rank] == out[rank % shard_size]
    assert out[0] != out[1]


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (2, "fp32"), (2, "bf16")])
def test_publishing_and_hiding_change_no_bit(stage: int, dtype: str) -> None:
    runs = [
        ranks.run(
            6,
            local_digests,
            stage=stage,
            dtype=dtype,
            params=hsdp(3, publish, hide_param_gather=hide, max_inflight_buckets=inflight),
            zero={"allgather_bucket_size": bucket},
        )
        for publish, hide, bucket, inflight in (
            ("sync", False, 5e8, 1),
            ("async", False, 5e8, 2),
            ("async", True, 5e8, 1),
            ("async", True, 500, 1),
            ("sync", True, 500, 1),
        )
    ]
    assert all(run == runs[0] for run in runs)


# Every pair of values of two keys is in one of these.
CELLS = [
    ("sync", None, "shards", {}),
    ("async", None, "owner_broadcast", BARE),
    # Prefetch meets updates that are under way.
    ("async", True, "shards", {**BARE, "stage3_prefetch_bucket_size": 5000}),
    ("sync", True, "owner_broadcast", BARE),
    ("async", False, "owner_broadcast", {}),
    ("sync", False, "shards", BARE),
    ("async", False, "shards", {"sub_group_size": 700, "stage3_param_persistence_threshold": 0}),
]


@pytest.mark.parametrize(("dtype", "cells"), [("fp32", CELLS), ("bf16", CELLS[3:])])
def test_publishing_lifetimes_and_sources_change_no_bit(
    dtype: str, cells: list[tuple[Any, ...]]
) -> None:
    runs = [
        ranks.run(
            4,
            local_digests,
            stage=3,
            dtype=dtype,
            params=hsdp(2, publish, reshard_after_forward=reshard, param_source=source),
            zero=zero,
        )
        for publish, reshard, source, zero in cells
    ]
    # A small sub_group_size makes other leaves, so its hashes are compared among replicas only.
    assert all(run == runs[0] for run in runs[:-1])
    assert runs[-1][0] == runs[-1][2]


@pytest.mark.parametrize("kind", [k for k in MODELS if k != "plain"])
def test_checkpointed_and_repeated_modules_change_no_bit(kind: str) -> None:
    sync, hidden = (
        ranks.run(4, local_digests, stage=3, kind=kind, params=params, zero=zero)
        for params, zero in (
            (hsdp(2, "sync"), {}),
            (hsdp(2, reshard_after_forward=False, param_source="owner_broadcast"), BARE),
        )
    )
    assert sync == hidden


def memory() -> dict[str, Any]:
    """Run on a rank: elements of momentum, and what the optimizer's state has of it."""
    engine = start_engine(ds_config(2, params=hsdp(2)))
    train_steps(engine, models.global_batches(2))
    optimizer = engine.basic_optimizer
    muon = [leaf for leaves in optimizer.binding.leaf_sets for leaf in leaves]
    return {
        "momentum": sum(b.numel() for b in optimizer.binding.spread.buffers),
        "in_state": [key for leaf in muon for key in optimizer.state[leaf]],
    }


def test_momentum_stands_in_the_owning_row_only() -> None:
    out = ranks.run(4, memory)
    matrices = sum(
        p.numel() for n, p in models.build("llama").named_parameters() if models.is_matrix(n)
    )
    assert sum(o["momentum"] for o in out) == matrices
    assert all(o["in_state"] == [] for o in out)


def traffic(*, stage: int, shard_size: int) -> dict[str, Any]:
    """Run on a rank: elements of one optimizer step by axis, and this rank's padded elements."""
    engine = start_engine(ds_config(stage, params=hsdp(shard_size), accumulation=2, zero=BARE))
    batches = models.global_batches(3)
    train_steps(engine, batches[:1])
    engine.optimizer.basic = None
    rank, world = torch.distributed.get_rank(), engine.world_size
    own = batches[1].chunk(world)[rank].chunk(2)
    with counting_collectives() as counts:
        for micro in own:
            engine.backward(engine(micro))
            engine.step()
        engine(batches[2].chunk(world)[rank].chunk(2)[0])
    binding = engine.basic_optimizer.binding
    start = rank - rank % shard_size
    row = tuple(range(start, start + shard_size))
    column = tuple(range(rank % shard_size, world, shard_size))
    return {
        "column": counts["groups"][column],
        "row": counts["groups"][row],
        "rest_held": sum(leaf.numel() for leaf in binding.adamw_leaves),
        "exchange": sum(p.received_numel()[rank % shard_size] for p in binding.engine.plans),
    }


@pytest.mark.parametrize(("world", "shard_size"), SHAPES)
@pytest.mark.parametrize("stage", [2, 3])
def test_elements_per_axis_are_the_formulas(stage: int, world: int, shard_size: int) -> None:
    out = ranks.run(world, traffic, stage=stage, shard_size=shard_size)
    named = dict(models.build("llama").named_parameters())
    numel = {n: p.numel() for n, p in named.items()}
    matrices = sum(k for n, k in numel.items() if models.is_matrix(n))
    replicas = world // shard_size
    share, parts = (replicas - 1) / replicas, (shard_size - 1) / shard_size
    # Matrices: reduced to one replica and published from it. The rest: all-reduced.
    expected = world * 2 * share * matrices / shard_size + sum(
        2 * share * o["rest_held"] for o in out
    )
    # Beside these a column carries ZeRO's flags and norms: a few elements.
    found = sum(o["column"] for o in out)
    assert expected <= found < expected + 20 * world
    # Rows: as ZeRO over `shard_size` ranks. Two micro-batches reduce gradients (U), stage 3 gathers
    # twice in each and once in the next forward, stage 2 gathers once.
    every = sum(numel.values())
    legs = {2: 2 * parts + parts, 3: 2 * parts + 5 * parts}[stage] * every
    expected = world * legs + sum(o["exchange"] for o in out)
    found = sum(o["row"] for o in out)
    # ZeRO pads parameters (3) or groups (2) to the row.
    assert expected <= found < expected * 1.02
    print(f"stage {stage} {replicas}x{shard_size}: rows {found / world:.0f} elements per rank")


def events(*, stage: int) -> list[str]:
    """Run on a rank: what happens in one step and the forward after it."""
    zero = {**BARE, "sub_group_size": 1700} if stage == 3 else {}
    engine = start_engine(ds_config(stage, params=hsdp(2, hide_param_gather=stage < 3), zero=zero))
    batches = models.global_batches(4)
    train_steps(engine, batches[:1])
    publisher = engine.basic_optimizer.binding.engine.publisher
    trace: list[str] = []

    class Traced:
        def __init__(self, real: Any) -> None:
            self._real = real

        def wait(self) -> None:
            trace.append("wait")
            self._real.wait()

    broadcast = publisher._transport.broadcast

    def traced_broadcast(tensor: torch.Tensor, *, source: int) -> Traced:
        trace.append("issue")
        return Traced(broadcast(tensor, source=source))

    orthogonalize = step_module.orthogonalize_into

    def traced_orthogonalize(*args: Any) -> torch.Tensor:
        result = orthogonalize(*args)
        trace.append("ns")
        return result

    rank = torch.distributed.get_rank()
    own = batches[1].chunk(engine.world_size)[rank]
    engine.backward(engine(own))
    with (
        mock.patch.object(publisher._transport, "broadcast", traced_broadcast),
        mock.patch.object(step_module, "orthogonalize_into", traced_orthogonalize),
    ):
        engine.step()
    trace.append("step returned")
    for name, module in engine.module.named_modules():
        module.register_forward_hook(lambda *_, name=name: trace.append(f"after {name}"))
    engine(batches[2].chunk(engine.world_size)[rank])
    return trace


def test_updates_travel_under_the_step_and_the_next_forward() -> None:
    for trace in ranks.run(4, events, stage=3):
        last_ns = max(i for i, e in enumerate(trace) if e == "ns")
        assert trace.index("issue") < last_ns, "a first bucket leaves before the last is iterated"
        returned = trace.index("step returned")
        waits = [i for i, e in enumerate(trace) if e == "wait"]
        assert waits and min(waits) > returned, "the step waits for nothing"
        assert len(waits) == trace.count("issue")
        first = next(i for i, e in enumerate(trace) if e.startswith("after "))
        assert max(waits) > first, "a later module waits later"


@pytest.mark.parametrize("stage", [1, 2])
def test_hiding_the_gather_hides_publishing_too(stage: int) -> None:
    for trace in ranks.run(4, events, stage=stage):
        waits = [i for i, e in enumerate(trace) if e == "wait"]
        assert waits and min(waits) > trace.index("step returned")


def switched(*, late_rank: int | None) -> list[bool]:
    """Run on a rank: whether publishing is hidden, after each step."""
    engine = start_engine(ds_config(3, params=hsdp(2), zero=BARE))
    publisher = engine.basic_optimizer.binding.engine.publisher
    step = engine.basic_optimizer.step

    def late_step(closure: None = None) -> None:
        if torch.distributed.get_rank() == late_rank:
            time.sleep(0.5)
        step(closure)

    engine.basic_optimizer.step = late_step
    found = []
    for batch in models.global_batches(7):
        train_steps(engine, [batch])
        found.append(publisher.hidden)
    return found


def test_all_ranks_fall_back_on_the_same_step() -> None:
    out = ranks.run(4, switched, late_rank=3)
    assert all(o == out[0] for o in out)
    assert out[0][: hsdp_step.WAITED_STEPS] == [True] * hsdp_step.WAITED_STEPS
    assert out[0][-1] is False
    assert out[0] == sorted(out[0], reverse=True), "nobody switches back"


def overflow(*, stage: int) -> dict[str, Any]:
    """Run on a rank: step 2 of 4 meets an infinite gradient on rank 3, in replica 1 only."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = start_engine(ds_config(stage, params=hsdp(2), dtype="fp16", fp16=fp16))
    batches = models.global_batches(4)
    train_steps(engine, batches[:1])
    before = masters(engine)
    named = dict(engine.module.named_parameters())
    poison = [
        named[name].register_hook(
            lambda g: torch.full_like(g, float("inf")) if torch.distributed.get_rank() == 3 else g
        )
        for name in ("layers.1.up_proj.weight", "norm.weight")[stage % 2 :]
    ]
    train_steps(engine, batches[1:2])
    for hook in poison:
        hook.remove()
    after, skipped = masters(engine), engine.skipped_steps
    train_steps(engine, batches[2:])
    return {
        "same": digest(before) == digest(after),
        "skipped": skipped,
        "later": engine.skipped_steps - skipped,
        "digest": digest(masters(engine)),
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overflow_in_one_replica_is_skipped_by_all(stage: int) -> None:
    out = ranks.run(4, overflow, stage=stage)
    assert all(o["same"] and o["skipped"] == 1 and o["later"] == 0 for o in out)
    assert len({o["digest"] for o in out}) == 1


def modified(*, zero_init: bool, modifier_rank: int) -> dict[str, Any]:
    """Run on a rank: one rank of the world writes a weight, before and after the engine exists."""
    config = ds_config(3, params=hsdp(2, param_source="owner_broadcast"), zero=BARE)
    context = deepspeed.zero.Init(config_dict_or_path=config) if zero_init else None
    if context is not None:
        with context:
            module = models.build("llama")
        weight = module.layers[0].up_proj.weight
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                weight.data.fill_(0.25)
    else:
        module = models.build("llama")
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=config
    )
    train_steps(engine, models.global_batches(1))
    weight = module.layers[1].up_proj.weight
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=modifier_rank):
        if torch.distributed.get_rank() == modifier_rank:
            weight.data.fill_(0.5)
    with deepspeed.zero.GatheredParameters([weight, module.layers[0].up_proj.weight]):
        seen = weight.detach().clone()
        first = module.layers[0].up_proj.weight.detach().clone()
    used = []
    module.layers[1].up_proj.register_forward_pre_hook(
        lambda m, _: used.append(bool((m.weight == 0.5).all()))
    )
    own = models.global_batches(1)[0].chunk(4)[torch.distributed.get_rank()]
    engine(own)
    return {"seen": bool((seen == 0.5).all()), "first": digest({"w": first}), "used": used}


@pytest.mark.parametrize(("zero_init", "modifier_rank"), [(True, 0), (False, 0), (False, 3)])
def test_what_one_rank_writes_reaches_all_replicas(zero_init: bool, modifier_rank: int) -> None:
    out = ranks.run(4, modified, zero_init=zero_init, modifier_rank=modifier_rank)
    assert all(o["seen"] and o["used"] == [True] for o in out)
    assert len({o["first"] for o in out}) == 1


def state(*, stage: int, publish: str) -> dict[str, float]:
    """Run on a rank: whole momentum of every matrix by DeepSpeed's accessor."""
    engine = start_engine(ds_config(stage, params=hsdp(2, publish)))
    train_steps(engine, models.global_batches(2))
    named = dict(engine.module.named_parameters())
    return {
        n: float(safe_get_full_optimizer_state(p, key).double().square().sum())
        for n, p in named.items()
        for key in ["momentum_buffer" if models.is_matrix(n) else "exp_avg"]
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accessors_see_whole_momentum(stage: int) -> None:
    out = ranks.run(4, state, stage=stage, publish="async")
    assert all(o == out[0] for o in out)
    plain = ranks.run(4, state_without, stage=stage)[0]
    for name, value in out[0].items():
        # Gradients are summed in another order.
        assert value == pytest.approx(plain[name], rel=1e-4)


def state_without(*, stage: int) -> dict[str, float]:
    """Run on a rank: the same without HSDP."""
    with mock.patch(f"{__name__}.hsdp", lambda *_: {"lr": 1e-2}):
        return state(stage=stage, publish="")


def observed(*, stage: int, corrupt: bool) -> str:
    """Run on a rank: metrics and the self-check over replicas, and a master one of them lost."""
    params = hsdp(2, verify_every=1, metrics={"every": 1})
    engine = start_engine(ds_config(stage, params=params))
    optimizer = engine.basic_optimizer
    train_steps(engine, models.global_batches(2))
    norms = optimizer.last_stats.grad_norm
    total = sum(n**2 for n in norms.values()) ** 0.5
    assert total == pytest.approx(float(engine.get_global_grad_norm()), rel=1e-5)
    if corrupt and torch.distributed.get_rank() == 2:
        run = optimizer.binding.engine.run

        def broken(*args: Any) -> None:
            run(*args)
            optimizer.binding.leaf_sets[0][0].data[0] += 1e-3

        optimizer.binding.engine.run = broken
    try:
        train_steps(engine, models.global_batches(1))
    except RuntimeError as error:
        return str(error)
    return "nothing found"


@pytest.mark.parametrize("stage", [2, 3])
def test_metrics_and_verify_cover_the_world(stage: int) -> None:
    assert set(ranks.run(4, observed, stage=stage, corrupt=False)) == {"nothing found"}
    for error in ranks.run(4, observed, stage=stage, corrupt=True):
        assert "rank 2" in error and "differ from those of its replica, rank 0" in error


def refused(*, stage: int, params: dict[str, Any], extra: dict[str, Any]) -> str:
    """Run on a rank: a configuration that HSDP cannot honour."""
    dtype = extra.pop("dtype", "fp32")
    with pytest.raises((ValueError, RuntimeError)) as caught:
        start_engine(ds_config(stage, params=params, dtype=dtype, **extra))
    return str(caught.value)


@pytest.mark.parametrize(
    ("stage", "params", "extra", "words"),
    [
        (2, hsdp(3), {}, "must divide the number of ranks, which is 4; use one of [1, 2, 4]"),
        (0, hsdp(2), {}, "use stage 1, 2 or 3"),
        (
            1,
            hsdp(2),
            {"dtype": "bf16", "data_types": {"grad_accum_dtype": "fp32"}},
            "BF16_Optimizer",
        ),
        (3, hsdp(2), {"zero": {"zero_hpz_partition_size": 2}}, "hpZ"),
        (3, hsdp(2), {"zero": {"zero_quantized_weights": True}}, "quantized ZeRO++"),
    ],
)
def test_what_is_not_exact_is_refused(
    stage: int, params: dict[str, Any], extra: dict[str, Any], words: str
) -> None:
    for error in ranks.run(4, refused, stage=stage, params=params, extra=extra):
        assert words in error
