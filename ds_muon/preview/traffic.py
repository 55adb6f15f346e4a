# SPDX-License-Identifier: Apache-2.0
"""Traffic: elements that a rank receives per step, and predicted times, from a run's plans.

U is (G - 1) / G of all parameters, G the ranks that ZeRO partitions over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ds_muon.plan.plan import Plan
from ds_muon.plan.traffic import PERSONAL, Leg, Load
from ds_muon.preview.subject import PlannedRun, Subject

# What NCCL allocates per peer and direction for sends and receives: one channel's NCCL_BUFFSIZE.
_CONNECTION_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What predicted times follow from; None: no times.

    Attributes:
        flops: Newton-Schulz flops per second of one rank.
        bandwidth: bytes per second that one rank receives.
        latency: seconds per collective or message.
    """

    flops: float
    bandwidth: float
    latency: float = 10e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Elements that a rank receives per optimizer step, without accumulation.

    Attributes:
        gradients, parameters: ZeRO's own legs, from the stage's formulas.
        exchange_mean, exchange_busiest: pieces of matrices, counted from the plan.
        replicate: between replicas (HSDP): gradients reduced, updates published.
        seconds: predicted, of everything that is not hidden, at the given rates.
    """

    optimizer: str
    gradients: float
    parameters: float
    exchange_mean: float = 0.0
    exchange_busiest: float = 0.0
    replicate: float = 0.0
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A run's plans with what their buckets move; counting a large world takes a second."""

    run: PlannedRun
    loads: dict[int, list[Load]]
    legs: dict[int, list[Leg]]

    def received(self) -> list[int]:
        """Elements of the exchange that every rank receives."""
        return self._sums(lambda leg: leg.received)

    def padding(self) -> list[int]:
        """Of those, elements that carry nothing."""
        return self._sums(lambda leg: leg.padding)

    def _sums(self, numbers: Callable[[Leg], Sequence[int]]) -> list[int]:
        def totals(plan: Plan) -> list[int]:
            legs = self.legs[id(plan)]
            return [sum(numbers(leg)[r] for leg in legs) for r in range(plan.layout.world_size)]

        found = self.run.per_rank(totals)
        return [sum(of_rank) for of_rank in found]


def count(run: PlannedRun) -> Counted:
    """Count the buckets of all plans."""
    loads = {id(plan): plan.loads() for plan in run.plans}
    legs = {id(plan): plan.legs(loads[id(plan)]) for plan in run.plans}
    return Counted(run=run, loads=loads, legs=legs)


def ns_seconds(run: PlannedRun, rates: Rates | None) -> float | None:
    """Predict Newton-Schulz on the critical path, if anything says how fast it runs."""
    if not run.sets:
        return None
    # Units are of one table, so that all plans with matrices have the same.
    unit = next((plan.unit_seconds for plan in run.plans if plan.unit_seconds), None)
    if unit is None and rates is not None:
        unit = 1 / rates.flops
    return None if unit is None else run.makespan() * unit


def communicator_bytes(counted: Counted) -> int:
    """Estimate a rank's connections: to all it exchanges with, or to two in a ring."""
    peers = 0
    for plan in counted.run.plans:
        others = plan.layout.world_size - 1
        if plan.exchange in PERSONAL:
            busiest = max(
                (n for load in counted.loads[id(plan)] for n in load.peers_out), default=0
            )
            peers = max(peers, min(others, busiest))
        elif any(route.moving(way_in=False) for route in plan.routes):
            peers = max(peers, min(others, 2))
    return peers * 2 * _CONNECTION_BYTES


def exchange_seconds(subject: Subject, counted: Counted, rates: Rates) -> float:
    """Predict the exchange of the slowest row: its busiest rank in each bucket and way."""
    run = counted.run
    return max(
        sum(_leg_seconds(subject, counted.legs[id(plan)], rates) for plan in run.row(replica))
        for replica in range(run.replicas)
    )


def _leg_seconds(subject: Subject, legs: Sequence[Leg], rates: Rates) -> float:
    """Legs alternate in, out."""
    total = 0.0
    sizes = (subject.spec.wire_dtype.itemsize, subject.spec.update_dtype.itemsize)
    for number, leg in enumerate(legs):
        nbytes = max(leg.received, default=0) * sizes[number % 2]
        total += nbytes / rates.bandwidth + max(leg.calls, default=0) * rates.latency
    return total


def traffic(subject: Subject, counted: Counted, rates: Rates | None) -> tuple[Traffic, ...]:
    """Elements per rank and step at DeepSpeed's defaults.

    Under accumulation ZeRO-3 gathers parameters, and ZeRO-2 and 3 reduce gradients, once per
    micro-batch; `reshard_after_forward: false` gathers matrices once per step.

    ZeRO-1/2 reduces gradients by all-reduce (2U); DMuon by reduce_scatter (U), if nothing keeps it.
    The built-in Muon all-reduces whole gradients at stage 3 (2U), and gathers momentum and updates.
    AdamW and the built-in are shown without replicas, which DeepSpeed does not offer them.
    """
    stage, run = subject.settings.stage, counted.run
    total = subject.matrix_numel + subject.rest_numel
    share = (run.world_size - 1) / run.world_size
    matrices, everything = share * subject.matrix_numel, share * total
    gradients = {0: 2, 1: 2, 2: 2, 3: 1}[stage] * everything
    parameters = {0: 0, 1: 1, 2: 1, 3: 2}[stage] * everything
    rows = [Traffic(optimizer="AdamW", gradients=gradients, parameters=parameters)]
    rows.append(_dmuon(subject, counted))
    if stage:
        built_in = Traffic(optimizer="built-in Muon", gradients=gradients, parameters=parameters)
        if stage == 3:
            built_in = replace(
                built_in,
                gradients=2 * everything,
                exchange_mean=2 * matrices,
                exchange_busiest=2 * matrices,
            )
        rows.append(built_in)
    if rates is None:
        return tuple(rows)
    return tuple(replace(row, seconds=_seconds(subject, counted, row, rates)) for row in rows)


def _dmuon(subject: Subject, counted: Counted) -> Traffic:
    stage, run, config = subject.settings.stage, counted.run, subject.config
    size = run.shard_size
    share, copies = (size - 1) / size, (run.replicas - 1) / run.replicas
    matrices, everything = subject.matrix_numel, subject.matrix_numel + subject.rest_numel
    parameters = {0: 0, 1: 1, 2: 1, 3: 2}[stage] * share * everything
    if stage == 3 and config.reshard_after_forward is False:
        parameters -= share * matrices
    if config.param_source == "owner_broadcast":
        parameters += share * matrices / size
    received = counted.received()
    return Traffic(
        optimizer="DMuon",
        gradients=subject.gradient_legs * share * everything,
        parameters=parameters,
        exchange_mean=sum(received) / run.world_size,
        exchange_busiest=float(max(received, default=0)),
        # Matrices: reduced to one replica and published from it. The rest: all-reduced.
        replicate=2 * copies * everything / (size if stage else 1) if run.replicas > 1 else 0.0,
    )


def _seconds(subject: Subject, counted: Counted, row: Traffic, rates: Rates) -> float:
    element = 2 if subject.low_precision else 4
    zero = row.gradients + row.parameters + row.replicate
    exchange = row.exchange_mean * element / rates.bandwidth
    if row.optimizer == "DMuon":
        exchange = exchange_seconds(subject, counted, rates)
    return zero * element / rates.bandwidth + exchange
