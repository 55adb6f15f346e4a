# SPDX-License-Identifier: Apache-2.0
"""Packed owners: low-precision weights of matrices, whole on their owner in one contiguous buffer.

After a step the pieces of a matrix go to its owner once; whoever needs matrices gets one packed
buffer per owner from a broadcast. The origin is DMuon's owner broadcast.

Owns: the owner's buffer, what in it is out of date, and both collectives.
Never does: know when a weight changes or who needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_muon.comm.transport import Pending, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedMatrix:
    """One matrix of a parameter.

    Attributes:
        parts: per rank, the range (start, stop) of the matrix that its shard holds; may be empty.
    """

    numel: int
    owner: int
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Matrices on their way: flat views by name, valid once all of `pending` were waited for."""

    views: Mapping[str, Tensor]
    pending: tuple[Pending, ...]


class PackedOwners:
    """Collects and broadcasts matrices of one dtype over the ranks that share a partitioning.

    Args:
        matrices: by name; the owner's buffer holds its own in this order.
        shard_of: name -> this rank's part of the matrix, flat.
    """

    def __init__(
        self,
        transport: Transport,
        matrices: Mapping[str, SourcedMatrix],
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard_of: Callable[[str], Tensor],
    ) -> None:
        self._transport, self._matrices, self._shard_of = transport, matrices, shard_of
        self._starts: dict[str, int] = {}
        filled = 0
        for name, matrix in matrices.items():
            if matrix.owner == transport.rank:
                self._starts[name] = filled
                filled += matrix.numel
        self.buffer = torch.empty(filled, dtype=dtype, device=device)
        self._stale = set(matrices)

    def invalidate(self, names: Iterable[str] | None = None) -> None:
        """Say that shards of some matrices, or of all, have changed; on all ranks alike."""
        self._stale.update(self._matrices if names is None else names)

    def fetch(self, names: Sequence[str]) -> Fetched:
        """Send matrices from their owners to all; every rank asks for the same, in any order."""
        names = sorted(names)
        self._collect([name for name in names if name in self._stale])
        views: dict[str, Tensor] = {}
        pending = []
        for owner in range(self._transport.world_size):
            chosen = [name for name in names if self._matrices[name].owner == owner]
            if not chosen:
                continue
            numels = [self._matrices[name].numel for name in chosen]
            if owner == self._transport.rank:
                packed = self._packed(chosen)
            else:
                packed = self.buffer.new_empty(sum(numels))
            pending.append(self._transport.broadcast(packed, source=owner))
            views.update(zip(chosen, packed.split(numels), strict=True))
        return Fetched(views=views, pending=tuple(pending))

    def _own(self, name: str) -> Tensor:
        start = self._starts[name]
        return self.buffer[start : start + self._matrices[name].numel]

    def _packed(self, names: Sequence[str]) -> Tensor:
        """Own matrices one after another: a view where they lie so, a copy otherwise."""
        starts = [self._starts[name] for name in names]
        ends = [
            start + self._matrices[name].numel for start, name in zip(starts, names, strict=True)
        ]
        if starts[1:] == ends[:-1]:
            return self.buffer[starts[0] : ends[-1]]
        return torch.cat([self._own(name) for name in names])

    @torch.no_grad()
    def _collect(self, names: Sequence[str]) -> None:
        """Bring the shards of matrices to their owners."""
        if not names:
            return
        rank, size = self._transport.rank, self._transport.world_size
        sent: list[list[Tensor]] = [[] for _ in range(size)]
        received: list[list[Tensor]] = [[] for _ in range(size)]
        for name in names:
            matrix = self._matrices[name]
            own = matrix.owner == rank
            for holder, (start, stop) in enumerate(matrix.parts):
                if start == stop:
                    continue
                if holder == rank and own:
                    self._own(name)[start:stop].copy_(self._shard_of(name))
                elif holder == rank:
                    sent[matrix.owner].append(self._shard_of(name))
                elif own:
                    received[holder].append(self._own(name)[start:stop])
        sent_numels = [sum(t.numel() for t in parts) for parts in sent]
        received_numels = [sum(t.numel() for t in parts) for parts in received]
        out = torch.cat([self.buffer.new_empty(0), *(t for parts in sent for t in parts)])
        into = self.buffer.new_empty(sum(received_numels))
        self._transport.all_to_all(
            into, out, received_numels=received_numels, sent_numels=sent_numels
        ).wait()
        targets = [t for parts in received for t in parts]
        for target, arrived in zip(targets, into.split([t.numel() for t in targets]), strict=True):
            target.copy_(arrived)
        self._stale.difference_update(names)
