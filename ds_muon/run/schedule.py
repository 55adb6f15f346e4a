# SPDX-License-Identifier: Apache-2.0
"""Schedule: a plan as one rank runs it, bucket by bucket.

Owns: which matrices this rank owns in a bucket, what arrives for them and departs from them, and
where both ways stand in the exchange buffers. Integers only.
Never does: run anything (step.py), choose anything (plan/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_muon.comm.strategies import Slot, Way, plan_way
from ds_muon.plan.layout import Fragment, Matrix
from ds_muon.plan.memory import Buffers, buffers
from ds_muon.plan.plan import Plan
from ds_muon.plan.routes import BucketRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedMatrix:
    """One matrix of a bucket on its owner: what arrives, what is here, what departs.

    Attributes:
        leaf: the leaf that holds its pieces, the same on all ranks.
    """

    index: int
    matrix: Matrix
    leaf: int
    arrivals: tuple[Slot, ...]
    local: tuple[Fragment, ...]
    departures: tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSchedule:
    """One bucket on this rank.

    Attributes:
        owned: matrices that this rank orthogonalises.
        replicas: local copies of matrices that are owned elsewhere.
        buffers: where both ways stand in the bucket's exchange memory.
    """

    way_in: Way
    way_out: Way
    owned: tuple[OwnedMatrix, ...]
    replicas: tuple[Fragment, ...]
    buffers: Buffers


def schedule(plan: Plan, rank: int) -> tuple[BucketSchedule, ...]:
    """Derive what `rank` does from the plan of all."""
    return tuple(_bucket(plan, route, rank) for route in plan.routes)


def _bucket(plan: Plan, route: BucketRoute, rank: int) -> BucketSchedule:
    layout = plan.layout
    numels = [m.numel for m in layout.matrices]
    way_in = plan_way(plan.exchange, route, numels, rank, way_in=True)
    way_out = plan_way(plan.exchange, route, numels, rank, way_in=False)
    arrivals, departures = _by_matrix(way_in.receives), _by_matrix(way_out.sends)
    local = {
        index: tuple(f for f in layout.fragments[index] if f.rank == rank)
        for index in route.matrices
    }
    owned = tuple(
        OwnedMatrix(
            index=index,
            matrix=layout.matrices[index],
            leaf=layout.fragments[index][0].leaf,
            arrivals=arrivals.get(index, ()),
            local=local[index],
            departures=departures.get(index, ()),
        )
        for index in route.matrices
        if plan.owners[index] == rank
    )
    replicas = tuple(
        fragment
        for index in route.matrices
        if layout.is_replicated(index) and plan.owners[index] != rank
        for fragment in local[index]
    )
    return BucketSchedule(
        way_in=way_in,
        way_out=way_out,
        owned=owned,
        replicas=replicas,
        buffers=buffers(
            plan.workspace,
            send_in=way_in.send_numel,
            receive_in=way_in.receive_numel,
            send_out=way_out.send_numel,
            receive_out=way_out.receive_numel,
        ),
    )


def _by_matrix(slots: Sequence[Slot]) -> dict[int, tuple[Slot, ...]]:
    found: dict[int, list[Slot]] = {}
    for slot in slots:
        found.setdefault(slot.matrix, []).append(slot)
    return {index: tuple(items) for index, items in found.items()}
