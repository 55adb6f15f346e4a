# SPDX-License-Identifier: Apache-2.0
"""Training under DeepSpeed on the ranks of a pool: engines, weights by name, counters."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor

import ds_muon.run.step
from tests.harness import models

COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "all_gather",
    "all_gather_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "all_to_all_single",
    "broadcast",
    "reduce",
)


def ds_config(
    stage: int,
    *,
    params: dict[str, Any],
    dtype: str = "fp32",
    clip: float = 0.0,
    accumulation: int = 1,
    zero: dict[str, Any] | None = None,
    batch: int = models.GLOBAL_BATCH,
    **extra: Any,
) -> dict[str, Any]:
    """A ds_config.json for the current world."""
    world = torch.distributed.get_world_size()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch // world // accumulation,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": "DMuon", "params": params},
        "zero_optimization": {"stage": stage, **(zero or {})},
        **extra,
    }
    if dtype != "fp32":
        config.setdefault(dtype, {"enabled": True})
    return config


def start_engine(
    config: dict[str, Any], *, model: str = "llama", zero_init: bool = False, groups: Any = None
) -> Any:
    """Build the model (under zero.Init if asked) and initialise DeepSpeed on it."""
    context = (
        deepspeed.zero.Init(config_dict_or_path=config) if zero_init else contextlib.nullcontext()
    )
    with context:
        module = models.build(model)
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=groups or module.parameters(), config=config
    )
    return engine


def train_steps(engine: Any, batches: list[Tensor]) -> list[float]:
    """Run one optimizer step per global batch; return this rank's losses."""
    losses = []
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for batch in batches:
        own = batch.chunk(world)[rank] if world > 1 else batch
        for micro in own.chunk(engine.gradient_accumulation_steps()):
            loss = engine(micro)
            engine.backward(loss)
            engine.step()
        losses.append(float(loss))
    return losses


def masters(engine: Any) -> dict[str, Tensor]:
    """Whole fp32 master weights by name; a collective."""
    wrapper = engine.optimizer
    named = dict(engine.module.named_parameters())
    if hasattr(wrapper, "fp16_groups") and hasattr(wrapper, "fp32_groups"):
        copies = {
            id(p): q
            for ps, qs in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
            for p, q in zip(ps, qs, strict=True)
        }
        return {n: copies[id(p)].detach().clone() for n, p in named.items() if id(p) in copies}
    if wrapper is engine.basic_optimizer:
        return {n: p.detach().clone() for n, p in named.items()}
    return {n: safe_get_full_fp32_param(p).clone() for n, p in named.items() if p.requires_grad}


def digest(tensors: dict[str, Tensor]) -> str:
    """Hash of the bits of all tensors."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode())
        sha.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


@contextlib.contextmanager
def counting_newton_schulz() -> Iterator[list[tuple[int, ...]]]:
    """Collect the shape of every matrix that this rank orthogonalises."""
    shapes: list[tuple[int, ...]] = []
    real = ds_muon.run.step.orthogonalize_into

    def counted(x: Tensor, matrix: Tensor, *rest: Any) -> Tensor:
        shapes.append(tuple(matrix.shape))
        return real(x, matrix, *rest)

    with mock.patch.object(ds_muon.run.step, "orthogonalize_into", counted):
        yield shapes


@contextlib.contextmanager
def counting_collectives() -> Iterator[dict[str, Counter[Any]]]:
    """Count DeepSpeed's collectives: calls, and elements that a rank receives from others.

    `groups` counts elements by the ranks of the collective's group. Reductions count what a ring
    moves: (N - 1) / N of the tensor, twice for an all-reduce. Messages count where they arrive.
    """
    backend = deepspeed.comm.comm.cdb
    counts: dict[str, Counter[Any]] = {k: Counter() for k in ("calls", "elements", "groups")}

    def counted(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            elements = received_elements(name, *args, **kwargs)
            counts["calls"][name] += 1
            counts["elements"][name] += elements
            counts["groups"][group_ranks(*args, **kwargs)] += elements
            return real(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            if hasattr(backend, name):
                real = getattr(backend, name)
                stack.enter_context(mock.patch.object(backend, name, counted(name, real)))
        stack.enter_context(_counting_batches(counts))
        recv = counted("recv", torch.distributed.recv)
        stack.enter_context(mock.patch.object(torch.distributed, "recv", recv))
        yield counts


def group_ranks(*args: Any, **kwargs: Any) -> tuple[int, ...]:
    """Ranks of the group that a collective's arguments name."""
    groups = (*args, *kwargs.values())
    group = next((g for g in groups if isinstance(g, torch.distributed.ProcessGroup)), None)
    return tuple(torch.distributed.get_process_group_ranks(group))


def _counting_batches(counts: dict[str, Counter[str]]) -> Any:
    """Count batches of sends and receives, which have no collective of DeepSpeed's."""
    real = torch.distributed.batch_isend_irecv

    def batch(operations: list[Any]) -> Any:
        counts["calls"]["p2p"] += len(operations)
        received = [o.tensor.numel() for o in operations if o.op is torch.distributed.irecv]
        counts["elements"]["p2p"] += sum(received)
        return real(operations)

    return mock.patch.object(torch.distributed, "batch_isend_irecv", batch)


def received_elements(name: str, *args: Any, **kwargs: Any) -> float:
    """Elements that reach this rank from others in one collective."""
    members, rank = group_ranks(*args, **kwargs), torch.distributed.get_rank()
    world = len(members)
    if kwargs.get("output_split_sizes"):
        splits = kwargs["output_split_sizes"]
        return sum(splits) - splits[members.index(rank)]
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    lists = [
        a
        for a in (*args, *kwargs.values())
        if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)
    ]
    largest = max([t.numel() for t in tensors] + [sum(t.numel() for t in ts) for ts in lists])
    if name == "recv":
        return largest
    if name == "broadcast":
        source = kwargs["src"] if "src" in kwargs else args[1]
        return 0 if source == rank else largest
    return (2 if name.startswith("all_reduce") else 1) * (world - 1) / world * largest


class CountingTransport:
    """A transport that counts calls, and elements that arrive from other ranks."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.rank, self.world_size = real.rank, real.world_size
        self.calls: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    def _count(self, name: str, elements: int, calls: int = 1) -> None:
        self.calls[name] += calls
        self.received[name] += elements

    def all_to_all(self, received: Tensor, sent: Tensor, **numels: Any) -> Any:
        splits = numels["received_numels"]
        self._count("all_to_all", sum(splits) - splits[self.rank])
        return self._real.all_to_all(received, sent, **numels)

    def all_gather(self, received: Tensor, sent: Tensor) -> Any:
        self._count("all_gather", received.numel() - sent.numel())
        return self._real.all_gather(received, sent)

    def broadcast(self, tensor: Tensor, *, source: int) -> Any:
        self._count("broadcast", tensor.numel() if source != self.rank else 0)
        return self._real.broadcast(tensor, source=source)

    def send_receive(self, received: dict[int, Tensor], sent: dict[int, Tensor]) -> Any:
        elements = sum(t.numel() for t in received.values())
        self._count("p2p", elements, len(received) + len(sent))
        return self._real.send_receive(received, sent)

    def all_gather_object(self, value: Any) -> Any:
        return self._real.all_gather_object(value)
