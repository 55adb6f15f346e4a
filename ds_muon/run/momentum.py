# SPDX-License-Identifier: Apache-2.0
"""Momentum of HSDP: each replica keeps that of its own matrices, and nothing of the others'.

Owns: the compact buffers, and the ways to and from the full shape that a checkpoint has, where a
leaf's momentum_buffer stands as the leaf does.
Never does: know what a file is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_muon.comm.transport import Transport
from ds_muon.plan.blocks import Block
from ds_muon.plan.plan import Plan
from ds_muon.plan.replicas import held, momentum_numel
from ds_muon.run.views import view

# Elements per message when momentum is brought together; bounds what that allocates.
_CHUNK_NUMEL = 16 * 2**20


class SpreadMomentum:
    """The momentum of leaves whose matrices are spread over replicas.

    Args:
        transport: over the ranks of this column; its rank is this replica.
        shard: this rank's place in its row.
        rows: per leaf, every replica's plan.
        leaf_numels: per leaf, its elements.
        device: of the compact buffers.

    Attributes:
        buffers: per leaf, flat, of this replica's matrices.
    """

    def __init__(
        self,
        transport: Transport,
        shard: int,
        rows: Sequence[Sequence[Plan]],
        leaf_numels: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._transport, self._shard, self._rows = transport, shard, rows
        self._leaf_numels = tuple(leaf_numels)
        self.buffers = [
            torch.zeros(momentum_numel(row[transport.rank], shard), dtype=dtype, device=device)
            for row in rows
        ]

    def full(self) -> list[Tensor] | None:
        """Bring every leaf's momentum together on replica 0, on the CPU; a collective.

        Returns:
            Per leaf, flat (numel,), zero where no matrix lies; None on the other replicas.
        """
        rank, dtype = self._transport.rank, [b.dtype for b in self.buffers]
        whole = [
            torch.zeros(numel, dtype=kind)
            for numel, kind in zip(self._leaf_numels, dtype, strict=True)
            if rank == 0
        ]
        for index, rows in enumerate(self._rows):
            for replica, row in enumerate(rows):
                compact = self._on_first(index, replica, row)
                if rank == 0 and compact is not None:
                    for _, piece in held(row, self._shard):
                        own = view(compact, piece.momentum).view(piece.place.shape)
                        view(whole[index], piece.place).copy_(own)
        return whole if rank == 0 else None

    def _on_first(self, index: int, replica: int, row: Plan) -> Tensor | None:
        """One replica's compact buffer on replica 0, chunk by chunk through its device."""
        own, rank = self.buffers[index], self._transport.rank
        if replica == 0:
            return own.cpu()
        numel = momentum_numel(row, self._shard)
        arrived = torch.empty(numel, dtype=own.dtype) if rank == 0 else None
        for start in range(0, numel, _CHUNK_NUMEL):
            stop = min(start + _CHUNK_NUMEL, numel)
            chunk = own.new_empty(stop - start) if rank == 0 else own[start:stop]
            received = {replica: chunk} if rank == 0 else {}
            sent = {0: chunk} if rank == replica else {}
            for pending in self._transport.send_receive(received, sent):
                pending.wait()
            if arrived is not None:
                arrived[start:stop] = chunk
        return arrived

    def cut(self, index: int, full: Tensor) -> None:
        """Take this replica's part of a leaf's full momentum, flat (numel,)."""
        for _, piece in held(self._rows[index][self._transport.rank], self._shard):
            own = view(self.buffers[index], piece.momentum).view(piece.place.shape)
            own.copy_(view(full, piece.place))

    def move(self, device: torch.device | str) -> None:
        """Move the compact buffers."""
        for buffer in self.buffers:
            buffer.data = buffer.data.to(device)

    def pieces(self, index: int) -> list[tuple[Block, Tensor]]:
        """Where this rank's momentum of one leaf belongs: (block of the leaf, view of it)."""
        buffer = self.buffers[index]
        return [
            (p.place, view(buffer, p.momentum).view(p.place.shape))
            for _, p in held(self._rows[index][self._transport.rank], self._shard)
        ]
