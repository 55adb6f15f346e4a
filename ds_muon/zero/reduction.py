# SPDX-License-Identifier: Apache-2.0
"""Reduction: ZeRO-1/2's gradients go to the ranks that keep them, each element once.

DeepSpeed all-reduces a bucket of gradients, of which each rank keeps its slices: every element
arrives twice. Or it reduces the slices of each rank alone, in as many calls as there are ranks.
Here a bucket is one reduce-scatter over a list of unequal tensors, one per rank, unpadded:

    bucket of 4 parameters    [ a a a | b b | c c c c | d ]      ranks that keep them: 2 0 1 0
    one tensor per rank         0: [b b d]   1: [c c c c]   2: [a a a]

A rank's slices that lie side by side are reduced where they are, others in a packed copy; at most
one bucket is packed at a time, as DeepSpeed's own reduction copies one.

Gloo makes every reduce-scatter an all-reduce of which it drops the most. There each rank sends the
others their tensors, and adds up what it receives, one sender after the other.

Owns: the replacement on one optimizer, and the decision for it, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from ds_muon.comm.transport import Transport
from ds_muon.config import DMuonConfig, own_reduction
from ds_muon.log import say
from ds_muon.planning import MIB
from ds_muon.zero.offload import is_on_host
from ds_muon.zero.seams import override, parsed_config, private


def reduce_to_keepers(engine: Any, config: DMuonConfig, world: Transport) -> None:
    """Replace the reduction of ZeRO-1/2's buckets where that is asked for and works; a collective.

    Args:
        engine: after DeepSpeed has wrapped its optimizer.
        world: transport over all ranks.
    """
    zero = engine.optimizer
    if not isinstance(zero, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        return
    settings = parsed_config(engine).zero_config
    reason = own_reduction(
        config,
        reduce_scatter=settings.reduce_scatter,
        contiguous_gradients=settings.contiguous_gradients or is_on_host(engine, "optimizer"),
        bf16_optimizer=isinstance(zero, BF16_Optimizer),
    )
    if reason is None and dist.get_world_size(group=private(zero, "dp_process_group")) == 1:
        return
    if reason is None:
        shown = world.all_gather_object(_refusal(zero))
        reason = next((refusal for refusal in shown if refusal is not None), None)
    if reason is not None:
        say(f"gradients: DeepSpeed's own reduction carries them: {reason}", rank=world.rank)
        return
    BucketReduction(zero)
    how = "one reduce_scatter"
    device = torch.device(get_accelerator().current_device_name())
    if _by_messages(private(zero, "dp_process_group"), device):
        how = "one message from each other rank"
    say(
        f"gradients: each goes to the rank that keeps it, in {how} per bucket; packed copies take "
        f"up to {_largest_bucket_bytes(zero) / MIB:.1f} MiB (reduce_scatter_v)",
        rank=world.rank,
    )


class BucketReduction:
    """Reduces the buckets of one ZeRO-1/2 optimizer, whose reduction it replaces."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        override(zero, "allreduce_and_scatter", self._reduce)
        # Otherwise DeepSpeed reduces the slices of each rank alone.
        override(zero, "use_multi_rank_bucket_allreduce", True)

    def _reduce(
        self,
        bucket: Sequence[tuple[Any, ...]],
        communication_data_type: torch.dtype,
        *,
        process_group: Any,
        **_: Any,
    ) -> None:
        """Stand in for `allreduce_and_scatter`, under the stream that it would run on.

        Args:
            bucket: per slice the rank of the group that keeps it, a flat gradient, already divided
                by the number of ranks, and, from deepspeed 0.19.8, the fp32 sum that it belongs to,
                if it has one and is this rank's. Other ranks' slices may be cut differently on each
                rank, but not their order.
        """
        own = dist.get_rank(group=process_group)
        slices: list[list[Tensor]] = [[] for _ in range(dist.get_world_size(group=process_group))]
        sums: list[Tensor | None] = []
        for keeper, gradient, *further in bucket:
            [rank] = keeper if isinstance(keeper, frozenset) else (keeper,)
            slices[rank].append(gradient)
            if rank == own:
                sums.append(further[0] if further else None)
        nothing = bucket[0][1].new_empty(0, dtype=communication_data_type)
        parts = [_joined(of_rank, communication_data_type, nothing) for of_rank in slices]
        reduced = parts[own]
        _reduce_scatter(parts, process_group)
        pieces = reduced.split([gradient.numel() for gradient in slices[own]])
        for gradient, piece, fp32_sum in zip(slices[own], pieces, sums, strict=True):
            if fp32_sum is not None:
                fp32_sum.add_(piece)
            if reduced is not gradient:
                gradient.copy_(piece)
        self._keep_until_reduced(bucket)

    def _keep_until_reduced(self, bucket: Sequence[tuple[Any, ...]]) -> None:
        """Gradients may be freed while a stream of its own still reads them."""
        zero = self._zero
        if private(zero, "overlap_comm") and not get_accelerator().resolves_data_dependency():
            for _, gradient, *_ in bucket:
                gradient.record_stream(private(zero, "reduction_stream"))


def _reduce_scatter(parts: Sequence[Tensor], group: Any) -> None:
    """Sum each rank's part over the group, on that rank and in its place.

    Args:
        parts: flat, one per rank of the group; may be empty. Others' may be overwritten.
    """
    own = parts[dist.get_rank(group=group)]
    if not _by_messages(group, own.device):
        dist.reduce_scatter(own, list(parts), group=group)
        return
    ranks = torch.distributed.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())
    # Everyone serves its neighbour first, so that nobody is everyone's first.
    before = [(place - distance) % len(ranks) for distance in range(1, len(ranks))]
    # torch's own, since isend of deepspeed 0.19.0 waits for its receiver.
    isend, recv = torch.distributed.isend, torch.distributed.recv
    sends = [isend(parts[to], ranks[to], group=group) for to in before if parts[to].numel()]
    if own.numel():
        arrived = torch.empty_like(own)
        for source in reversed(before):
            recv(arrived, ranks[source], group=group)
            own.add_(arrived)
    for send in sends:
        send.wait()


def _by_messages(group: Any, device: torch.device) -> bool:
    return device.type == "cpu" and torch.distributed.get_backend(group) == "gloo"


def _joined(slices: Sequence[Tensor], dtype: torch.dtype, nothing: Tensor) -> Tensor:
    """One flat tensor of some slices: the slice itself where it can be, or a packed copy."""
    if not slices:
        return nothing
    if len(slices) == 1 and slices[0].dtype == dtype:
        return slices[0]
    numels = [part.numel() for part in slices]
    packed = slices[0].new_empty(sum(numels), dtype=dtype)
    torch._foreach_copy_(list(packed.split(numels)), list(slices))
    return packed


def _refusal(zero: Any) -> str | None:
    """Try what every bucket does: unequal tensors, one of them empty, and the output among them.

    Backends differ in whether they take these; one that does not raises on every rank, or returns
    something else.
    """
    group = private(zero, "dp_process_group")
    rank, size = dist.get_rank(group=group), dist.get_world_size(group=group)
    # Two ranks contribute: a sum of ones over many is not exact in bf16.
    value = float(rank in (0, size - 1))
    parts = [
        torch.full(
            (numel,),
            value,
            dtype=private(zero, "communication_data_type"),
            device=get_accelerator().current_device_name(),
        )
        for numel in range(size)
    ]
    try:
        _reduce_scatter(parts, group)
    except Exception as error:  # whatever a backend raises
        return f"this backend refuses a reduce_scatter of unequal tensors ({error})"
    if not bool((parts[rank] == 2).all()):
        return "this backend's reduce_scatter of unequal tensors is wrong"
    return None


def _largest_bucket_bytes(zero: Any) -> int:
    """Bound what one bucket takes; a parameter above the bucket's size is a bucket alone."""
    numels = [p.numel() for group in private(zero, "bit16_groups") for p in group]
    numel = min(max(private(zero, "reduce_bucket_size"), *numels), sum(numels))
    return numel * private(zero, "communication_data_type").itemsize
