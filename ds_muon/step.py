# SPDX-License-Identifier: Apache-2.0
"""The step: momentum, exchange in, Newton-Schulz, exchange out, update; bucket by bucket.

Owns: the order of these for a set of leaves that are stepped together, in every regime.
Never does: know which ZeRO stage laid the leaves out, or touch an optimizer's state dict.

Bits: Newton-Schulz sees a whole matrix, in its own aligned memory, one matrix at a time, and the
elementwise parts work on fragments that the layout fixes; so owners, buckets and the workspace
cap cannot change a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_muon.comm.exchange import ExchangeBuffers, Way, plan_way, run_way
from ds_muon.comm.transport import Transport
from ds_muon.ortho.newton_schulz import orthogonalize
from ds_muon.ortho.recipes import OrthoSpec
from ds_muon.ortho.update import advance_momentum, apply_update, lr_factor, write_direction
from ds_muon.plan.layout import Fragment, Matrix
from ds_muon.plan.plan import Plan
from ds_muon.plan.routes import BucketRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafStep:
    """One leaf in one step.

    Attributes:
        weights: flat (numel,), the master weights, updated in place.
        momentum: flat (numel,), momentum_buffer, updated in place.
        grad: flat (numel,), reduced, unscaled and clipped; None counts as zero.
        lr, weight_decay, mu: of the leaf's parameter group.
    """

    weights: Tensor
    momentum: Tensor
    grad: Tensor
    lr: float
    weight_decay: float
    mu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A range of a matrix and its place in the home buffer; all in elements."""

    home_offset: int
    matrix_offset: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnedMatrix:
    """One matrix of a bucket on its owner: what arrives, what is here, what departs."""

    index: int
    matrix: Matrix
    arrivals: tuple[_Span, ...]
    local: tuple[Fragment, ...]
    departures: tuple[_Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BucketSchedule:
    """One bucket as this rank runs it; `replicas` are local copies of matrices owned elsewhere."""

    way_in: Way
    way_out: Way
    owned: tuple[_OwnedMatrix, ...]
    replicas: tuple[Fragment, ...]


class StepEngine:
    """Runs the matrix half of steps over one transport, for any number of plans.

    Args:
        plans: every plan that will be run, so that the buffers are sized once.
        device: where exchange and Newton-Schulz run; leaves may live elsewhere (offload).
        keep_buffers: hold the exchange buffers between steps.
    """

    def __init__(
        self,
        transport: Transport,
        spec: OrthoSpec,
        plans: Sequence[Plan],
        *,
        device: torch.device,
        keep_buffers: bool,
    ) -> None:
        self.transport = transport
        self._spec = spec
        self._device = device
        self._schedules = [
            tuple(_schedule(plan, route, transport.rank) for route in plan.routes) for plan in plans
        ]
        self._factors = [
            tuple(_factor(spec.lr_scale, m) for m in plan.layout.matrices) for plan in plans
        ]
        self._plans = tuple(plans)
        # One element size for both ways lets a piece keep its place in the buffers.
        same_size = spec.wire_dtype.itemsize == spec.compute_dtype.itemsize
        self._dtype_in = spec.wire_dtype if same_size else torch.float32
        self._dtype_out = spec.compute_dtype if same_size else torch.float32
        ways = [w for s in self._schedules for b in s for w in (b.way_in, b.way_out)]
        itemsize = self._dtype_in.itemsize
        self.buffers = ExchangeBuffers(
            away_bytes=itemsize * max((w.away.numel for w in ways), default=0),
            home_bytes=itemsize * max((w.home.numel for w in ways), default=0),
            device=device,
            keep=keep_buffers,
        )

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans, in the order of `run`'s index."""
        return self._plans

    @torch.no_grad()
    def run(self, plan_index: int, leaves: Sequence[LeafStep]) -> None:
        """Step the leaves of one plan; every rank calls it for the same plan."""
        factors = self._factors[plan_index]
        for bucket in self._schedules[plan_index]:
            self._pack_directions(bucket, leaves)
            run_way(self.transport, bucket.way_in, self.buffers, dtype=self._dtype_in, way_in=True)
            for owned in bucket.owned:
                self._run_owned(owned, bucket, leaves, factors[owned.index])
            run_way(
                self.transport, bucket.way_out, self.buffers, dtype=self._dtype_out, way_in=False
            )
            self._apply_received(bucket, leaves, factors)
        self.buffers.release()

    def _pack_directions(self, bucket: _BucketSchedule, leaves: Sequence[LeafStep]) -> None:
        side = bucket.way_in.away
        away = self.buffers.away(side.numel, self._dtype_in)
        for piece, offset in side.slots:
            self._direction(piece.fragment, leaves, out=away[offset : offset + piece.numel])
        for fragment in bucket.replicas:
            leaf = leaves[fragment.leaf]
            advance_momentum(
                _range(leaf.momentum, fragment), _range(leaf.grad, fragment), momentum=leaf.mu
            )

    def _direction(self, fragment: Fragment, leaves: Sequence[LeafStep], *, out: Tensor) -> None:
        leaf = leaves[fragment.leaf]
        momentum, grad = _range(leaf.momentum, fragment), _range(leaf.grad, fragment)
        advance_momentum(momentum, grad, momentum=leaf.mu)
        write_direction(out, momentum, grad, momentum=leaf.mu, nesterov=self._spec.nesterov)
        if out.dtype != self._spec.wire_dtype:
            out.copy_(out.to(self._spec.wire_dtype))

    def _run_owned(
        self,
        owned: _OwnedMatrix,
        bucket: _BucketSchedule,
        leaves: Sequence[LeafStep],
        factor: float,
    ) -> None:
        """Assemble one matrix, orthogonalise it, update the local part, pack the rest."""
        matrix = owned.matrix
        assembled = torch.empty(matrix.numel, dtype=self._spec.wire_dtype, device=self._device)
        home = self.buffers.home(bucket.way_in.home.numel, self._dtype_in)
        for span in owned.arrivals:
            _span(assembled, span).copy_(_at_home(home, span))
        for fragment in owned.local:
            self._direction(fragment, leaves, out=_matrix_range(assembled, fragment))
        update = orthogonalize(assembled.view(matrix.rows, matrix.cols), self._spec).reshape(-1)
        home = self.buffers.home(bucket.way_out.home.numel, self._dtype_out)
        for span in owned.departures:
            _at_home(home, span).copy_(_span(update, span))
        for fragment in owned.local:
            self._apply(fragment, leaves, _matrix_range(update, fragment), factor)

    def _apply_received(
        self, bucket: _BucketSchedule, leaves: Sequence[LeafStep], factors: Sequence[float]
    ) -> None:
        side = bucket.way_out.away
        away = self.buffers.away(side.numel, self._dtype_out)
        for piece, offset in side.slots:
            update = away[offset : offset + piece.numel]
            self._apply(piece.fragment, leaves, update, factors[piece.matrix])

    def _apply(
        self, fragment: Fragment, leaves: Sequence[LeafStep], update: Tensor, factor: float
    ) -> None:
        leaf = leaves[fragment.leaf]
        weights = _range(leaf.weights, fragment)
        apply_update(
            weights,
            update.to(weights.device),
            lr=leaf.lr,
            weight_decay=leaf.weight_decay,
            scale=factor,
        )


def _factor(name: str, matrix: Matrix) -> float:
    rows, cols = (matrix.cols, matrix.rows) if matrix.transposed else (matrix.rows, matrix.cols)
    return lr_factor(name, rows, cols)


def _schedule(plan: Plan, route: BucketRoute, rank: int) -> _BucketSchedule:
    way_in = plan_way(route, rank, way_in=True)
    way_out = plan_way(route, rank, way_in=False)
    mine = [index for index in route.matrices if plan.owners[index] == rank]
    arrivals, departures = _spans_by_matrix(way_in), _spans_by_matrix(way_out)
    local = {
        index: tuple(f for f in plan.layout.fragments[index] if f.rank == rank)
        for index in route.matrices
    }
    owned = tuple(
        _OwnedMatrix(
            index=index,
            matrix=plan.layout.matrices[index],
            arrivals=arrivals.get(index, ()),
            local=local[index],
            departures=departures.get(index, ()),
        )
        for index in mine
    )
    replicas = tuple(
        fragment
        for index in route.matrices
        if plan.layout.is_replicated(index) and plan.owners[index] != rank
        for fragment in local[index]
    )
    return _BucketSchedule(way_in=way_in, way_out=way_out, owned=owned, replicas=replicas)


def _spans_by_matrix(way: Way) -> dict[int, tuple[_Span, ...]]:
    spans: dict[int, list[_Span]] = {}
    for piece, offset in way.home.slots:
        spans.setdefault(piece.matrix, []).append(
            _Span(
                home_offset=offset,
                matrix_offset=piece.fragment.matrix_offset,
                numel=piece.numel,
            )
        )
    return {index: tuple(found) for index, found in spans.items()}


def _range(leaf: Tensor, fragment: Fragment) -> Tensor:
    return leaf[fragment.leaf_offset : fragment.leaf_offset + fragment.numel]


def _matrix_range(matrix: Tensor, fragment: Fragment) -> Tensor:
    return matrix[fragment.matrix_offset : fragment.matrix_offset + fragment.numel]


def _span(matrix: Tensor, span: _Span) -> Tensor:
    return matrix[span.matrix_offset : span.matrix_offset + span.numel]


def _at_home(home: Tensor, span: _Span) -> Tensor:
    return home[span.home_offset : span.home_offset + span.numel]
