# SPDX-License-Identifier: Apache-2.0
"""The step: momentum, exchange in, Newton-Schulz, exchange out, update; bucket by bucket.

Owns: the order of these for a set of leaves that are stepped together, in every regime.
Never does: know which ZeRO stage laid the leaves out, or touch an optimizer's state dict.

Bits: Newton-Schulz sees a whole matrix, in its own aligned memory, one matrix at a time, and the
elementwise parts work on fragments that the layout fixes; so owners, buckets, strategy, overlap and
the workspace cap cannot change a result.

Overlap: with two buckets in flight the next bucket's way in and the last one's way out run under
this one's Newton-Schulz. Every rank issues in(0), in(1), out(0), in(2), out(1), ... in this order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_muon.comm.strategies import Slot
from ds_muon.comm.transport import Pending, Transport
from ds_muon.ortho.backends import Backend, orthogonalize_into
from ds_muon.ortho.memory import iterate_views
from ds_muon.ortho.update import advance_momentum, apply_update, write_direction
from ds_muon.plan.layout import Fragment
from ds_muon.plan.memory import buffer_sets
from ds_muon.plan.plan import Plan
from ds_muon.run.arena import Arena
from ds_muon.run.crossing import Crossing, SameMemory
from ds_muon.run.metrics import Recorder
from ds_muon.run.publish import Length, Publisher, update_factor
from ds_muon.run.schedule import BucketSchedule, OwnedMatrix, schedule
from ds_muon.run.views import packed, view


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafStep:
    """One leaf in one step.

    Attributes:
        weights: flat (numel,), the master weights, updated in place.
        momentum: flat, momentum_buffer, updated in place; (numel,), or of this replica's matrices.
        grad: flat (numel,), fp32, reduced, unscaled and clipped.
        lr, weight_decay, mu: of the leaf's parameter group.
    """

    weights: Tensor
    momentum: Tensor
    grad: Tensor
    lr: float
    weight_decay: float
    mu: float


class StepEngine:
    """Runs the matrix half of steps over one transport, for any number of plans.

    Args:
        backend: how and where Newton-Schulz runs; the exchange runs there too.
        plans: every plan that will be run, so that the buffers are sized once.
        crossing: how pieces get there from the leaves; None: the leaves are there.
        inflight: buckets whose exchange may be under way at a time.
        keep_buffers: hold the working memory between steps.
        publisher: takes this row's updates to the other replicas, if there are any.

    Attributes:
        device: where exchange and Newton-Schulz run.
        crosses: whether leaves are elsewhere.
        recorder: observes the steps it is active in, if there is one.
    """

    def __init__(
        self,
        transport: Transport,
        backend: Backend,
        plans: Sequence[Plan],
        *,
        inflight: int,
        keep_buffers: bool,
        crossing: Crossing | None = None,
        publisher: Publisher | None = None,
    ) -> None:
        self.transport = transport
        self.backend, self.device = backend, backend.device
        self.crosses = crossing is not None
        self.publisher = publisher
        self.recorder: Recorder | None = None
        self._spec = spec = backend.spec
        self._keep = keep_buffers
        self._plans = tuple(plans)
        self._overlap = inflight > 1
        self._crossing: Crossing = SameMemory() if crossing is None else crossing
        self._schedules = [schedule(plan, transport.rank) for plan in plans]
        self._factors = [
            tuple(update_factor(spec, m) for m in plan.layout.matrices) for plan in plans
        ]
        rank = transport.rank
        self.arena = Arena(
            exchange_bytes=max((p.exchange_bytes[rank] for p in plans), default=0),
            sets=buffer_sets(inflight),
            iterate_bytes=max((p.iterate_bytes[rank] for p in plans), default=0),
            device=self.device,
            keep=keep_buffers,
        )

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans, in the order of `run`'s index."""
        return self._plans

    @torch.no_grad()
    def run(self, plan_index: int, leaves: Sequence[LeafStep]) -> None:
        """Step the leaves of one plan; every rank calls it for the same plan."""
        buckets = self._schedules[plan_index]
        arriving: dict[int, list[Pending]] = {}
        leaving: dict[int, list[Pending]] = {}
        for number, bucket in enumerate(buckets):
            ahead = min(number + 1, len(buckets) - 1) if self._overlap else number
            for coming in range(number, ahead + 1):
                if coming not in arriving:
                    with self._phase(plan_index, coming, "in"):
                        arriving[coming] = self._start_in(coming, buckets[coming], leaves)
            with self._phase(plan_index, number, "in"):
                _wait(arriving[number])
            with self._phase(plan_index, number, "ns"):
                for owned in bucket.owned:
                    self._run_owned(owned, plan_index, number, leaves)
            with self._phase(plan_index, number, "out"):
                leaving[number] = self._start_out(number, bucket)
            done = number - 1 if self._overlap else number
            if done in leaving:
                self._finish(plan_index, done, leaving.pop(done), leaves)
        for number, pending in leaving.items():
            self._finish(plan_index, number, pending, leaves)
        if self.publisher is not None:
            for number in range(len(buckets), self.publisher.buckets(plan_index)):
                self.publisher.launch(plan_index, number, _length(leaves))
            if not self.publisher.hidden:
                self.publisher.settle()
        self.arena.release()
        if not self._keep:
            self.backend.forget()

    def _finish(
        self, plan: int, number: int, pending: list[Pending], leaves: Sequence[LeafStep]
    ) -> None:
        """End a bucket: the way out, and the way to the other replicas."""
        with self._phase(plan, number, "out"):
            self._finish_out(plan, number, pending, leaves)
        if self.publisher is not None:
            self.publisher.launch(plan, number, _length(leaves))

    def _phase(self, plan: int, bucket: int, name: str) -> contextlib.AbstractContextManager[None]:
        if self.recorder is not None and self.recorder.active:
            return self.recorder.phase(plan, bucket, name)
        return contextlib.nullcontext()

    def _start_in(
        self, number: int, bucket: BucketSchedule, leaves: Sequence[LeafStep]
    ) -> list[Pending]:
        """Advance momentum of everything that is not owned here, and send its direction off."""
        way, wire = bucket.way_in, self._spec.wire_dtype
        sent = self.arena.send(number, bucket.buffers, wire, way_in=True)
        for slot in way.sends:
            if slot.piece is None:
                raise AssertionError("only pieces travel in")
            self._direction(slot.piece.fragment, leaves, out=_in_buffer(sent, slot))
        for fragment in bucket.replicas:
            leaf = leaves[fragment.leaf]
            momentum, grad = _momentum(leaf.momentum, fragment), _range(leaf.grad, fragment)
            advance_momentum(momentum, grad, momentum=leaf.mu)
        received = self.arena.receive(number, bucket.buffers, wire, way_in=True)
        return way.start(self.transport, received, sent)

    def _direction(self, fragment: Fragment, leaves: Sequence[LeafStep], *, out: Tensor) -> None:
        leaf = leaves[fragment.leaf]
        momentum, grad = _momentum(leaf.momentum, fragment), _range(leaf.grad, fragment)
        advance_momentum(momentum, grad, momentum=leaf.mu)
        for u, held, new in self._crossing.outgoing(out, momentum, grad):
            write_direction(
                u,
                held,
                new,
                momentum=leaf.mu,
                nesterov=self._spec.nesterov,
                rounded_to=self._spec.wire_dtype,
            )

    def _run_owned(
        self,
        owned: OwnedMatrix,
        plan: int,
        number: int,
        leaves: Sequence[LeafStep],
    ) -> None:
        """Assemble one matrix, orthogonalise it, update the local part, pack the rest."""
        spec, shape = self._spec, (owned.matrix.rows, owned.matrix.cols)
        bucket, factor = self._schedules[plan][number], self._factors[plan][owned.index]
        x, matrix, scratch = iterate_views(self.arena.iterate(), *shape, spec, self.backend.storage)
        assembled = matrix.view(-1)
        received = self.arena.receive(number, bucket.buffers, spec.wire_dtype, way_in=True)
        for slot in owned.arrivals:
            _in_matrix(assembled, slot).copy_(_in_buffer(received, slot))
        for fragment in owned.local:
            self._direction(fragment, leaves, out=_fragment(assembled, fragment))
        update = orthogonalize_into(x, matrix, self.backend, scratch).view(-1)
        if self.recorder is not None and self.recorder.active:
            self.recorder.matrix(update, leaves[owned.leaf].lr * factor)
        sent = self.arena.send(number, bucket.buffers, spec.update_dtype, way_in=False)
        for slot in owned.departures:
            _in_buffer(sent, slot).copy_(_in_matrix(update, slot))
        for fragment in owned.local:
            self._apply(plan, fragment, leaves, _fragment(update, fragment), factor)

    def _start_out(self, number: int, bucket: BucketSchedule) -> list[Pending]:
        dtype = self._spec.update_dtype
        sent = self.arena.send(number, bucket.buffers, dtype, way_in=False)
        received = self.arena.receive(number, bucket.buffers, dtype, way_in=False)
        return bucket.way_out.start(self.transport, received, sent)

    def _finish_out(
        self, plan: int, number: int, pending: list[Pending], leaves: Sequence[LeafStep]
    ) -> None:
        _wait(pending)
        bucket, factors = self._schedules[plan][number], self._factors[plan]
        dtype = self._spec.update_dtype
        received = self.arena.receive(number, bucket.buffers, dtype, way_in=False)
        for slot in bucket.way_out.receives:
            if slot.piece is None:
                raise AssertionError("a holder reads pieces")
            update = _in_buffer(received, slot)
            self._apply(plan, slot.piece.fragment, leaves, update, factors[slot.matrix])

    def _apply(
        self,
        plan: int,
        fragment: Fragment,
        leaves: Sequence[LeafStep],
        update: Tensor,
        factor: float,
    ) -> None:
        leaf = leaves[fragment.leaf]
        for step, weights in self._crossing.incoming(update, _range(leaf.weights, fragment)):
            apply_update(weights, step, lr=leaf.lr, weight_decay=leaf.weight_decay, scale=factor)
        if self.publisher is not None:
            self.publisher.pack(plan, fragment, update)


def _wait(pending: Sequence[Pending]) -> None:
    for handle in pending:
        handle.wait()


def _length(leaves: Sequence[LeafStep]) -> Length:
    """What a published update is applied with; ZeRO makes one leaf of what is stepped together."""
    [leaf] = leaves
    return Length(weights=leaf.weights, lr=leaf.lr, weight_decay=leaf.weight_decay)


def _range(leaf: Tensor, fragment: Fragment) -> Tensor:
    return view(leaf, fragment.place)


def _momentum(buffer: Tensor, fragment: Fragment) -> Tensor:
    held = view(buffer, fragment.momentum)
    return held if held.shape == fragment.place.shape else held.view(fragment.place.shape)


def _fragment(matrix: Tensor, fragment: Fragment) -> Tensor:
    return packed(matrix, fragment.matrix_offset, fragment.place)


def _in_matrix(matrix: Tensor, slot: Slot) -> Tensor:
    return _slice(matrix, slot.matrix_offset, slot)


def _in_buffer(buffer: Tensor, slot: Slot) -> Tensor:
    return _slice(buffer, slot.buffer_offset, slot)


def _slice(flat: Tensor, offset: int, slot: Slot) -> Tensor:
    if slot.piece is None:
        return flat[offset : offset + slot.numel]
    return packed(flat, offset, slot.piece.fragment.place)
