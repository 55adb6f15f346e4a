# SPDX-License-Identifier: Apache-2.0
"""Transport: an exchange's messages as calls of deepspeed.comm, on communicators of their own."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor

from ds_muon.comm.transport import Pending
from ds_muon.zero.seams import world_timeout

Partition = tuple[tuple[int, ...], ...]


class DeepSpeedTransport:
    """Transport by deepspeed.comm, so that its comms logger sees the calls.

    It has a communicator of its own: an exchange never queues behind ZeRO's traffic.

    Args:
        purpose: transports of equal purpose and partition share one communicator.
        partition: disjoint lists of all ranks; this transport is over the list with this rank in
            it, and its ranks count from 0 there. None: one list of all ranks.
    """

    def __init__(self, purpose: str = "exchange", partition: Partition | None = None) -> None:
        everyone = tuple(range(dist.get_world_size()))
        self.group = own_group(purpose, (everyone,) if partition is None else partition)
        self._ranks = torch.distributed.get_process_group_ranks(self.group)
        self.rank = self._ranks.index(dist.get_rank())
        self.world_size = len(self._ranks)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        *,
        received_numels: Sequence[int],
        sent_numels: Sequence[int],
    ) -> Pending:
        """See Transport."""
        return dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=list(received_numels),
            input_split_sizes=list(sent_numels),
            group=self.group,
            async_op=True,
        )

    def all_gather(self, received: Tensor, sent: Tensor) -> Pending:
        """See Transport."""
        return dist.all_gather_into_tensor(received, sent, group=self.group, async_op=True)

    def broadcast(self, tensor: Tensor, *, source: int) -> Pending:
        """See Transport."""
        return dist.broadcast(tensor, self._ranks[source], group=self.group, async_op=True)

    def reduce(self, tensor: Tensor, *, destination: int) -> Pending:
        """See Transport."""
        return dist.reduce(tensor, self._ranks[destination], group=self.group, async_op=True)

    def all_reduce(self, tensor: Tensor) -> Pending:
        """See Transport."""
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        """See Transport."""
        return dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    def send_receive(
        self, received: Mapping[int, Tensor], sent: Mapping[int, Tensor]
    ) -> list[Pending]:
        """See Transport."""
        p2p, group, ranks = torch.distributed, self.group, self._ranks
        batch = [p2p.P2POp(p2p.irecv, t, ranks[peer], group) for peer, t in received.items()]
        batch += [p2p.P2POp(p2p.isend, t, ranks[peer], group) for peer, t in sent.items()]
        return p2p.batch_isend_irecv(batch) if batch else []

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Transport."""
        shown: list[Any] = [None] * self.world_size
        # Not deepspeed.comm's: under comms_logger it ends the process at a collective of objects.
        torch.distributed.all_gather_object(shown, value, group=self.group)
        return shown


def own_group(purpose: str, partition: Partition) -> Any:
    """The communicator of this rank's list; every rank asks for the same partitions in order."""
    return _own_group(torch.distributed.group.WORLD, purpose, partition)


@functools.cache
def _own_group(world: Any, purpose: str, partition: Partition) -> Any:
    """One communicator per purpose and partition for all engines that share a world."""
    timeout, mine = world_timeout(), dist.get_rank(group=world)
    groups = [torch.distributed.new_group(list(ranks), timeout=timeout) for ranks in partition]
    return next(g for g, ranks in zip(groups, partition, strict=True) if mine in ranks)
