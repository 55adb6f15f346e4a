# SPDX-License-Identifier: Apache-2.0
"""Crossing: with leaves on the host and the arena elsewhere, what runs where and what is copied.

The accelerator of the tests is the CPU, so that the two memories are told apart by storage.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import ds_muon.ortho.chunks as chunks_module
from ds_muon.config import parse
from ds_muon.ortho.arithmetic import arithmetic_for
from ds_muon.ortho.backends import Backend
from ds_muon.ortho.recipes import resolve
from ds_muon.plan.layout import Matrix, Placement, flat_partition_layout
from ds_muon.planning import plan_layout
from ds_muon.run.crossing import HostBuffers
from ds_muon.run.step import LeafStep, StepEngine
from tests.harness.memories import DEVICE, HOST, TwoMemories

CPU = torch.device("cpu")
SHAPES = [(24, 40), (40, 24), (33, 33), (12, 50)]
# Rank 0 of two holds this much: two and a half of the matrices, of which it owns two.
HELD = -(-sum(rows * cols for rows, cols in SHAPES) // 2)


class Half:
    """A transport of rank 0 of two, to whom the other sends ones."""

    rank, world_size = 0, 2

    def all_to_all(self, received: Tensor, sent: Tensor, **numels: Any) -> Half:
        received.fill_(1.0)
        return self

    def wait(self) -> None:
        pass


def step_engine(params: dict[str, Any], crossing: HostBuffers | None) -> StepEngine:
    config = parse({**params, "exchange": "all_to_all"})
    spec = resolve(config)
    offsets = [sum(r * c for r, c in SHAPES[:i]) for i in range(len(SHAPES))]
    layout = flat_partition_layout(
        [
            Placement(matrix=Matrix(name=f"m{i}", rows=r, cols=c), offset=offset)
            for i, ((r, c), offset) in enumerate(zip(SHAPES, offsets, strict=True))
        ],
        partition_numel=HELD,
        world_size=2,
    )
    plan = plan_layout(layout, config, spec, storage=arithmetic_for(spec, CPU).storage)
    return StepEngine(
        Half(), Backend(spec, CPU), [plan], inflight=1, keep_buffers=True, crossing=crossing
    )


def leaf_step() -> LeafStep:
    torch.manual_seed(3)
    weights, momentum, grad = (torch.randn(HELD) for _ in range(3))
    return LeafStep(weights=weights, momentum=momentum, grad=grad, lr=0.1, weight_decay=0.1, mu=0.9)


def buffers_of(crossing: HostBuffers) -> list[Tensor]:
    return crossing._buffers


@pytest.mark.parametrize(
    "params", [{"ns_dtype": "fp32"}, {"ns_dtype": "bf16", "momentum_dtype": "bf16"}], ids=str
)
def test_momentum_and_weights_are_the_hosts_and_products_the_devices(params: Any) -> None:
    # Chunks that cut every matrix, so that both buffers are in use.
    with mock.patch.object(chunks_module, "CHUNK_NUMEL", 500):
        plain, plain_leaf = step_engine(params, None), leaf_step()
        plain.run(0, [plain_leaf])
        crossing = HostBuffers(CPU, pin=True)
        engine, leaf = step_engine(params, crossing), leaf_step()
        watch = TwoMemories(
            host=[leaf.weights, leaf.momentum, leaf.grad, *buffers_of(crossing)],
            device=[engine.arena.iterate()],
        )
        with watch:
            engine.run(0, [leaf])
    assert torch.equal(leaf.weights, plain_leaf.weights)
    assert torch.equal(leaf.momentum, plain_leaf.momentum)
    [bucket] = engine.plans[0].routes
    assert len(bucket.moving(way_in=True)) > 0 and 0 in engine.plans[0].owners
    assert watch.crossed == {(HOST, DEVICE): HELD, (DEVICE, HOST): HELD}
    products = [place for name, place in watch.work if "mm." in name]
    elementwise = [place for name, place in watch.work if "lerp" in name]
    assert set(products) == {DEVICE} and set(elementwise) == {HOST}
    # The device holds the arena, and temporaries of chunks.
    assert watch.largest[DEVICE] <= 4 * 500
    assert watch.work["aten.add_.Tensor", HOST] == HELD


def test_the_same_leaf_without_crossing_would_mix_memories() -> None:
    engine, leaf = step_engine({"ns_dtype": "fp32"}, None), leaf_step()
    watch = TwoMemories(
        host=[leaf.weights, leaf.momentum, leaf.grad], device=[engine.arena.iterate()]
    )
    with watch, pytest.raises(AssertionError, match="reads"):
        engine.run(0, [leaf])


def test_a_buffer_is_not_written_before_its_copy_is_done() -> None:
    crossing = HostBuffers(CPU, pin=False)
    log: list[str] = []

    class Event:
        def __init__(self, turn: int) -> None:
            self.turn = turn

        def synchronize(self) -> None:
            log.append(f"wait {self.turn}")

    real = crossing._copy

    def copy(turn: int, target: Tensor, source: Tensor) -> None:
        real(turn, target, source)
        crossing._copied[turn] = Event(turn)
        log.append(f"copy {turn}")

    with (
        mock.patch.object(crossing, "_copy", copy),
        mock.patch.object(chunks_module, "CHUNK_NUMEL", 2),
    ):
        out, given = torch.zeros(6), torch.arange(6.0)
        for u, own in crossing.outgoing(out, given):
            log.append("write")
            u.copy_(own)
        assert torch.equal(out, given)
        assert log == ["write", "copy 1", "write", "copy 0", "wait 1", "write", "copy 1"]
        log.clear()
        into = torch.zeros(6)
        for step, own in crossing.incoming(out, into):
            log.append("read")
            own.copy_(step)
        assert torch.equal(into, given)
        # A chunk is under way while the one before it is read, and read only when it is here.
        expected = "wait 0|copy 0|wait 1|copy 1|wait 0|read|copy 0|wait 1|read|wait 0|read"
        assert log == expected.split("|")
