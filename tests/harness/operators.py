# SPDX-License-Identifier: Apache-2.0
"""Operators: what torch runs while a function does, and where the host waits for a device."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result the host, or the shape of a result, depends on.
_READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")
# What reads a tensor, or waits, above the dispatcher; on a CPU most of it dispatches nothing.
_READERS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")


class Operators(TorchDispatchMode):
    """Counts torch's operators by name.

    Attributes:
        launches: those that are no views: each is a kernel or more on an accelerator.
        views: those that only describe memory.
        reads: those whose result has to come to the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.views: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(_READS):
            self.reads[name] += 1
        if func.namespace != "profiler":
            (self.views if func.is_view else self.launches)[name] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting_host_reads() -> Iterator[Counter[str]]:
    """Count calls that make the host wait, by name, whatever device their tensor is on."""
    reads: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            reads[name] += 1
            return real(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    with contextlib.ExitStack() as stack:
        for name in _READERS:
            stack.enter_context(counted(Tensor, name))
        stack.enter_context(counted(torch.accelerator, "synchronize"))
        yield reads
