# SPDX-License-Identifier: Apache-2.0
"""ZeRO-1/2's gradients go to their keepers only: the same gradients for U, not 2U.

Gloo's go in messages. The reduce_scatter of other libraries runs on gloo here, by `way="list"`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ds_muon import log
from ds_muon.zero import reduction
from tests.harness import models, ranks
from tests.harness.memory import peak_allocated
from tests.harness.training import (
    counting_collectives,
    ds_config,
    masters,
    start_engine,
    train_steps,
)


class PartlyUsed(models.LlamaLike):
    """A llama with a frozen matrix, a frozen norm and a matrix that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(33, 9, bias=False)
        self.layers[0].up_proj.weight.requires_grad_(False)
        self.layers[1].input_norm.weight.requires_grad_(False)


def cell(stage: int, *, dtype: str = "fp32", partly: bool = False, **settings: Any) -> Any:
    return {"stage": stage, "dtype": dtype, "partly": partly, **settings}


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero": keys}


# A bucket of 1000 is less than a matrix (33 x 47) and cuts the embedding (61 x 33) at two ranks.
TINY, SMALL = {"reduce_bucket_size": 1000}, {"reduce_bucket_size": 2500}
CELLS = {
    "stage 1, tiny buckets, overlap": cell(
        1,
        accumulation=2,
        prescale_gradients=True,
        gradient_predivide_factor=2.0,
        **zero(**TINY, overlap_comm=True),
    ),
    "stage 1, reduced in fp16": cell(1, communication_data_type="fp16"),
    "stage 2, tiny buckets": cell(2, accumulation=2, **zero(**TINY)),
    "stage 2, fp16, overlap, round robin": cell(
        2,
        fp16={"enabled": True, "loss_scale": 64},
        **zero(**SMALL, overlap_comm=True, round_robin_gradients=True),
    ),
    "stage 2, partly used": cell(2, partly=True, **zero(**SMALL)),
    "bf16, reduced in fp32": cell(
        2, dtype="bf16", communication_data_type="fp32", accumulation=2, **zero(**SMALL)
    ),
    "bf16, summed in fp32": cell(
        2, dtype="bf16", accumulation=2, data_types={"grad_accum_dtype": "fp32"}, **zero(**SMALL)
    ),
    "offload": cell(1, accumulation=2, **zero(**SMALL, offload_optimizer={"device": "cpu"})),
    "hsdp": cell(2, params={"hsdp": {"shard_size": 2}}, **zero(**SMALL)),
}


# DeepSpeed reduces for each rank alone, we by the backend's one call, or by messages.
DEEPSPEEDS, LIST, MESSAGES = "DeepSpeed's", "list", "messages"
CALL = {DEEPSPEEDS: "reduce", LIST: "reduce_scatter", MESSAGES: "recv"}


@contextlib.contextmanager
def going(way: str) -> Iterator[None]:
    """Reduce by a list, or by messages, whatever the backend."""
    with mock.patch.object(reduction, "_by_messages", lambda *_: way == MESSAGES):
        yield


MORE_RANKS = ("stage 2, tiny buckets", "stage 1, tiny buckets, overlap", "hsdp")
# Reduced by a list where another cell says the same of messages.
BY_LIST = ("stage 2, partly used", "bf16, reduced in fp32", "stage 1, reduced in fp16")


def engine_of(
    *,
    stage: int,
    way: str,
    partly: bool = False,
    zero: dict[str, Any] | None = None,
    params: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """An engine whose gradients we reduce, or DeepSpeed does."""
    params = {"lr": 1e-2, "ns_dtype": "fp32", **(params or {})}
    zero = dict(zero or {})
    if way == DEEPSPEEDS:
        params["reduce_scatter_v"] = False
        zero["use_multi_rank_bucket_allreduce"] = False
    build = PartlyUsed if partly else models.LlamaLike
    with mock.patch.object(models, "LlamaLike", build):
        return start_engine(ds_config(stage, params=params, zero=zero, **settings))


def trained(*, way: str, **settings: Any) -> dict[str, Any]:
    """Run on a rank: three steps; the master weights, and the reducing calls."""
    with going(way):
        engine = engine_of(way=way, **settings)
        with counting_collectives() as counts:
            train_steps(engine, models.global_batches(3))
    weights = masters(engine)
    return {
        "weights": torch.cat([weights[name].flatten() for name in sorted(weights)]),
        "norm": float(engine.get_global_grad_norm()),
        "calls": set(counts["calls"]) & set(CALL.values()),
    }


def compared(*, names: list[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Run on a rank: each cell under both of its reductions."""
    ways = {name: (DEEPSPEEDS, LIST if name in BY_LIST else MESSAGES) for name in names}
    return {n: {way: trained(way=way, **CELLS[n]) for way in ways[n]} for n in names}


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, [name for name in CELLS if name not in MORE_RANKS]),
        (3, ["stage 2, tiny buckets"]),
        (4, ["stage 1, tiny buckets, overlap", "hsdp"]),
    ],
)
def test_weights_are_those_of_one_reduction_per_rank(world: int, names: list[str]) -> None:
    for out in ranks.run(world, compared, names=names):
        for name, found in out.items():
            expected = found[DEEPSPEEDS]
            for way, ours in found.items():
                # Gloo sums a list's tensors in the order of its reduce; messages have one of their
                # own, which moves the last bit of three or more gradients, in the dtype of the sum.
                same_order = way == LIST or world == 2 or name == "hsdp"
                gap = (ours["weights"] - expected["weights"]).norm() / expected["weights"].norm()
                assert gap <= (0.0 if same_order else 1e-6), (name, way)
                assert ours["norm"] == pytest.approx(
                    expected["norm"], rel=0 if same_order else 1e-6
                )
                assert ours["norm"] > 0
                replicas = {"reduce"} if name == "hsdp" else set()
                assert ours["calls"] == {CALL[way]} | replicas, (name, way)


def backward(*, way: str, stage: int, bucket: int) -> dict[str, Any]:
    """Run on a rank: what one micro-batch's forward and backward move, at a boundary."""
    with going(way):
        engine = engine_of(way=way, stage=stage, zero={"reduce_bucket_size": bucket})
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        batch = models.global_batches(1)[0].chunk(world)[rank]
        with counting_collectives() as counts:
            engine.backward(engine(batch))
    return {
        "calls": dict(counts["calls"]),
        "elements": sum(counts["elements"].values()),
        "parameters": sum(p.numel() for p in engine.module.parameters()),
    }


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_cost_u_in_as_many_calls_at_any_world_size(stage: int) -> None:
    calls = {}
    for world in (2, 4):
        for out in ranks.run(world, backward, way=LIST, stage=stage, bucket=2500):
            assert out["elements"] == (world - 1) / world * out["parameters"]
            assert set(out["calls"]) == {"reduce_scatter"}
            calls[world] = out["calls"]["reduce_scatter"]
        found = ranks.run(world, backward, way=MESSAGES, stage=stage, bucket=2500)
        assert sum(out["elements"] for out in found) == (world - 1) * found[0]["parameters"]
        for out in found:
            assert set(out["calls"]) == {"recv"}
            # One from each of the others for a bucket that the rank keeps a part of.
            assert out["calls"]["recv"] % (world - 1) == 0
            assert out["calls"]["recv"] <= (world - 1) * calls[world]
    # A bucket closes before it would exceed its size, so two that are neighbours exceed it.
    assert calls[2] == calls[4]
    assert 19371 / 2500 <= calls[2] <= 2 * 19371 / 2500 + 1
    for way, number in {LIST: 1, MESSAGES: 3, DEEPSPEEDS: 4}.items():
        found = ranks.run(4, backward, way=way, stage=stage, bucket=10**6)
        assert [out["calls"] for out in found] == 4 * [{CALL[way]: number}]


def reductions_peaks(*, way: str) -> list[tuple[int, int]]:
    """Run on a rank: per bucket of bf16 gradients reduced in fp32, its elements and the bytes that
    its reduction allocates, beside what the library does: gloo sums in a copy of its own."""
    params = {"lr": 1e-3, "reduce_scatter_v": way != DEEPSPEEDS}
    zero = {"reduce_bucket_size": 6000}
    engine = start_engine(
        ds_config(2, params=params, dtype="bf16", zero=zero, communication_data_type="fp32")
    )
    average, peaks = engine.optimizer.average_tensor, []

    def watched(tensor: Tensor, dtype: torch.dtype) -> None:
        peaks.append((tensor.numel(), peak_allocated(lambda: average(tensor, dtype))))

    def nothing(*args: Any, **kwargs: Any) -> None:
        """In place of a collective."""

    engine.optimizer.average_tensor = watched
    batch = models.global_batches(1)[0].chunk(engine.world_size)[torch.distributed.get_rank()]
    quiet = mock.patch.multiple(torch.distributed, reduce_scatter=nothing, all_reduce=nothing)
    with going(way), quiet:
        engine.backward(engine(batch))
    return peaks


@pytest.mark.parametrize(("way", "buckets"), [(LIST, 1), (MESSAGES, 2)])
def test_a_reduction_takes_its_bucket_and_what_arrives(way: str, buckets: int) -> None:
    ours, deepspeeds = (ranks.run(4, reductions_peaks, way=w) for w in (way, DEEPSPEEDS))
    for rank in range(4):
        assert len(ours[rank]) == len(deepspeeds[rank]) > 3
        for (numel, peak), (same, deepspeeds_peak) in zip(
            ours[rank], deepspeeds[rank], strict=True
        ):
            assert numel == same
            assert 0 < peak <= buckets * 4 * numel
            assert 4 * numel < deepspeeds_peak


def said_and_called(
    *,
    way: str = LIST,
    ours: bool = True,
    refuses: str = "",
    zero: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[list[str], set[str]]:
    """Run on a rank: what is logged of the reduction at start, and the calls of a backward."""
    real, rank = torch.distributed.reduce_scatter, torch.distributed.get_rank()

    def backend(output: Tensor, input_list: list[Tensor], **kwargs: Any) -> Any:
        if refuses == "everywhere":
            raise RuntimeError("unequal tensors")
        real(output=output, input_list=input_list, **kwargs)
        output.mul_(3 if rank == 1 else 1)

    texts: list[str] = []
    params = {"lr": 1e-2, "reduce_scatter_v": ours}
    with (
        going(way),
        mock.patch.object(log.logger, "log", lambda level, text: texts.append(text)),
        mock.patch.object(torch.distributed, "reduce_scatter", backend if refuses else real),
    ):
        engine = start_engine(ds_config(2, params=params, zero=zero, **settings))
        with counting_collectives() as counts:
            batch = models.global_batches(1)[0].chunk(engine.world_size)[rank]
            engine.backward(engine(batch))
    return [t for t in texts if t.startswith("gradients: ")], set(counts["calls"])


LOGGED = {"comms_logger": {"enabled": True, "verbose": False, "prof_all": True}}


def fallbacks() -> dict[str, tuple[list[str], set[str]]]:
    """Run on a rank: why DeepSpeed's own reduction stays."""
    return {
        "reduce_scatter_v is false": said_and_called(ours=False),
        "reduce_scatter is false": said_and_called(zero={"reduce_scatter": False}),
        "contiguous_gradients is false": said_and_called(zero={"contiguous_gradients": False}),
        "refuses a reduce_scatter of unequal tensors (unequal tensors)": said_and_called(
            refuses="everywhere"
        ),
        "reduce_scatter of unequal tensors is wrong": said_and_called(refuses="wrong on rank 1"),
        # DeepSpeed's log of collectives meets lists with empty tensors.
        "one reduce_scatter per bucket; packed copies": said_and_called(**LOGGED),
        "one message from each other rank per bucket": said_and_called(way=MESSAGES, **LOGGED),
    }


def test_what_keeps_deepspeeds_own_reduction_is_said_and_decided_by_all() -> None:
    for rank, out in enumerate(ranks.run(2, fallbacks)):
        for reason, (texts, calls) in out.items():
            assert [reason in text for text in texts] == ([True] if rank == 0 else []), reason
            assert ("reduce_scatter" in calls) is ("one reduce_scatter" in reason), reason
            assert ("recv" in calls) is ("one message" in reason), reason
