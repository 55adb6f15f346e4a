# SPDX-License-Identifier: Apache-2.0
"""Contents: what DeepSpeed's files hold, in the common form of checkpoint/pieces.py.

Owns: where in them each wrapper keeps masters, states and mappings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    OPTIMIZER_STATE_DICT,
    PARAM_SHAPES,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
    ZERO_STAGE,
)
from torch import Tensor

from ds_muon.checkpoint.foreign import read_flat, read_split
from ds_muon.checkpoint.header import require_readable
from ds_muon.checkpoint.native import read_shard
from ds_muon.checkpoint.pieces import MASTER, Shard, whole
from ds_muon.routing import clean_name
from ds_muon.zero.checkpoint.files import SavedTag, open_model, open_optimizer

# The key of our part of the model files, where DeepSpeed keeps a caller's client_state.
CLIENT_KEY = "ds_muon"


def entry_of(saved: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """DMuon's entry in an optimizer file, or in a model file saved without ZeRO."""
    return _base(saved).get("ds_muon")


def _wrapper(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    return saved[OPTIMIZER_STATE_DICT]


def _base(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The base optimizer's state dict, in whatever wrapper's."""
    if "module" in saved:
        optimizer = saved["optimizer"] or {}
        return optimizer.get(OPTIMIZER_STATE_DICT, optimizer)
    wrapper = _wrapper(saved)
    by_split = BASE_OPTIMIZER_STATE not in wrapper
    return wrapper[OPTIMIZER_STATE_DICT if by_split else BASE_OPTIMIZER_STATE]


def _masters(saved: Mapping[str, Any]) -> Sequence[Tensor]:
    wrapper = _wrapper(saved)
    return wrapper.get(FP32_FLAT_GROUPS) or wrapper[SINGLE_PARTITION_OF_FP32_GROUPS]


def read_tag(tag: SavedTag, model: Mapping[str, Any], *, states: bool) -> list[Shard]:
    """Open everything of a tag.

    Args:
        model: rank 0's model file.
        states: whether more is wanted than weights.

    Returns:
        Nothing where weights alone are wanted, and only the model file says whose they are.

    Raises:
        ValueError: a file that cannot be read, or of another save than the rest.
    """
    if not tag.optimizer_files:
        if states or "ds_muon" in _base(model):
            return [_read_without_zero(model)]
        return []
    saved = [open_optimizer(path) for path in tag.optimizer_files]
    if entry_of(saved[0]) is None:
        if _is_shuffled(saved[0]) and not tag.cuts_weights:
            if states:
                raise ValueError(
                    "another optimizer's checkpoint with zero_optimization.round_robin_gradients "
                    "does not say where its parameters are; save it once with that key false"
                )
            return []
        return [_read_foreign(tag, saved, model)]
    for path, item in zip(tag.optimizer_files, saved, strict=True):
        require_same_save(path, item, model)
    return [read_shard(_base(item), _masters(item)) for item in saved]


def require_same_save(path: Path, saved: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Check that an optimizer file is of the save that wrote the model file.

    Raises:
        ValueError: it is not.
    """
    entry = entry_of(saved)
    require_readable(entry)
    here, there = (entry or {}).get("save"), (model.get(CLIENT_KEY) or {}).get("save")
    if here != there:
        raise ValueError(
            f"{path.name} is of another save than the model file beside it: a save into an old "
            "tag was interrupted"
        )


def _read_without_zero(model: Mapping[str, Any]) -> Shard:
    base, optimizer = _base(model), model["optimizer"]
    if "ds_muon" not in base:
        raise ValueError(
            "a checkpoint of another optimizer can be taken over if it was saved under ZeRO; this "
            "one was saved without"
        )
    if "fp32_groups" in optimizer:
        masters = [tensor for group in optimizer["fp32_groups"] for tensor in group]
    else:
        module = {clean_name(name): tensor for name, tensor in model["module"].items()}
        masters = [module[leaf["slices"][0]["name"]] for leaf in base["ds_muon"]["leaves"]]
    return read_shard(base, masters)


def _read_foreign(
    tag: SavedTag, saved: Sequence[Mapping[str, Any]], model: Mapping[str, Any]
) -> Shard:
    shapes = [
        {clean_name(name): tuple(shape) for name, shape in group.items()}
        for group in model[PARAM_SHAPES]
    ]
    bases, masters = [_base(item) for item in saved], [_masters(item) for item in saved]
    if tag.cuts_weights:
        return read_split(bases, masters, shapes)
    mappings = [
        [
            {clean_name(name): address for name, address in group.items()}
            for group in _wrapper(item)[PARAM_SLICE_MAPPINGS]
        ]
        for item in saved
    ]
    is_bf16_optimizer = ZERO_STAGE not in _wrapper(saved[0])
    return read_flat(
        bases,
        masters,
        mappings,
        shapes,
        cuts_momentum=is_bf16_optimizer or bool(_zero_of(saved[0]).get("offload_optimizer")),
    )


def _zero_of(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `zero_optimization` section of the run that saved."""
    config = saved.get("ds_config")
    return config.get("zero_optimization", {}) if isinstance(config, Mapping) else {}


def _is_shuffled(saved: Mapping[str, Any]) -> bool:
    """Whether flat partitions hold parameters in an order that their mapping does not give."""
    return bool(_zero_of(saved).get("round_robin_gradients"))


def scaler_of(tag: SavedTag, model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Loss scale, overflow and the like, of rank 0."""
    if tag.optimizer_files:
        return _wrapper(open_optimizer(tag.optimizer_files[0]))
    return model["optimizer"] or {}


class SavedWeights(Mapping[str, Any]):
    """What a tag has of a module's state dict, by clean name, whole: weights, buffers and the like.

    Args:
        model: rank 0's model file.
        shards: for what ZeRO-3 trained, whose weights are in no model file.

    Attributes:
        names: of the whole state dict that was saved, also of what stands in no file of this rank.
    """

    def __init__(self, tag: SavedTag, model: Mapping[str, Any], shards: Sequence[Shard]) -> None:
        saved = {clean_name(name): value for name, value in model["module"].items()}
        shapes = model.get(FROZEN_PARAM_SHAPES) if tag.cuts_weights else None
        self._frozen = {clean_name(n): torch.Size(shape) for n, shape in (shapes or {}).items()}
        self._files = [open_model(path) for path in tag.model_files] if self._frozen else []
        self._shards = shards
        self._trained = {name: shape for shard in shards for name, shape in shard.shapes.items()}
        buffers = set(map(clean_name, model["buffer_names"]))
        # ZeRO-3 leaves an empty tensor where a parameter is.
        self._module = {
            name: value
            for name, value in saved.items()
            if not tag.cuts_weights or name in buffers or not _is_empty(value)
        }
        self.names = frozenset(saved) | frozenset(self)

    def __getitem__(self, name: str) -> Any:
        if name in self._module:
            return self._module[name]
        if name in self._frozen:
            shape = self._frozen[name]
            return torch.cat(_fragments(self._files, name))[: shape.numel()].view(shape)
        pieces = [p for s in self._shards for p in s.pieces if (p.name, p.key) == (name, MASTER)]
        return whole(self._trained[name], pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, without reading it."""
        if name in self._module:
            return tuple(self._module[name].shape)
        return tuple(self._frozen[name] if name in self._frozen else self._trained[name])

    def __contains__(self, name: object) -> bool:
        return name in self._module or name in self._frozen or name in self._trained

    def __iter__(self) -> Iterator[str]:
        return iter({**self._module, **self._frozen, **self._trained})

    def __len__(self) -> int:
        return len(list(iter(self)))


def _is_empty(value: Any) -> bool:
    return torch.is_tensor(value) and tuple(value.shape) == (0,)


def _fragments(files: Sequence[Mapping[str, Any]], name: str) -> list[Tensor]:
    return [
        value.reshape(-1)
        for file in files
        for n, value in file[FROZEN_PARAM_FRAGMENTS].items()
        if clean_name(n) == name
    ]
