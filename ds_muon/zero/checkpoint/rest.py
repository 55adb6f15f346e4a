# SPDX-License-Identifier: Apache-2.0
"""Rest: what a module's state dict has besides the leaves of the optimizer.

Owns: parameters that no group trains, persistent buffers and extra states; what of them, and of the
names of the whole state dict, a checkpoint does not have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import deepspeed
from torch import nn
from torch.nn import Parameter

from ds_muon.checkpoint.restore import some
from ds_muon.routing import clean_name
from ds_muon.routing.sites import layer_shape
from ds_muon.zero.checkpoint.contents import SavedWeights
from ds_muon.zero.seams import private

_EXTRA_STATE = "_extra_state"


class Rest:
    """The part of one module that a load by name fills apart from the optimizer.

    Args:
        trained: parameters of the optimizer's groups.

    Attributes:
        parameters: by clean name, those that are not trained.
    """

    def __init__(self, module: nn.Module, trained: Iterable[Parameter]) -> None:
        self._module = module
        held = {id(parameter) for parameter in trained}
        named = [(clean_name(name), p) for name, p in module.named_parameters()]
        self.parameters = {name: p for name, p in named if id(p) not in held}
        self._trained = [name for name, p in named if id(p) in held]
        self._raw = {clean_name(name): name for name in _entries(module)}
        self._shapes = {name: layer_shape(p) for name, p in self.parameters.items()}
        buffers = dict(module.named_buffers(remove_duplicate=False))
        for name, raw in self._raw.items():
            if raw in buffers:
                self._shapes[name] = tuple(buffers[raw].shape)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of parameters and buffers."""
        return self._shapes

    def missing(self, weights: SavedWeights) -> list[str]:
        """Names that the checkpoint does not have, trained or not."""
        rest = [name for name in (*self.parameters, *self._raw) if name not in weights]
        return [name for name in self._trained if name not in weights.names] + rest

    def unexpected(self, weights: SavedWeights) -> list[str]:
        """Names that only the checkpoint has."""
        repeated = self._module.named_parameters(remove_duplicate=False)
        own = {clean_name(name) for name, _ in repeated} | set(self._raw)
        return sorted(name for name in weights.names if name not in own)

    def require_fit(self, weights: SavedWeights, *, strict: bool) -> None:
        """Check names and shapes.

        Raises:
            ValueError: names differ, and that matters or all do; or a shape does.
        """
        missing, unexpected = self.missing(weights), self.unexpected(weights)
        nothing = len(missing) == len(self._trained) + len(self.parameters) + len(self._raw)
        if (strict and (missing or unexpected)) or nothing:
            told = [f"it has no {some(missing)}"] if missing else []
            told += [f"this run has no {some(unexpected)}"] if unexpected else []
            remedy = "" if nothing else "; load_module_strict=False takes what both have"
            raise ValueError(f"it is of another model: {', and '.join(told)}{remedy}")
        other = [
            f"{name} is {weights.shape(name)} there and {shape} here"
            for name, shape in self._shapes.items()
            if name in weights and weights.shape(name) != shape
        ]
        if other:
            raise ValueError(f"it is of another model: {some(other)}")

    def fill(self, weights: SavedWeights, rank: int) -> None:
        """Take what the checkpoint has."""
        entries = {raw: weights[name] for name, raw in self._raw.items() if name in weights}
        self._module.load_state_dict(entries, strict=False)
        for name, parameter in self.parameters.items():
            if name not in weights:
                continue
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if rank == 0 or not hasattr(parameter, "ds_id"):
                    parameter.data.copy_(weights[name])


def _entries(module: nn.Module) -> Iterator[str]:
    """Keys of the state dict that are no parameters."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        transient = private(part, "_non_persistent_buffers_set")
        own = (n for n, _ in part.named_buffers(recurse=False) if n not in transient)
        has_extra = type(part).get_extra_state is not nn.Module.get_extra_state
        for name in itertools.chain(own, [_EXTRA_STATE] if has_extra else []):
            yield f"{prefix}.{name}" if prefix else name


def wraps_otherwise(module: nn.Module, saved: Mapping[str, Any]) -> bool:
    """Whether a saved state dict has this module's parameters under other raw names."""
    missing = [name for name, _ in module.named_parameters() if name not in saved]
    return not {clean_name(name) for name in missing}.isdisjoint(map(clean_name, saved))
