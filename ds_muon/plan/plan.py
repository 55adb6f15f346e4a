# SPDX-License-Identifier: Apache-2.0
"""Plan: owners, buckets, routes and the exchange strategy of one layout, frozen and hashable.

Owns: the one entry point of this package, and the digest that ranks compare.
Never does: communicate; comm/agreement.py compares the digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_muon.plan.buckets import Oversize, form_buckets
from ds_muon.plan.costs import CostModel
from ds_muon.plan.layout import Layout
from ds_muon.plan.memory import Workspace
from ds_muon.plan.owners import assign_owners
from ds_muon.plan.routes import BucketRoute, route_bucket
from ds_muon.plan.traffic import PERSONAL, STRATEGIES, Leg, Load, leg, load_of

# A collective or message costs about as much as this many bytes on the wire (10 us at 25 GB/s).
CALL_BYTES = 250_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every rank does with the matrices of one layout in one step.

    Attributes:
        owners: rank per matrix.
        flops: of one orthogonalisation, per matrix.
        costs: what owners are balanced by: flops, or measured time.
        unit_seconds: seconds that a cost of 1 stands for, where time was measured.
        routes: one per micro-bucket, in the order of the step.
        workspace: memory and strategy; its `exchange` is one of plan/traffic.py's.
        oversize: matrices that exceed the workspace cap by themselves.
        exchange_bytes: per rank, buffers of its largest bucket; `workspace.sets` of them live.
        iterate_bytes: per rank, of the largest matrix it owns.
    """

    layout: Layout
    owners: tuple[int, ...]
    flops: tuple[int, ...]
    costs: tuple[int, ...]
    unit_seconds: float | None
    routes: tuple[BucketRoute, ...]
    workspace: Workspace
    oversize: tuple[Oversize, ...]
    exchange_bytes: tuple[int, ...]
    iterate_bytes: tuple[int, ...]

    @property
    def exchange(self) -> str:
        """The exchange strategy."""
        return self.workspace.exchange

    def in_layout_order(self) -> Plan:
        """Return the same plan with its buckets ordered by their first matrix."""
        return replace(self, routes=tuple(sorted(self.routes, key=lambda r: min(r.matrices))))

    def peak_bytes(self) -> tuple[int, ...]:
        """Exchange and iteration at their worst, per rank."""
        fixed, sets = self.workspace.staging_bytes, self.workspace.sets
        return tuple(
            sets * exchange + iterate + fixed
            for exchange, iterate in zip(self.exchange_bytes, self.iterate_bytes, strict=True)
        )

    def makespan(self) -> int:
        """Cost on the critical path: all ranks meet at every bucket's exchange."""
        total = 0
        for route in self.routes:
            loads = [0] * self.layout.world_size
            for index in route.matrices:
                loads[self.owners[index]] += self.costs[index]
            total += max(loads)
        return total

    def digest(self) -> str:
        """Hash of what the routes follow from; equal on all ranks, or they must not start."""
        buckets = tuple(route.matrices for route in self.routes)
        facts = (self.layout, self.owners, self.costs, buckets, self.workspace)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def legs(self, loads: Sequence[Load] | None = None) -> list[Leg]:
        """Traffic of every bucket, way in then way out; `loads` are the plan's, if at hand."""
        return [
            leg(self.exchange, load, way_in=way_in)
            for load in (self.loads() if loads is None else loads)
            for way_in in (True, False)
        ]

    def loads(self) -> list[Load]:
        """What every bucket moves, whatever the strategy."""
        found = []
        for route in self.routes:
            owned = [0] * self.layout.world_size
            for index in route.matrices:
                owned[self.owners[index]] += self.layout.matrices[index].numel
            found.append(load_of(route, owned))
        return found

    def oversize_warning(self, workspace_mb: int) -> str | None:
        """Say how many matrices exceed the cap and what the largest needs; None if none does."""
        if not self.oversize:
            return None
        worst = max(self.oversize, key=lambda o: o.need_bytes)
        return (
            f"{len(self.oversize)} of {len(self.owners)} matrices exceed workspace_mb = "
            f"{workspace_mb} by themselves and run with what they need, {worst.matrix} with "
            f"{worst.need_bytes / 2**20:,.0f} MiB on its owner; raise workspace_mb to share "
            "buckets, or set adamw_above_mb to train the largest with AdamW"
            + ("" if self.exchange in PERSONAL else f"; {PERSONAL[0]} needs smaller buffers")
        )

    def received_numel(self) -> tuple[int, ...]:
        """Elements per rank that arrive from others in one step, padding included."""
        received = [0] * self.layout.world_size
        for item in self.legs():
            received = [total + numel for total, numel in zip(received, item.received, strict=True)]
        return tuple(received)

    def owner_flops(self) -> tuple[int, ...]:
        """Newton-Schulz flops per rank and step."""
        return self._per_owner(self.flops)

    def owner_costs(self) -> tuple[int, ...]:
        """Costs per rank and step."""
        return self._per_owner(self.costs)

    def _per_owner(self, values: Sequence[int]) -> tuple[int, ...]:
        loads = [0] * self.layout.world_size
        for owner, value in zip(self.owners, values, strict=True):
            loads[owner] += value
        return tuple(loads)


def build_plan(layout: Layout, model: CostModel, *, owner_scope: str, workspace: Workspace) -> Plan:
    """Plan one layout; a pure function of its arguments.

    Args:
        workspace: its `exchange` may be "auto": the strategy with the least predicted cost.
    """
    costs = model.costs(layout.matrices)
    owners = assign_owners(layout, costs, scope=owner_scope)
    if workspace.exchange != "auto":
        return _with_strategy(layout, model, owners, costs, workspace)
    # The strategies are compared on the buckets of the one whose buffers are smallest.
    first = replace(workspace, exchange=STRATEGIES[0])
    plan = _with_strategy(layout, model, owners, costs, first)
    loads = plan.loads()
    best = min(STRATEGIES, key=lambda s: exchange_cost_bytes(loads, s, workspace.wire_bytes))
    if best == plan.exchange:
        return plan
    return _with_strategy(layout, model, owners, costs, replace(workspace, exchange=best))


def _with_strategy(
    layout: Layout,
    model: CostModel,
    owners: tuple[int, ...],
    costs: tuple[int, ...],
    workspace: Workspace,
) -> Plan:
    buckets = form_buckets(layout, owners, costs, model, workspace)
    return Plan(
        layout=layout,
        owners=owners,
        flops=tuple(model.flops(m.rows, m.cols) for m in layout.matrices),
        costs=costs,
        unit_seconds=model.unit_seconds(layout.matrices),
        routes=tuple(route_bucket(layout, owners, bucket) for bucket in buckets.matrices),
        workspace=workspace,
        oversize=buckets.oversize,
        exchange_bytes=buckets.exchange_bytes,
        iterate_bytes=buckets.iterate_bytes,
    )


def exchange_cost_bytes(loads: Sequence[Load], exchange: str, element_bytes: int) -> int:
    """Predicted cost of a strategy on its busiest rank, calls counted as bytes."""
    legs = [leg(exchange, load, way_in=way_in) for load in loads for way_in in (True, False)]
    ranks = range(len(loads[0].owned)) if loads else ()
    return max(
        (sum(i.received[r] * element_bytes + i.calls[r] * CALL_BYTES for i in legs) for r in ranks),
        default=0,
    )
