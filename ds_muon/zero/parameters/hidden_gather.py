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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.overrides import TorchFunctionMode

from ds_muon.comm.transport import Pending
from ds_muon.zero.seams import override, private
from ds_muon.zero.transport import DeepSpeedTransport
from ds_muon.zero.wrapping import before

# Everything that reads, replaces or moves weights without a forward.
_READERS = (
    "save_checkpoint",
    "save_16bit_model",
    "load_checkpoint",
    "load_module_state_dict",
    "module_state_dict",
    "offload_states",
    "reload_states",
)


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
        # Slices that nobody here has waited for since the step, sent or not.
        self._open: set[_Slice] = set()
        self._own: dict[int, tuple[_Slice, ...]] = {
            id(m): self._of(m.parameters(recurse=False)) for m in self._module.modules()
        }
        self._uses = _Uses(self._wait_for)
        self._depth = 0
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

        self._zero.step = step_without_gather

    def _broadcast(self, groups_flat: Sequence[Tensor], **kwargs: Any) -> None:
        self._flats, self._open = groups_flat, set(self._order)
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
        needed = [
            item for item in (self._order if slices is None else slices) if item in self._open
        ]
        if not needed:
            return
        self._send_late(needed, ahead=0 if slices is None else 1)
        for item in needed:
            self._pending.pop(item).wait()
        self._open.difference_update(needed)

    def _of(self, parameters: Iterable[Tensor]) -> tuple[_Slice, ...]:
        found = (self._slices_of.get(id(parameter), ()) for parameter in parameters)
        return tuple(dict.fromkeys(item for slices in found for item in slices))

    def _hook(self, engine: Any) -> None:
        """A module waits for its own parameters; in the root's forward, every other use does too.

        A parameter may be used by another module than its own (tied weights, attention that reads
        its projections' weights), by one in one forward and by another in the next.
        """
        for module in self._module.modules():
            module.register_forward_pre_hook(self._before_forward, prepend=True)
        self._module.register_forward_pre_hook(self._enter_root, prepend=True)
        self._module.register_forward_hook(self._leave_root, always_call=True)
        self._module.register_state_dict_pre_hook(lambda *_: self.wait())
        self._module.register_load_state_dict_pre_hook(lambda *_: self.wait())
        for name in _READERS:
            setattr(engine, name, before(getattr(engine, name), self.wait))
        refresh = private(self._zero, "refresh_fp32_params")
        override(self._zero, "refresh_fp32_params", before(refresh, self.wait))

    def _enter_root(self, module: nn.Module, inputs: Any) -> None:
        if self._depth == 0 and any(_is_compiled(m) for m in module.modules()):
            # Compiled code uses parameters where nobody sees it.
            self.wait()
        self._depth += 1
        if self._depth == 1:
            self._uses.__enter__()

    def _leave_root(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0:
            self._uses.__exit__(None, None, None)
        self._send_late(self._late, ahead=0)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._open:
            self.wait(self._own[id(module)])

    def _wait_for(self, used: Tensor) -> None:
        if self._open:
            self.wait(self._slices_of.get(id(used), ()))


class _Uses(TorchFunctionMode):
    """Shows every tensor that a torch function is about to use."""

    def __init__(self, used: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._used = used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((*args, *(kwargs or {}).values())):
            self._used(tensor)
        return func(*args, **(kwargs or {}))


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, OptimizedModule) or (
        getattr(module, "_compiled_call_impl", None) is not None
    )


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    real = private(owner, name)
    override(owner, name, value)
    try:
        yield
    finally:
        override(owner, name, real)
