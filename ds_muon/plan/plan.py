# SPDX-License-Identifier: Apache-2.0
"""Plan: owners, buckets and routes of one layout, frozen and hashable.

Owns: the one entry point of this package, and the digest that ranks compare.
Never does: communicate; comm/agreement.py compares the digests.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ds_muon.plan.buckets import Oversize, form_buckets
from ds_muon.plan.costs import CostModel
from ds_muon.plan.layout import Layout
from ds_muon.plan.owners import assign_owners
from ds_muon.plan.routes import BucketRoute, route_bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every rank does with the matrices of one layout in one step.

    Attributes:
        owners: rank per matrix.
        flops: of one orthogonalisation, per matrix.
        routes: one per micro-bucket, in the order of the step.
        oversize: matrices that exceed the workspace cap by themselves.
    """

    layout: Layout
    owners: tuple[int, ...]
    flops: tuple[int, ...]
    routes: tuple[BucketRoute, ...]
    oversize: tuple[Oversize, ...]

    def digest(self) -> str:
        """Hash of what the routes follow from; equal on all ranks, or they must not start."""
        buckets = tuple(route.matrices for route in self.routes)
        return hashlib.sha256(repr((self.layout, self.owners, buckets)).encode()).hexdigest()

    def exchange_numel(self, rank: int) -> int:
        """Elements that `rank` receives in one step, both ways, self-sends not counted."""
        return sum(
            route.received_numel(rank, way_in=way_in)
            for route in self.routes
            for way_in in (True, False)
        )

    def owner_flops(self) -> tuple[int, ...]:
        """Newton-Schulz flops per rank and step."""
        loads = [0] * self.layout.world_size
        for owner, flops in zip(self.owners, self.flops, strict=True):
            loads[owner] += flops
        return tuple(loads)


def build_plan(layout: Layout, model: CostModel, *, owner_scope: str, workspace_bytes: int) -> Plan:
    """Plan one layout; a pure function of its arguments."""
    flops = tuple(model.flops(m.rows, m.cols) for m in layout.matrices)
    owners = assign_owners(layout, flops, scope=owner_scope)
    buckets, oversize = form_buckets(layout, owners, model, cap_bytes=workspace_bytes)
    return Plan(
        layout=layout,
        owners=owners,
        flops=flops,
        routes=tuple(route_bucket(layout, owners, bucket) for bucket in buckets),
        oversize=oversize,
    )
