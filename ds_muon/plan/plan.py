# SPDX-License-Identifier: Apache-2.0
"""Plan: owners, buckets, routes and the exchange strategy of one layout, frozen and hashable.

Owns: the one entry point of this package, and the digest that ranks compare.
Never does: communicate; comm/agreement.py compares the digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_muon.plan.buckets import Oversize, Workspace, form_buckets
from ds_muon.plan.costs import CostModel
from ds_muon.plan.layout import Layout
from ds_muon.plan.owners import assign_owners
from ds_muon.plan.routes import BucketRoute, route_bucket
from ds_muon.plan.traffic import STRATEGIES, Leg, Load, leg, load_of

# A collective or message costs about as much as this many bytes on the wire (10 us at 25 GB/s).
CALL_BYTES = 250_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every rank does with the matrices of one layout in one step.

    Attributes:
        owners: rank per matrix.
        flops: of one orthogonalisation, per matrix.
        routes: one per micro-bucket, in the order of the step.
        exchange: the strategy, one of plan/traffic.py's.
        oversize: matrices that exceed the workspace cap by themselves.
        peak_bytes: exchange and iteration at their worst, on the rank that needs most.
    """

    layout: Layout
    owners: tuple[int, ...]
    flops: tuple[int, ...]
    routes: tuple[BucketRoute, ...]
    exchange: str
    oversize: tuple[Oversize, ...]
    peak_bytes: int

    def digest(self) -> str:
        """Hash of what the routes follow from; equal on all ranks, or they must not start."""
        buckets = tuple(route.matrices for route in self.routes)
        facts = (self.layout, self.owners, buckets, self.exchange)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def legs(self) -> list[Leg]:
        """Traffic of every bucket, way in then way out."""
        return [
            leg(self.exchange, load, way_in=way_in)
            for load in self.loads()
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
        )

    def received_numel(self) -> tuple[int, ...]:
        """Elements per rank that arrive from others in one step, padding included."""
        received = [0] * self.layout.world_size
        for item in self.legs():
            received = [total + numel for total, numel in zip(received, item.received, strict=True)]
        return tuple(received)

    def owner_flops(self) -> tuple[int, ...]:
        """Newton-Schulz flops per rank and step."""
        loads = [0] * self.layout.world_size
        for owner, flops in zip(self.owners, self.flops, strict=True):
            loads[owner] += flops
        return tuple(loads)


def build_plan(layout: Layout, model: CostModel, *, owner_scope: str, workspace: Workspace) -> Plan:
    """Plan one layout; a pure function of its arguments.

    Args:
        workspace: its `exchange` may be "auto": the strategy with the least predicted cost.
    """
    flops = tuple(model.flops(m.rows, m.cols) for m in layout.matrices)
    owners = assign_owners(layout, flops, scope=owner_scope)
    if workspace.exchange != "auto":
        return _with_strategy(layout, model, owners, flops, workspace)
    # The strategies are compared on the buckets of the one whose buffers are smallest.
    first = replace(workspace, exchange=STRATEGIES[0])
    plan = _with_strategy(layout, model, owners, flops, first)
    loads = plan.loads()
    best = min(STRATEGIES, key=lambda s: exchange_cost_bytes(loads, s, model.wire_bytes))
    if best == plan.exchange:
        return plan
    return _with_strategy(layout, model, owners, flops, replace(workspace, exchange=best))


def _with_strategy(
    layout: Layout,
    model: CostModel,
    owners: tuple[int, ...],
    flops: Sequence[int],
    workspace: Workspace,
) -> Plan:
    buckets = form_buckets(layout, owners, flops, model, workspace)
    return Plan(
        layout=layout,
        owners=owners,
        flops=tuple(flops),
        routes=tuple(route_bucket(layout, owners, bucket) for bucket in buckets.matrices),
        exchange=workspace.exchange,
        oversize=buckets.oversize,
        peak_bytes=buckets.peak_bytes,
    )


def exchange_cost_bytes(loads: Sequence[Load], exchange: str, element_bytes: int) -> int:
    """Predicted cost of a strategy on its busiest rank, calls counted as bytes."""
    legs = [leg(exchange, load, way_in=way_in) for load in loads for way_in in (True, False)]
    ranks = range(len(loads[0].owned)) if loads else ()
    return max(
        (sum(i.received[r] * element_bytes + i.calls[r] * CALL_BYTES for i in legs) for r in ranks),
        default=0,
    )
