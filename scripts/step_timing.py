# SPDX-License-Identifier: Apache-2.0
"""What one rank measures for bench_step.py: engines of several optimizers, stepped in turns.

The engines live in the same ranks, and take turns of a few iterations, so that a busy machine slows
all of them alike. The first iteration of a turn brings its engine's memory back into the caches and
is not counted. An iteration lasts from its start to the start of the next one, so that what an
optimizer hides behind the next forward is paid for.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import deepspeed
import torch
from torch import Tensor

import ds_muon.run.step
from ds_muon.ortho.arithmetic import arithmetic_for
from ds_muon.ortho.recipes import OrthoSpec
from ds_muon.plan.layout import Matrix
from ds_muon.run.clock import Clock
from scripts.byte_lm import ByteLM, read_text, sample
from tests.harness.memory import Allocated, allocated
from tests.harness.operators import Operators
from tests.harness.training import counting_collectives, ds_config

# Iterations of a turn; the first and the last only begin and end what is counted.
TURN = 4
ADAMW, BUILT_IN, DMUON = "AdamW", "built-in Muon", "DMuon"
# A CPU without bf16 instructions takes seconds for a step of this; it has one turn.
SLOW = f"{BUILT_IN}, standard"
HIDDEN = f"{DMUON}, hidden gather"
# ZeRO preallocates buckets of this many elements; its default is a gigabyte.
BUCKET = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is trained: a byte-level transformer and this rank's part of a batch."""

    width: int
    layers: int
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens per rank and iteration."""
        return self.batch * self.length

    def model(self) -> ByteLM:
        """Build it."""
        return ByteLM(width=self.width, layers=self.layers)

    def flops(self) -> int:
        """Of forward and backward on one rank: three times the products with weights, 2 flops each
        per token, and those of attention over the whole context."""
        weights = self.layers * 12 * self.width**2 + 256 * self.width
        attention = self.layers * 2 * self.width * self.length
        return 6 * self.tokens * (weights + attention)


CLOCK, PROCESSOR = "clock", "processor"


class TwoClocks:
    """Time on the device's clock, and processor time of this rank, which others do not inflate."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)

    def mark(self) -> tuple[Any, float]:
        """Return now."""
        return self._clock.mark(), time.process_time()

    def between(self, start: tuple[Any, float], end: tuple[Any, float]) -> dict[str, float]:
        """Seconds of either kind."""
        return {
            CLOCK: self._clock.between(start[0], end[0]) / 1e3,
            PROCESSOR: end[1] - start[1],
        }


def _seconds() -> dict[str, list[float]]:
    return {CLOCK: [], PROCESSOR: []}


@dataclass(slots=True, kw_only=True)
class Measured:
    """One optimizer on one rank; seconds, by kind of time, are per counted iteration.

    Attributes:
        orthogonalising: seconds in DMuon's Newton-Schulz; flops: its flops of one step here.
        memory: bytes of the engine between iterations, and how many more one takes at its peak.
        launches, views: torch's operators of a step; collectives: calls of a step.
    """

    kind: str
    step: dict[str, list[float]] = field(default_factory=_seconds)
    backward_and_step: dict[str, list[float]] = field(default_factory=_seconds)
    iteration: dict[str, list[float]] = field(default_factory=_seconds)
    orthogonalising: dict[str, list[float]] = field(default_factory=_seconds)
    flops: int = 0
    memory: Allocated | None = None
    launches: int = 0
    views: int = 0
    collectives: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """One rank's result.

    Attributes:
        matrix_rate, model_rate: flops per second, by kind of time, of products of DMuon's matrices
            in the arithmetic of its Newton-Schulz, and of the model's in the training dtype; while
            all ranks run theirs.
        matrices, built_in_iterations: how many there are, and how often all ranks together iterate
            one with the built-in: under ZeRO-1/2 wherever a part of one lies.
    """

    measured: list[Measured]
    matrix_rate: dict[str, float]
    model_rate: dict[str, float]
    parameters: int
    matrices: int
    built_in_iterations: int


def optimizer_section(kind: str) -> dict[str, Any]:
    """One optimizer's section of ds_config.json.

    On a CPU the others' AdamW is torch's fused one, since DeepSpeed would compile its own.
    """
    adam = {"torch_adam": True} if torch.accelerator.current_accelerator() is None else {}
    if kind == ADAMW:
        fused = {"fused": True} if adam else {}
        return {"type": "AdamW", "params": {"lr": 1e-3, **adam, **fused}}
    if kind in (BUILT_IN, SLOW):
        form = {"ns_method": "standard"} if kind == SLOW else {}
        return {"type": "Muon", "params": {"lr": 1e-3, **adam, **form}}
    more: dict[str, Any] = {"hide_param_gather": True} if kind == HIDDEN else {}
    return {"type": DMUON, "params": {"lr": 1e-3, **more}}


def start(kind: str, stage: int, size: Size) -> Any:
    """Start an engine."""
    zero: dict[str, Any] = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    if kind in (BUILT_IN, SLOW):
        zero["reduce_scatter"] = False
    world = torch.distributed.get_world_size()
    config = ds_config(stage, params={}, dtype="bf16", zero=zero, batch=size.batch * world)
    config["optimizer"] = optimizer_section(kind)
    torch.manual_seed(0)
    model = size.model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine


class Subject:
    """One engine under measurement."""

    def __init__(self, kind: str, stage: int, size: Size, batches: Callable[[], Tensor]) -> None:
        self.measured = Measured(kind=kind)
        self._batches = batches
        self._clock = TwoClocks(torch.device(deepspeed.get_accelerator().current_device_name()))

        def begin() -> None:
            self.engine = start(kind, stage, size)
            for _ in range(2):
                self.iterate(batches())
            gc.collect()

        self._left = allocated(begin).left
        binding = getattr(self.engine.basic_optimizer, "binding", None)
        self.plans = binding.engine.plans if binding else ()
        rank = torch.distributed.get_rank()
        self.measured.flops = sum(plan.owner_flops()[rank] for plan in self.plans)

    def iterate(self, batch: Tensor) -> list[Any]:
        """Forward, backward and step; the points in time before, between and after them."""
        mark = self._clock.mark
        start = mark()
        loss = self.engine(batch)
        forward = mark()
        self.engine.backward(loss)
        backward = mark()
        self.engine.step()
        return [start, forward, backward, mark()]

    def take_turn(self) -> None:
        """Run one turn."""
        torch.distributed.barrier()
        marks: list[list[Any]] = []
        spent: list[list[tuple[Any, Any]]] = []
        for _ in range(TURN):
            with self._timing_newton_schulz() as intervals:
                marks.append(self.iterate(self._batches()))
            spent.append(intervals)
        between, measured = self._clock.between, self.measured
        for here, following, intervals in zip(marks[1:-1], marks[2:], spent[1:-1], strict=True):
            start, forward, backward, step = here
            _add(measured.iteration, between(start, following[0]))
            _add(measured.backward_and_step, between(forward, step))
            _add(measured.step, between(backward, step))
            _add(measured.orthogonalising, *(between(*pair) for pair in intervals))

    @contextlib.contextmanager
    def _timing_newton_schulz(self) -> Iterator[list[tuple[Any, Any]]]:
        intervals: list[tuple[Any, Any]] = []
        real = ds_muon.run.step.orthogonalize_into

        def timed(*args: Any) -> Tensor:
            begun = self._clock.mark()
            result = real(*args)
            intervals.append((begun, self._clock.mark()))
            return result

        with mock.patch.object(ds_muon.run.step, "orthogonalize_into", timed):
            yield intervals

    def count(self) -> None:
        """Memory of one iteration; operators and collectives of another one's step."""
        peak = allocated(lambda: self.iterate(self._batches())).peak
        self.measured.memory = Allocated(left=self._left, peak=peak)
        loss = self.engine(self._batches())
        self.engine.backward(loss)
        with counting_collectives() as counts, Operators() as operators:
            self.engine.step()
        self.measured.launches = operators.launches.total()
        self.measured.views = operators.views.total()
        self.measured.collectives = sum(counts["calls"].values())


def _add(seconds: dict[str, list[float]], *found: dict[str, float]) -> None:
    """Append the sum of some times."""
    for kind, values in seconds.items():
        values.append(sum(one[kind] for one in found))


class Products:
    """Times matrix products beside the iterations, while all ranks do."""

    def __init__(self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: Any):
        self._clock = TwoClocks(device)
        self._operands = [
            [torch.randn(s, device=device).to(dtype) for s in ((m, k), (k, n), (m, n))]
            for m, k, n in shapes
        ]
        self._flops = sum(2 * m * k * n for m, k, n in shapes)
        self._seconds = _seconds()

    def time(self) -> None:
        """Form all products once."""
        torch.distributed.barrier()
        begun = self._clock.mark()
        for left, right, out in self._operands:
            torch.mm(left, right, out=out)
        _add(self._seconds, self._clock.between(begun, self._clock.mark()))

    def rate(self) -> dict[str, float]:
        """Flops per second, by kind of time: the median of all but the first, which warms up."""
        return {
            kind: self._flops / statistics.median(seconds[1:])
            for kind, seconds in self._seconds.items()
        }


def _products(
    matrices: Sequence[Matrix], spec: OrthoSpec, size: Size, device: torch.device
) -> tuple[Products, Products]:
    """Those that Newton-Schulz spends most in, (n, n) @ (n, m), and those of the model's MLP."""
    sides = [sorted((matrix.rows, matrix.cols)) for matrix in matrices]
    return (
        Products([(n, n, m) for n, m in sides], arithmetic_for(spec, device).storage, device),
        Products([(size.tokens, size.width, 4 * size.width)], torch.bfloat16, device),
    )


def measure(*, kinds: Sequence[str], stage: int, size: Size, turns: int) -> RankResult:
    """Run on a rank: all engines, turn by turn."""
    accelerator = deepspeed.get_accelerator()
    # The harness claims fp16 for any CPU; what an optimizer chooses by it must be what users get.
    vars(accelerator).pop("is_fp16_supported", None)
    device = torch.device(accelerator.current_device_name())
    text, _ = read_text("stdlib")
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())

    def batches() -> Tensor:
        return sample(text, size.batch, generator)[:, : size.length + 1].to(device)

    subjects = [Subject(kind, stage, size, batches) for kind in kinds]
    own = next(s for s in subjects if s.plans)
    matrices = [matrix for plan in own.plans for matrix in plan.layout.matrices]
    held = [len({p.rank for p in ps}) for plan in own.plans for ps in plan.layout.fragments]
    spec = own.engine.basic_optimizer.preparation.spec
    ours, models = _products(matrices, spec, size, device)
    for turn in range(turns):
        for number in range(len(subjects)):
            subject = subjects[(turn + number) % len(subjects)]
            if turn == 0 or subject.measured.kind != SLOW:
                subject.take_turn()
        for _ in range(2):
            ours.time()
            models.time()
    for subject in subjects:
        subject.count()
    return RankResult(
        measured=[subject.measured for subject in subjects],
        matrix_rate=ours.rate(),
        model_rate=models.rate(),
        parameters=sum(p.numel() for p in size.model().parameters()),
        matrices=len(matrices),
        built_in_iterations=len(matrices) if stage == 3 else sum(held),
    )
