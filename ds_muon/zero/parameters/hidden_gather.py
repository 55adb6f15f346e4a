# SPDX-License-Identifier: Apache-2.0
"""Hidden gather: ZeRO-1/2's parameter gather under the next forward (`hide_param_gather`).

ZeRO-1/2 ends its step by gathering every group's flat 16-bit buffer, and waits. A rank's slice of
that buffer is one contiguous range, so here each rank broadcasts its slices instead, in order of
first use, on a communicator of their own, and a module waits for its parameters just before its
forward. The elements are the same: (N - 1) / N of all parameters received per rank.

With HSDP a rank may still wait for updates of its slice from other replicas. Such slices are
broadcast later, one ahead of the module that needs them and all by the end of the forward, in the
same fixed order: when a rank has no use for a slice, another may, so that each forward sends all.

Owns: the override of that gather on one optimizer, who waits for what, and what must wait for all:
the next step, checkpoints, state dicts.
Never does: decide by what has arrived; all ranks broadcast the same slices in the same order.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_muon.comm.transport import Pending
from ds_muon.zero.seams import DeepSpeedTransport, private
from ds_muon.zero.wrapping import before

# Everything that reads weights without a forward.
_READERS = ("save_checkpoint", "save_16bit_model", "load_checkpoint", "module_state_dict")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """A range of one group's flat buffer and the rank that updates it."""

    group: int
    source: int
    start: int
    numel: int


class Publication(Protocol):
    """Updates that other replicas send to this row."""

    @property
    def hidden(self) -> bool:
        """Whether a step may end before they are applied; the same on all ranks."""

    def awaited(self, group: int, source: int, start: int, numel: int) -> frozenset[str]:
        """Matrices of other replicas in a slice, by name; the same on all ranks of the row."""

    def settle(self, names: frozenset[str]) -> None:
        """Apply the updates of some matrices here."""


class HiddenGather:
    """Overrides the gather at the end of one ZeRO-1/2 step.

    Args:
        engine: after ZeRO has laid out its flat buffers.
        transport: over the ranks that ZeRO partitions over, on a communicator of its own.
        publication: what other replicas send, if there are any.
    """

    def __init__(
        self,
        engine: Any,
        transport: DeepSpeedTransport,
        publication: Publication | None = None,
    ) -> None:
        self._zero, self._transport = engine.optimizer, transport
        self._publication = publication
        self._module: nn.Module = engine.module
        flats = private(self._zero, "bit16_groups_flat")
        self._slices_of = {
            id(p): self._covering(flats, p) for p in self._module.parameters() if p.requires_grad
        }
        self._order = tuple(dict.fromkeys(s for own in self._slices_of.values() for s in own))
        self._awaited = {
            s: publication.awaited(s.group, s.source, s.start, s.numel)
            for s in self._order
            if publication is not None
        }
        self._pending: dict[_Slice, Pending] = {}
        self._late: deque[_Slice] = deque()
        # Until a forward was watched, the first module that is called waits for everything.
        self._waits_of: dict[int, tuple[_Slice, ...]] = {}
        self._override_step()
        self._hook(engine)

    def _covering(self, flats: Sequence[Tensor], parameter: Tensor) -> tuple[_Slice, ...]:
        """Slices that a parameter lies in."""
        world, largest = self._transport.world_size, private(self._zero, "allgather_bucket_size")
        for group, flat in enumerate(flats):
            start = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
            if not 0 <= start < flat.numel():
                continue
            part = flat.numel() // world
            width = min(part, int(largest))
            found = []
            for source in range(start // part, (start + parameter.numel() - 1) // part + 1):
                for left in range(source * part, (source + 1) * part, width):
                    right = min(left + width, (source + 1) * part)
                    if left < start + parameter.numel() and start < right:
                        found.append(
                            _Slice(group=group, source=source, start=left, numel=right - left)
                        )
            return tuple(found)
        raise RuntimeError("hide_param_gather: a trainable parameter is in none of ZeRO's buffers")

    def _override_step(self) -> None:
        step = self._zero.step

        @functools.wraps(step)
        def step_without_gather(closure: None = None) -> Any:
            self.wait()
            with _replaced(stage_1_and_2, "all_gather_dp_groups", self._broadcast):
                return step(closure)

        private(stage_1_and_2, "all_gather_dp_groups")
        self._zero.step = step_without_gather

    def _broadcast(self, groups_flat: Sequence[Tensor], **kwargs: Any) -> None:
        self._flats = groups_flat
        hidden = self._publication is not None and self._publication.hidden
        for item in self._order:
            if hidden and self._awaited[item]:
                self._late.append(item)
            else:
                self._send(item)

    def _send(self, item: _Slice) -> None:
        if self._publication is not None and item.source == self._transport.rank:
            self._publication.settle(self._awaited[item])
        view = self._flats[item.group][item.start : item.start + item.numel]
        self._pending[item] = self._transport.broadcast(view, source=item.source)

    def _send_late(self, needed: Collection[_Slice], *, ahead: int) -> None:
        """Send late slices up to the last one that is needed, and some more."""
        last = max((n for n, item in enumerate(self._late, start=1) if item in needed), default=0)
        for _ in range(min(last + ahead, len(self._late))):
            self._send(self._late.popleft())

    def wait(self, slices: Sequence[_Slice] | None = None) -> None:
        """Wait for some slices, or for all."""
        needed = self._order if slices is None else slices
        self._send_late(needed, ahead=0 if slices is None else 1)
        for item in needed:
            handle = self._pending.pop(item, None)
            if handle is not None:
                handle.wait()

    def _hook(self, engine: Any) -> None:
        for module in self._module.modules():
            module.register_forward_pre_hook(self._before_forward, prepend=True)
        self._module.register_forward_hook(self._after_forward, always_call=True)
        self._module.register_state_dict_pre_hook(lambda *_: self.wait())
        for name in _READERS:
            setattr(engine, name, before(private(engine, name), self.wait))
        if not any(getattr(m, "_compiled_call_impl", None) for m in self._module.modules()):
            self._record(engine)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._pending or self._late:
            self.wait(self._waits_of.get(id(module)))

    def _after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._send_late(self._late, ahead=0)

    def _record(self, engine: Any) -> None:
        """In the first forward, learn which module is the first to use which parameter.

        A parameter may be used by another module than its own (tied weights, attention that reads
        its projections' weights), and a module may never be called.
        """
        forward = engine.forward

        @functools.wraps(forward)
        def first_forward(*args: Any, **kwargs: Any) -> Any:
            engine.forward = forward
            with _FirstUses(self._module) as uses:
                result = forward(*args, **kwargs)
            self._learn(uses.first)
            return result

        engine.forward = first_forward

    def _learn(self, first: dict[int, int]) -> None:
        waits: dict[int, list[_Slice]] = {id(m): [] for m in self._module.modules()}
        for module in self._module.modules():
            for parameter in module.parameters(recurse=False):
                waits[id(module)] += self._slices_of.get(id(parameter), ())
        root = id(self._module)
        for key, slices in self._slices_of.items():
            waits[first.get(key, root)] += slices
        self._waits_of = {key: tuple(dict.fromkeys(found)) for key, found in waits.items()}


class _FirstUses(TorchFunctionMode):
    """Sees every torch function of a forward, and the module that is being called then."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.first: dict[int, int] = {}
        self._parameters = {id(p) for p in root.parameters()}
        self._root, self._stack = root, [id(root)]
        self._handles: list[Any] = []

    def __enter__(self) -> _FirstUses:
        for module in self._root.modules():
            if module is not self._root:
                self._handles.append(module.register_forward_pre_hook(self._enter_module))
                self._handles.append(
                    module.register_forward_hook(self._leave_module, always_call=True)
                )
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        self._stack.append(id(module))

    def _leave_module(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for used in _tensors((*args, *(kwargs or {}).values())):
            if id(used) in self._parameters:
                self.first.setdefault(id(used), self._stack[-1])
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)
