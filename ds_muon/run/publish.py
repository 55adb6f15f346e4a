# SPDX-License-Identifier: Apache-2.0
"""Publish: updates to the other replicas, packed per bucket, hidden behind the next forward.

A bucket's updates are packed as they are applied in the owning replica, in the compute dtype they
have there, and broadcast down the columns when the bucket is done. The others apply the same update
to their own leaves with the lr and decay of the step it belongs to, so that master weights stay
bit-equal. Nothing waits in the step; who needs a matrix settles it.

Owns: buffers and handles of updates under way, and the order in which they are issued: bucket after
bucket, and replica after replica in it, whatever this rank has to send.
Never does: decide by what has arrived which collective comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_muon.comm.transport import Pending, Transport
from ds_muon.ortho.recipes import OrthoSpec
from ds_muon.ortho.update import apply_update, lr_factor
from ds_muon.plan.layout import Fragment, Matrix
from ds_muon.plan.replicas import Message
from ds_muon.run.clock import Clock
from ds_muon.run.streams import StreamOrder
from ds_muon.run.views import packed, view


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """The leaf that a plan steps, and by how much; captured in the step.

    Attributes:
        weights: flat (numel,), the leaf's master weights.
    """

    weights: Tensor
    lr: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Travelling:
    plan: int
    message: Message
    names: frozenset[str]
    buffer: Tensor
    pending: Pending
    length: Length
    stream: torch.Stream | None


class Publisher:
    """Sends, receives and applies published updates on one rank.

    Args:
        transport: over the ranks of this column; its rank is this replica.
        tables: per plan, plan/replicas.py's messages of this column.
        arrived: called with a plan's index and a fragment that an update has changed.
        hidden: leave updates under way when a step ends; otherwise it ends with all applied.

    Attributes:
        peak_numel: most elements of updates that were under way at a time.
    """

    def __init__(
        self,
        transport: Transport,
        spec: OrthoSpec,
        tables: Sequence[Sequence[Sequence[Message]]],
        *,
        device: torch.device,
        arrived: Callable[[int, Fragment], None],
        hidden: bool,
    ) -> None:
        self._transport, self._spec, self._tables = transport, spec, tables
        self._device, self._arrived = device, arrived
        self._clock, self._streams = Clock(device), StreamOrder(device)
        self.hidden = hidden
        self._slots = [
            {
                part.fragment: (number, part.offset)
                for number, bucket in enumerate(table)
                for message in bucket
                if message.replica == transport.rank
                for part in message.parts
            }
            for table in tables
        ]
        self._packing: dict[int, Tensor] = {}
        self._travelling: list[_Travelling] = []
        self._waits: list[tuple[object, object]] = []
        self.peak_numel = 0

    @property
    def pending(self) -> bool:
        """Whether anything is under way."""
        return bool(self._travelling)

    def pack(self, plan: int, fragment: Fragment, update: Tensor) -> None:
        """Take the update of one piece of an own matrix, in its place's shape."""
        number, offset = self._slots[plan][fragment]
        if number not in self._packing:
            self._packing[number] = self._buffer(
                next(m for m in self._tables[plan][number] if m.replica == self._transport.rank)
            )
        packed(self._packing[number], offset, fragment.place).copy_(update)

    def launch(self, plan: int, number: int, length: Length) -> None:
        """Broadcast bucket `number` of every replica; a rank that has fewer buckets receives."""
        for message in self._tables[plan][number]:
            own = message.replica == self._transport.rank
            buffer = self._packing.pop(number) if own else self._buffer(message)
            self._travelling.append(
                _Travelling(
                    plan=plan,
                    message=message,
                    names=frozenset(part.matrix.name for part in message.parts),
                    buffer=buffer,
                    pending=self._transport.broadcast(buffer, source=message.replica),
                    length=length,
                    stream=self._streams.current(),
                )
            )
        under_way = sum(item.message.numel for item in self._travelling)
        self.peak_numel = max(self.peak_numel, under_way)

    def buckets(self, plan: int) -> int:
        """Most buckets that any replica has in a plan."""
        return len(self._tables[plan])

    def _buffer(self, message: Message) -> Tensor:
        return torch.empty(message.numel, dtype=self._spec.update_dtype, device=self._device)

    @torch.no_grad()
    def settle(self, names: Collection[str] | None = None) -> None:
        """Wait for the updates of some matrices, by name, or of all, and apply them; local."""
        left: list[_Travelling] = []
        for item in self._travelling:
            if names is not None and item.names.isdisjoint(names):
                left.append(item)
                continue
            # The leaf and its 16-bit copy were written in the step, on the stream of the launch.
            self._streams.follow(item.stream, item.buffer)
            start = self._clock.mark()
            item.pending.wait()
            if self.hidden:
                self._waits.append((start, self._clock.mark()))
            if item.message.replica != self._transport.rank:
                self._apply(item)
        if len(left) < len(self._travelling):
            self._streams.finish()
        self._travelling = left
        if names is None:
            self._streams.join()

    def _apply(self, item: _Travelling) -> None:
        length = item.length
        for matrix, fragment, offset in item.message.parts:
            apply_update(
                view(length.weights, fragment.place),
                packed(item.buffer, offset, fragment.place),
                lr=length.lr,
                weight_decay=length.weight_decay,
                scale=update_factor(self._spec, matrix),
            )
            self._arrived(item.plan, fragment)

    def take_waited(self) -> float:
        """Milliseconds that `settle` has waited since the last call."""
        waited = sum(self._clock.between(start, end) for start, end in self._waits)
        self._waits.clear()
        return waited


def update_factor(spec: OrthoSpec, matrix: Matrix) -> float:
    """Factor on lr of one matrix: by the layer's outputs and inputs, whichever way it is stored."""
    rows, cols = (matrix.cols, matrix.rows) if matrix.transposed else (matrix.rows, matrix.cols)
    return lr_factor(spec.lr_scale, rows, cols)
