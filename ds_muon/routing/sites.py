# SPDX-License-Identifier: Apache-2.0
"""Sites: where a parameter stands in its model, and what the modules around it say of it.

Owns: names without wrappers, owning modules, and numbers (heads, sizes) read off the module that
uses a weight or off the nearest configuration above it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED_CONVOLUTIONS)
# Parts of a name that a wrapper (PEFT) adds; what they wrap is what counts.
_WRAPPERS = frozenset({"base_layer", "original_module"})
_SAVED = "modules_to_save"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One parameter in its model.

    Attributes:
        name: without torch.compile's `_orig_mod.`.
        shape: the layer's, also where zero.Init left an empty tensor.
        parts: the name's parts, without wrappers.
        owners: modules whose own parameter it is; several where it is tied.
        holder: the module that uses it: of a layer's weight the layer's parent, of a bare parameter
            its owner.
        config: the nearest configuration above it, or None.
        is_head: some module calls it its output embedding.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    owners: tuple[nn.Module, ...]
    holder: nn.Module
    config: Any
    is_head: bool

    @property
    def leaf(self) -> str:
        """The parameter's own name."""
        return self.parts[-1]

    @property
    def module(self) -> str:
        """The name of the module that owns it."""
        return self.parts[-2] if len(self.parts) > 1 else ""

    @property
    def role(self) -> str:
        """What it is called where it is used: the layer's name, or its own."""
        return self.module if self.leaf == "weight" else self.leaf

    @property
    def convolution(self) -> nn.Module | None:
        """The convolution whose weight it is, if it is one's."""
        return next((m for m in self.owners if isinstance(m, CONVOLUTIONS)), None)

    @property
    def model_type(self) -> str:
        """transformers' name of the architecture, of the nearest configuration."""
        return str(getattr(self.config, "model_type", ""))

    def number(self, *names: str) -> int | None:
        """The first of these that the holder has as a positive integer, or else the config."""
        for source in (self.holder, self.config):
            for name in names:
                value = getattr(source, name, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None

    def flag(self, name: str) -> bool | None:
        """A boolean of the holder or the config; None where neither has it."""
        for source in (self.holder, self.config):
            value = getattr(source, name, None)
            if isinstance(value, bool):
                return value
        return None

    @property
    def transposed(self) -> bool:
        """Whether it is stored as (in, out): transformers' Conv1D, ConvTranspose, some experts."""
        if any(_is_transposed(m) for m in self.owners):
            return True
        if len(self.shape) != 3:
            return False
        flag = getattr(self.holder, "is_transposed", None)
        return flag if isinstance(flag, bool) else self.gated == (2, 1) or self.gates == (2, 1)

    @property
    def gated(self) -> tuple[int, int] | None:
        """Axes (outputs, inputs) of a stack of experts whose outputs are halves, gate and up.

        It has a partner beside it that reads half of its outputs and writes its inputs.
        """
        return next((axes for other in self._stacks for axes in _gated(self.shape, other)), None)

    @property
    def gates(self) -> tuple[int, int] | None:
        """The same of the partner, whose own axes are stored alike."""
        return next((axes for other in self._stacks for axes in _gated(other, self.shape)), None)

    @property
    def _stacks(self) -> list[tuple[int, ...]]:
        """Shapes of the other stacks of experts beside this one."""
        near = (self.holder, *(self.holder.children() if self.leaf == "weight" else ()))
        beside = (p for m in near for p in m.parameters(recurse=False) if p is not self.parameter)
        return [s for s in map(layer_shape, beside) if len(s) == 3 and s[0] == self.shape[0]]


def sites_of(model: nn.Module) -> Iterator[Site]:
    """Every parameter of a model."""
    modules = dict(model.named_modules())
    owners: dict[int, list[nn.Module]] = {}
    for module in modules.values():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    heads = _output_heads(modules)
    for raw, parameter in model.named_parameters():
        path = raw.split(".")
        steps = ["" if end == 0 else ".".join(path[:end]) for end in range(len(path) - 1, -1, -1)]
        above = [modules[step] for step in steps if _last(step) not in _WRAPPERS]
        kept = tuple(_without_wrappers(clean_name(raw).split(".")))
        yield Site(
            name=clean_name(raw),
            parameter=parameter,
            shape=layer_shape(parameter),
            parts=kept,
            owners=tuple(owners.get(id(parameter), ())),
            holder=above[1] if kept[-1] == "weight" and len(above) > 1 else above[0],
            config=next((m.config for m in above if _has_config(m)), None),
            is_head=id(parameter) in heads,
        )


def clean_name(name: str) -> str:
    """Strip torch.compile's wrapper from a parameter's name."""
    return name.replace("_orig_mod.", "")


def layer_shape(param: torch.Tensor) -> tuple[int, ...]:
    """The layer's shape: zero.Init keeps it aside and leaves `param.shape == (0,)`."""
    return tuple(getattr(param, "ds_shape", param.shape))


def _gated(up: tuple[int, ...], down: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(outputs, inputs) axes of `up`, if `down` fits it."""
    if len(up) != 3:
        return
    for outputs, inputs in ((1, 2), (2, 1)):
        if down[inputs] * 2 == up[outputs] and down[outputs] == up[inputs]:
            yield outputs, inputs


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _has_config(module: nn.Module) -> bool:
    return getattr(module, "config", None) is not None


def _without_wrappers(parts: list[str]) -> Iterator[str]:
    for index, part in enumerate(parts):
        saved_as = index > 0 and parts[index - 1] == _SAVED
        if part not in _WRAPPERS and part != _SAVED and not saved_as:
            yield part


def _output_heads(modules: dict[str, nn.Module]) -> set[int]:
    """Ids of parameters of whatever any submodule names as its output head."""
    heads: set[int] = set()
    for module in modules.values():
        getter = getattr(module, "get_output_embeddings", None)
        if getter is None:
            continue
        try:
            head = getter()
        except (NotImplementedError, AttributeError):
            continue
        if isinstance(head, nn.Module):
            heads.update(id(p) for p in head.parameters())
    return heads


def _is_transposed(module: nn.Module) -> bool:
    return isinstance(module, _TRANSPOSED_CONVOLUTIONS) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, a Linear with its weight stored as (in, out)."""
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return conv1d is not None and isinstance(module, conv1d)
