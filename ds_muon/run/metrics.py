# SPDX-License-Identifier: Apache-2.0
"""Metrics: what a step took, per bucket and over all ranks.

Owns: the records, and how they are put together from what the step engine and the optimizer show.
Never does: communicate or write anywhere; both are callables that are handed in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ds_muon.ortho.chunks import chunks
from ds_muon.plan.memory import buffers
from ds_muon.plan.plan import Plan
from ds_muon.run.clock import Clock

PHASES = ("in", "ns", "out")
CLASSES = ("muon", "adamw")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketStats:
    """One bucket on this rank.

    Attributes:
        names, shapes: of the bucket's matrices.
        matrices, owned: how many they are, and how many this rank orthogonalises.
        numel, padding: elements of the matrices; elements that arrive here and carry nothing.
        exchange_bytes: the plan's buffers of this bucket on this rank.
        iterate_bytes: the plan's memory for the largest matrix that this rank owns.
        allocated_before, allocated_after, allocated_peak: bytes, as the accelerator counts them;
            on a CPU the process's resident memory.
        milliseconds: by phase: exchange in, Newton-Schulz with packing, exchange out.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    matrices: int
    owned: int
    numel: int
    padding: int
    exchange_bytes: int
    iterate_bytes: int
    allocated_before: int = 0
    allocated_after: int = 0
    allocated_peak: int = 0
    milliseconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One optimizer step over all ranks.

    Attributes:
        step: optimizer steps since start, from 1.
        milliseconds: phase -> mean over ranks; milliseconds_max: the slowest rank's.
        ns_balance: slowest rank's Newton-Schulz time over the mean; planned_balance: by cost.
        update_rms: "muon" and "adamw" -> root mean square of the change, without weight decay.
        grad_norm: "muon" and "adamw" -> norm of the gradient that the optimizer saw.
        buckets: of this rank.
        gauges: further numbers, by name.
    """

    step: int
    milliseconds: Mapping[str, float]
    milliseconds_max: Mapping[str, float]
    ns_balance: float
    planned_balance: float
    update_rms: Mapping[str, float]
    grad_norm: Mapping[str, float]
    buckets: tuple[BucketStats, ...]
    gauges: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return asdict(self)

    def scalars(self) -> dict[str, float]:
        """Return what a monitor plots, by name."""
        found = {"ns_balance": self.ns_balance, "planned_balance": self.planned_balance}
        found.update((f"ms_{phase}", ms) for phase, ms in self.milliseconds.items())
        found.update((f"ms_{phase}_max", ms) for phase, ms in self.milliseconds_max.items())
        found.update((f"update_rms_{name}", rms) for name, rms in self.update_rms.items())
        found.update((f"grad_norm_{name}", norm) for name, norm in self.grad_norm.items())
        return {**found, **self.gauges}

    def table(self) -> str:
        """Return the buckets as text."""
        lines = [f"step {self.step}, buckets of this rank"]
        for number, b in enumerate(self.buckets):
            ms = ", ".join(f"{phase} {b.milliseconds[phase]:.2f} ms" for phase in PHASES)
            shapes = ", ".join(sorted({f"{r}x{c}" for r, c in b.shapes}))
            lines.append(
                f"  {number}: {b.matrices} matrices ({shapes}), {b.numel:,} elements, owned "
                f"{b.owned}, padding {b.padding:,}; buffers {b.exchange_bytes:,} + iteration "
                f"{b.iterate_bytes:,} bytes; allocated {b.allocated_before:,} before, "
                f"{b.allocated_after:,} after, {b.allocated_peak:,} at peak; {ms}"
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProbe:
    """How allocated bytes are read off this device."""

    allocated: Callable[[], int]
    peak: Callable[[], int]
    reset_peak: Callable[[], None]


def describe_buckets(plan: Plan, rank: int) -> list[BucketStats]:
    """Return what is known of a plan's buckets before any step."""
    found = []
    legs = plan.legs()
    for number, route in enumerate(plan.routes):
        matrices = [plan.layout.matrices[i] for i in route.matrices]
        way_in, way_out = legs[2 * number : 2 * number + 2]
        exchange = buffers(
            plan.workspace,
            send_in=way_in.send_numel[rank],
            receive_in=way_in.receive_numel[rank],
            send_out=way_out.send_numel[rank],
            receive_out=way_out.receive_numel[rank],
        )
        found.append(
            BucketStats(
                names=tuple(m.name for m in matrices),
                shapes=tuple((m.rows, m.cols) for m in matrices),
                matrices=len(matrices),
                owned=sum(plan.owners[i] == rank for i in route.matrices),
                numel=sum(m.numel for m in matrices),
                padding=way_in.padding[rank] + way_out.padding[rank],
                exchange_bytes=exchange.nbytes,
                iterate_bytes=plan.iterate_bytes[rank],
            )
        )
    return found


class Recorder:
    """Collects one step in every `every` and hands it to the sinks.

    Args:
        plans: the step engine's.
        rank: this process's.
        share: this rank's numbers -> every rank's, in rank order; called by all ranks alike.
        copies: by class, ranks that hold the same gradients and moments (1: they are partitioned).
        sinks: called with each StepStats.

    Attributes:
        gauges: numbers that are read at the end of a recorded step, the same on all ranks.
    """

    def __init__(
        self,
        every: int,
        plans: Sequence[Plan],
        *,
        rank: int,
        device: torch.device,
        share: Callable[[list[float]], list[list[float]]],
        copies: Mapping[str, int],
        memory: MemoryProbe,
        sinks: Sequence[Callable[[StepStats], None]],
    ) -> None:
        self._every, self._share, self._copies = every, share, copies
        self._buckets = [describe_buckets(plan, rank) for plan in plans]
        self._cost = float(sum(plan.owner_costs()[rank] for plan in plans))
        self._memory = memory
        self._clock = Clock(device)
        self.sinks = list(sinks)
        self.gauges: dict[str, Callable[[], float]] = {}
        self.last: StepStats | None = None
        self.step = 0
        self.active = False

    def begin(self) -> None:
        """Start a step."""
        self.step += 1
        self.active = self.step % self._every == 0
        self._spans: dict[tuple[int, int, str], list[Any]] = {}
        self._allocated: dict[tuple[int, int], list[int]] = {}
        self._squares: dict[str, list[Tensor]] = {f"{k} {c}": [] for k in "ug" for c in CLASSES}
        self._numel = dict.fromkeys(CLASSES, 0)

    @contextlib.contextmanager
    def phase(self, plan: int, bucket: int, name: str) -> Iterator[None]:
        """Time a phase of a bucket, and watch the memory from its first to its last."""
        if (plan, bucket) not in self._allocated:
            self._memory.reset_peak()
            self._allocated[plan, bucket] = [self._memory.allocated(), 0, 0]
        start = self._clock.mark()
        yield
        self._spans.setdefault((plan, bucket, name), []).append((start, self._clock.mark()))
        seen = self._allocated[plan, bucket]
        seen[1], seen[2] = self._memory.allocated(), max(seen[2], self._memory.peak())

    def matrix(self, update: Tensor, length: float) -> None:
        """See an orthogonalised matrix on its owner; it changes weights by length * update."""
        self._add("u muon", _square(update) * length**2, update.numel())

    def gradient(self, name: str, grad: Tensor) -> None:
        """See a leaf's gradient."""
        self._add(f"g {name}", torch.linalg.vector_norm(grad.float()) ** 2 / self._copies[name])

    def moments(self, state: Mapping[str, Tensor], options: Mapping[str, Any], numel: int) -> None:
        """See an AdamW leaf after its step, `numel` elements of it in use."""
        step, (beta1, beta2) = state["step"], options["betas"]
        total = torch.zeros((), device=state["exp_avg"].device)
        for mean, square in chunks(state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)):
            denominator = (square / (1 - beta2**step)).sqrt_().add_(options["eps"])
            total += torch.linalg.vector_norm(mean / (1 - beta1**step) / denominator) ** 2
        copies = self._copies["adamw"]
        self._add("u adamw", total * options["lr"] ** 2 / copies, numel / copies)

    def _add(self, key: str, square: Tensor, numel: float = 0) -> None:
        self._squares[key].append(square)
        if numel:
            self._numel[key[2:]] += numel

    def finish(self) -> None:
        """End a step: share the numbers, keep the record and hand it on."""
        if not self.active:
            return
        self.active = False
        buckets = self._finished_buckets()
        phases = [sum(b.milliseconds[p] for b in buckets) for p in PHASES]
        squares = [_total(values) for values in self._squares.values()]
        numels = [float(n) for n in self._numel.values()]
        shared = self._share([*phases, *squares, *numels, self._cost])
        columns = [list(column) for column in zip(*shared, strict=True)]
        times, sums = columns[:3], [sum(column) for column in columns[3:]]
        means = [sum(t) / len(t) for t in times]
        update, grad, numel, cost = sums[:2], sums[2:4], sums[4:6], sums[6]
        self.last = StepStats(
            step=self.step,
            milliseconds=dict(zip(PHASES, means, strict=True)),
            milliseconds_max={p: max(t) for p, t in zip(PHASES, times, strict=True)},
            ns_balance=max(times[1]) / means[1] if means[1] else 1.0,
            planned_balance=max(columns[-1]) * len(columns[-1]) / cost if cost else 1.0,
            update_rms={
                c: (u / n) ** 0.5 if n else 0.0
                for c, u, n in zip(CLASSES, update, numel, strict=True)
            },
            grad_norm={c: g**0.5 for c, g in zip(CLASSES, grad, strict=True)},
            buckets=tuple(buckets),
            gauges={name: read() for name, read in self.gauges.items()},
        )
        for sink in self.sinks:
            sink(self.last)

    def _finished_buckets(self) -> list[BucketStats]:
        found = []
        for plan, buckets in enumerate(self._buckets):
            for number, bucket in enumerate(buckets):
                before, after, peak = self._allocated.get((plan, number), (0, 0, 0))
                spans = {p: self._spans.get((plan, number, p), []) for p in PHASES}
                found.append(
                    replace(
                        bucket,
                        allocated_before=before,
                        allocated_after=after,
                        allocated_peak=peak,
                        milliseconds={
                            p: sum(self._clock.between(a, b) for a, b in marks)
                            for p, marks in spans.items()
                        },
                    )
                )
        return found


def _square(flat: Tensor) -> Tensor:
    parts = [torch.linalg.vector_norm(part.float()) for (part,) in chunks(flat)]
    return torch.linalg.vector_norm(torch.stack(parts)) ** 2


def _total(values: Sequence[Tensor]) -> float:
    return float(torch.stack(list(values)).sum()) if values else 0.0
