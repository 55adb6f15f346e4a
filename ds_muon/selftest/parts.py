# SPDX-License-Identifier: Apache-2.0
"""Parts: what is compared, on all ranks; each says what it measured or raises ComparisonError.

Owns: the list of parts for a number of ranks, and every tolerance beside its cause.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed import zero

from ds_muon.comm.transport import Transport
from ds_muon.plan.traffic import STRATEGIES
from ds_muon.selftest import model, reference, training
from ds_muon.zero.seams import available

STEPS = 3
# fp32 Newton-Schulz and AdamW against float64: rounding of gradients, products and moments. A
# wrong scale, a lost piece or a missed step is off by 1e-2 and more.
FP32_TOLERANCE = 1e-4
# bf16 Newton-Schulz carries 8 bits: a few percent per update, on slightly different weights after.
BF16_TOLERANCE = 8e-2


class ComparisonError(Exception):
    """A comparison did not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A comparison; `run` is given a transport over all ranks, and says what it measured."""

    name: str
    run: Callable[[Transport], str]


def parts_for(world_size: int) -> tuple[Part, ...]:
    """Everything that this number of ranks allows."""
    found = [
        Part(name=f"stage {stage}", run=functools.partial(_parity, stage)) for stage in range(4)
    ]
    found += [
        Part(
            name=f"stage {stage}, bf16 Newton-Schulz",
            run=functools.partial(_parity, stage, tolerance=BF16_TOLERANCE, ns_dtype="bf16"),
        )
        for stage in (2, 3)
    ]
    if world_size > 1:
        found += [
            Part(name=f"stage {stage}, exchanges", run=functools.partial(_exchanges, stage))
            for stage in (2, 3)
        ]
    if world_size > 1 and world_size % 2 == 0:
        stages = (2, 3) if available(zero.Init, "_partition_world_size") else (2,)
        rows = {"shard_size": world_size // 2}
        found += [
            Part(name=f"stage {stage}, HSDP", run=functools.partial(_parity, stage, hsdp=rows))
            for stage in stages
        ]
    found += [
        Part(name=f"stage {stage}, checkpoint", run=functools.partial(_checkpoint, stage))
        for stage in (1, 3)
    ]
    return tuple(found)


@functools.cache
def _expected(world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights at the start, and at the end of the reference."""
    start = {n: p.detach().clone() for n, p in model.build().named_parameters()}
    batches = model.global_batches(STEPS, world_size)
    end = reference.train(model.build(), batches, model.is_matrix, training.SETTINGS)
    return start, end


def _parity(
    stage: int, transport: Transport, *, tolerance: float = FP32_TOLERANCE, **params: Any
) -> str:
    world = transport.world_size
    engine = training.start(stage, **params)
    training.train(engine, model.global_batches(STEPS, world))
    found = training.masters(engine)
    start, end = _expected(world)
    _require_equal(transport, training.digest(found))
    said = []
    for kind, names in (
        ("matrices", [n for n in end if model.is_matrix(n)]),
        ("the rest", [n for n in end if not model.is_matrix(n)]),
    ):
        error = reference.relative_error(found, end, start, names)
        # NaN is neither above nor below.
        if not error <= tolerance:
            raise ComparisonError(
                f"{kind}: update off by {error:.1e} of its size, more than {tolerance:g}"
            )
        said.append(f"{kind} {error:.1e}")
    return f"update error: {', '.join(said)}"


def _exchanges(stage: int, transport: Transport) -> str:
    batches = model.global_batches(STEPS, transport.world_size)
    digests, traveled = {}, 0
    for exchange in STRATEGIES:
        engine = training.start(stage, exchange=exchange)
        plans = engine.basic_optimizer.binding.engine.plans
        traveled = max(traveled, *(sum(plan.received_numel()) for plan in plans))
        training.train(engine, batches)
        digests[exchange] = training.digest(training.masters(engine))
        _require_equal(transport, digests[exchange])
    if len(set(digests.values())) > 1:
        raise ComparisonError(f"strategies give other bits: {digests}")
    if not traveled:
        raise ComparisonError("no matrix was cut, so nothing was compared")
    return f"same bits by {', '.join(digests)}; up to {traveled:,} elements travel per step"


def _checkpoint(stage: int, transport: Transport) -> str:
    batches = model.global_batches(STEPS, transport.world_size)
    engine = training.start(stage)
    training.train(engine, batches[:1])
    with _shared_folder(transport) as folder:
        engine.save_checkpoint(folder)
        training.train(engine, batches[1:])
        resumed = training.start(stage)
        path, _ = resumed.load_checkpoint(folder)
        training.train(resumed, batches[1:])
        # Nobody may still read when the folder goes.
        transport.all_gather_object(None)
    if path is None:
        raise ComparisonError("DeepSpeed found no checkpoint where it had saved one")
    digests = [training.digest(training.masters(e)) for e in (engine, resumed)]
    _require_equal(transport, digests[0])
    if len(set(digests)) > 1:
        raise ComparisonError("training that was resumed has other bits than training that went on")
    return "saved, loaded, continued with the same bits"


@contextlib.contextmanager
def _shared_folder(transport: Transport) -> Iterator[str]:
    """A temporary folder of rank 0; ranks of another machine need to see it under its name."""
    own = tempfile.TemporaryDirectory(prefix="ds_muon") if transport.rank == 0 else None
    try:
        name: str = transport.all_gather_object(None if own is None else own.name)[0]
        if not all(transport.all_gather_object(Path(name).is_dir())):
            raise ComparisonError(f"{name} of rank 0 is not on every rank's machine; set TMPDIR")
        yield name
    finally:
        if own is not None:
            own.cleanup()


def _require_equal(transport: Transport, digest: str) -> None:
    """Compare ranks' bits."""
    digests: Sequence[str] = transport.all_gather_object(digest)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise ComparisonError(f"ranks {others} hold other bits than rank 0")
