# SPDX-License-Identifier: Apache-2.0
"""Second reduction of HSDP: gradients, already reduced inside each row, are averaged over replicas.

Matrices go to the replica that owns them, and are zero in all others, so that a norm that sums over
the world counts each element once; the AdamW half is averaged everywhere.

Owns: packing, averaging and unpacking of one leaf's gradient, by the chunks that plan/replicas.py
lists. One chunk is packed while the one before travels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ds_muon.comm.transport import Pending, Transport
from ds_muon.plan.replicas import Reduction
from ds_muon.run.views import view


@torch.no_grad()
def reduce_over_replicas(
    transport: Transport, reductions: Sequence[Reduction], gradient: Sequence[Tensor]
) -> None:
    """Average one leaf's gradient over the replicas, in place and in its own dtype.

    Args:
        transport: over the ranks that hold the same ranges.
        gradient: tensors that, one after another, are the leaf's gradient.
    """
    flats = [part.view(-1) for part in gradient]
    starts = list(accumulate((flat.numel() for flat in flats), initial=0))
    before: tuple[Reduction, Tensor, Pending] | None = None
    for reduction in reductions:
        packed = flats[0].new_empty(reduction.numel)
        for part, own in _views(flats, starts, reduction, packed):
            part.copy_(own)
        # Averaged before the sum, so that a sum of low-precision gradients overflows no sooner.
        packed.mul_(1.0 / transport.world_size)
        if reduction.destination is None:
            pending = transport.all_reduce(packed)
        else:
            pending = transport.reduce(packed, destination=reduction.destination)
        if before is not None:
            _unpack(transport, *before, flats, starts)
        before = reduction, packed, pending
    if before is not None:
        _unpack(transport, *before, flats, starts)


def _unpack(
    transport: Transport,
    reduction: Reduction,
    packed: Tensor,
    pending: Pending,
    flats: Sequence[Tensor],
    starts: Sequence[int],
) -> None:
    pending.wait()
    for part, own in _views(flats, starts, reduction, packed):
        if reduction.destination in (None, transport.rank):
            own.copy_(part)
        else:
            own.zero_()


def _views(
    flats: Sequence[Tensor], starts: Sequence[int], reduction: Reduction, packed: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """A reduction's elements in its packed buffer and in the gradient, cut at the tensors' ends."""
    offset = 0
    for block in reduction.blocks:
        first = 0
        while first < block.numel:
            index = bisect_right(starts, block.at(first)) - 1
            last = block.before(starts[index + 1])
            for part in block.cut(first, last):
                own = view(flats[index], part.moved(-starts[index]))
                yield packed[offset : offset + part.numel].view(own.shape), own
                offset += part.numel
            first = last
