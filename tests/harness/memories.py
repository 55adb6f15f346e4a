# SPDX-License-Identifier: Apache-2.0
"""Two memories on one machine: shows which of a step's operations would run on which device.

Tensors are told apart by their storage. Everything an operation makes is where its operands are; an
operation with operands in both memories fails, but for copies, which are what crosses a bus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST, DEVICE = "host", "device"
_COPY = torch.ops.aten.copy_.default


class TwoMemories(TorchDispatchMode):
    """Watches operations.

    Args:
        host, device: tensors whose storage is in either memory.

    Attributes:
        crossed: elements copied, by (from, to).
        work: elements that operations wrote or made, by (operation, memory).
        largest: bytes of the largest tensor that an operation made, by memory.
    """

    def __init__(self, *, host: Sequence[Tensor], device: Sequence[Tensor]) -> None:
        super().__init__()
        self._place = {_storage(t): HOST for t in host} | {_storage(t): DEVICE for t in device}
        self.crossed: Counter[tuple[str, str]] = Counter()
        self.work: Counter[tuple[str, str]] = Counter()
        self.largest: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        places = {self._place[_storage(t)] for t in read if t.numel()}
        if func is _COPY and len(places) == 2:
            target, source = args[:2]
            if target.dtype != source.dtype or not target.is_contiguous():
                raise AssertionError(f"{source.dtype} to {target.dtype}: a bus copies bytes")
            way = self._place[_storage(source)], self._place[_storage(target)]
            self.crossed[way] += target.numel()
            return func(*args, **(kwargs or {}))
        if not places:
            return func(*args, **(kwargs or {}))
        if len(places) != 1:
            raise AssertionError(f"{func} reads {[tuple(t.shape) for t in read]} of {places}")
        [place] = places
        result = func(*args, **(kwargs or {}))
        known = {_storage(t) for t in read}
        for made in (t for t in tree_leaves(result) if isinstance(t, Tensor)):
            self.work[str(func), place] += made.numel()
            if _storage(made) not in known:
                self._place[_storage(made)] = place
                self.largest[place] = max(self.largest[place], made.untyped_storage().nbytes())
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
