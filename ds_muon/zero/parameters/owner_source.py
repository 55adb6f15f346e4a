# SPDX-License-Identifier: Apache-2.0
"""Owner source: ZeRO-3 takes matrices from their owners' packed buffers (`param_source`).

Owns: the override of `all_gather_coalesced`, by which ZeRO-3 fetches and prefetches, on one
engine's parameters: matrices come by broadcasts, one packed buffer per fetch and owner, the rest by
ZeRO's gather; and the moments at which owners' copies go out of date. Everything else that gathers
(`GatheredParameters`, persistent parameters) reads shards, as without it.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles, ZeroParamStatus
from torch import Tensor
from torch.nn import Parameter

from ds_muon.comm.transport import Transport
from ds_muon.plan.blocks import Block
from ds_muon.routing import Route
from ds_muon.run.packed import Fetched, PackedOwners, SourcedMatrix
from ds_muon.run.views import view
from ds_muon.zero.seams import override, private
from ds_muon.zero.wrapping import after


class OwnerSource:
    """Overrides how one ZeRO-3 engine fetches matrices.

    Args:
        transport: over the ranks that ZeRO partitions over, on a communicator of its own.
        parameters: that Muon trains, each with its route.
        owners: matrix name -> owner's rank in `transport`.
    """

    def __init__(
        self,
        engine: Any,
        transport: Transport,
        parameters: Sequence[tuple[Parameter, Route]],
        owners: Mapping[str, int],
    ) -> None:
        self._route_of = {id(parameter): route for parameter, route in parameters}
        by_dtype: dict[torch.dtype, list[tuple[Any, Route]]] = defaultdict(list)
        for parameter, route in parameters:
            by_dtype[parameter.dtype].append((parameter, route))
        self._packed = {
            dtype: _packed(transport, found, owners, dtype) for dtype, found in by_dtype.items()
        }
        for parameter in engine.module.parameters():
            self._override(parameter)
        zero = engine.optimizer
        zero.step = after(zero.step, self._invalidate)
        zero.load_state_dict = after(zero.load_state_dict, self._invalidate)

    def _invalidate(self) -> None:
        for packed in self._packed.values():
            packed.invalidate()

    def _override(self, parameter: Any) -> None:
        gather = private(parameter, "all_gather_coalesced")
        partition = private(parameter, "partition")

        @functools.wraps(gather)
        def all_gather_coalesced(params: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            listed = list(params)
            matrices = [p for p in listed if id(p) in self._route_of]
            rest = [p for p in listed if id(p) not in self._route_of]
            handles = [gather(rest, *args, **kwargs)] if rest else []
            return MultipleAllGatherHandles([*handles, *self._fetch(matrices)])

        @functools.wraps(partition)
        def partition_then_stale(
            param_list: Any = None, *args: Any, has_been_updated: bool = False, **kwargs: Any
        ) -> None:
            partition(param_list, *args, has_been_updated=has_been_updated, **kwargs)
            if has_been_updated:
                for p in [parameter] if param_list is None else param_list:
                    self._changed(p)

        override(parameter, "all_gather_coalesced", all_gather_coalesced)
        override(parameter, "partition", partition_then_stale)

    def _changed(self, parameter: Any) -> None:
        route = self._route_of.get(id(parameter))
        if route is not None:
            packed = self._packed[parameter.dtype]
            packed.invalidate(placement.matrix.name for placement in route.placements)

    def _fetch(self, parameters: Sequence[Any]) -> list[_FetchHandle]:
        handles = []
        for dtype, packed in self._packed.items():
            chosen = [p for p in parameters if p.dtype == dtype]
            for p in chosen:
                if p.ds_status is not ZeroParamStatus.NOT_AVAILABLE:
                    raise RuntimeError(p.ds_summary())
                p.ds_status = ZeroParamStatus.INFLIGHT
            routes = [self._route_of[id(p)] for p in chosen]
            names = [placement.matrix.name for route in routes for placement in route.placements]
            if names:
                fetched = packed.fetch(names)
                handles.append(_FetchHandle(fetched, list(zip(chosen, routes, strict=True))))
        return handles


class _FetchHandle:
    """What ZeRO waits for: parameters become available, each in memory of its own."""

    def __init__(self, fetched: Fetched, parameters: list[tuple[Any, Route]]) -> None:
        self._fetched: Fetched | None = fetched
        self._parameters = parameters

    @torch.no_grad()
    def wait(self, handle_dependency: bool = True) -> None:
        """Wait, and copy each parameter out of the packed buffers, as ZeRO's handles do."""
        if self._fetched is None:
            return
        for pending in self._fetched.pending:
            pending.wait()
        for parameter, route in self._parameters:
            views = self._fetched.views
            whole = views[route.placements[0].matrix.name].new_empty(route.numel)
            for placement in route.placements:
                part = view(whole, placement.block)
                part.copy_(views[placement.matrix.name].view(part.shape))
            parameter.data = whole.view(parameter.ds_shape)
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        self._fetched = None


def _packed(
    transport: Transport,
    parameters: Sequence[tuple[Any, Route]],
    owners: Mapping[str, int],
    dtype: torch.dtype,
) -> PackedOwners:
    matrices: dict[str, SourcedMatrix] = {}
    shard_of: dict[str, Callable[[], Tensor]] = {}
    for parameter, route in parameters:
        part = parameter.ds_tensor.ds_numel
        for placement in route.placements:
            name, whole = placement.matrix.name, placement.block
            edges = [whole.before(rank * part) for rank in range(transport.world_size + 1)]
            matrices[name] = SourcedMatrix(
                numel=whole.numel, owner=owners[name], parts=tuple(itertools.pairwise(edges))
            )
            own = whole.cut(edges[transport.rank], edges[transport.rank + 1])
            blocks = [block.moved(-transport.rank * part) for block in own]
            shard_of[name] = functools.partial(_shard, parameter, blocks)
    device = parameters[0][0].ds_tensor.device
    return PackedOwners(
        transport, matrices, dtype=dtype, device=device, shard_of=lambda name: shard_of[name]()
    )


def _shard(parameter: Any, blocks: Sequence[Block]) -> Tensor:
    """This rank's part of a matrix, flat: a view where it is one run, a copy otherwise."""
    flat = parameter.ds_tensor.detach().view(-1)
    parts = [view(flat, block).reshape(-1) for block in blocks]
    return parts[0] if len(parts) == 1 else torch.cat([flat[:0], *parts])
