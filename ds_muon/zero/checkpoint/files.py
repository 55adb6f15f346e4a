# SPDX-License-Identifier: Apache-2.0
"""Files: the tag folders that DeepSpeed writes, opened without reading what is not needed.

Owns: which files a tag must have. Optimizer files are memory-mapped, so that a rank reads the
ranges it copies and no more, and by torch's weights-only loader, to which the four plain classes in
DeepSpeed's files are named. Read next: contents.py.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_CLASSES = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTag:
    """One complete checkpoint.

    Attributes:
        optimizer_files: by rank; empty if it was saved without ZeRO.
        model_files: by rank under ZeRO-3, else one.
        cuts_weights: saved by ZeRO-3, whose model files hold no weights.
    """

    folder: Path
    optimizer_files: tuple[Path, ...]
    model_files: tuple[Path, ...]
    cuts_weights: bool


def find(folder: Path) -> SavedTag:
    """List a tag's files and check that none is missing.

    Raises:
        ValueError: names what is missing, and the complete tags beside it.
    """
    if not folder.is_dir():
        raise ValueError("there is no such folder")
    if (folder / "zero").is_dir():
        raise ValueError(
            'it is a universal checkpoint; set "checkpoint": {"load_universal": true} to load it'
        )
    optimizer, model = _by_rank(folder, _OPTIMIZER_FILE), _by_rank(folder, _MODEL_FILE)
    _require_model(folder, model)
    cuts_weights = model[0].name.startswith("zero_pp")
    saved = open_model(model[0])
    world_size = int(saved["dp_world_size"])
    by_zero = bool(optimizer) or saved.get("optimizer") is None
    for files, wanted, kind in (
        (optimizer, world_size if by_zero else 0, "optim_states"),
        (model, world_size if cuts_weights else 1, "model_states"),
    ):
        missing = [rank for rank in range(wanted) if rank not in files]
        if missing:
            raise ValueError(
                f"it was saved by {world_size} ranks and has no *{kind}.pt of rank "
                f"{', '.join(map(str, missing[:8]))}: an interrupted save, or files that were lost"
            )
    return SavedTag(
        folder=folder,
        optimizer_files=tuple(optimizer[r] for r in range(world_size if by_zero else 0)),
        model_files=tuple(model[r] for r in range(world_size if cuts_weights else 1)),
        cuts_weights=cuts_weights,
    )


def find_universal(folder: Path) -> SavedTag:
    """Find the model files in a universal checkpoint, whose optimizer states are by parameter.

    Raises:
        ValueError: there is none.
    """
    model = _by_rank(folder, _MODEL_FILE) if folder.is_dir() else {}
    _require_model(folder, model)
    return SavedTag(
        folder=folder,
        optimizer_files=(),
        model_files=tuple(model[rank] for rank in sorted(model)),
        cuts_weights=model[0].name.startswith("zero_pp"),
    )


def _require_model(folder: Path, model: Mapping[int, Path]) -> None:
    if 0 not in model:
        is_home = any((folder / name).is_file() for name in ("latest", "latest_universal"))
        hint = "; it is the folder of tags: name one, or see what `latest` in it says"
        raise ValueError(f"it has no *model_states.pt of rank 0{hint if is_home else ''}")


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        if int(match[2]):
            raise ValueError(
                f"it was saved under tensor parallelism ({path.name}), whose parts of matrices "
                "cannot be put together"
            )
        found[int(match[1] or 0)] = path
    return found


def other_tags(folder: Path) -> list[str]:
    """Checkpoints beside one, which have all their files; also in the Trainer's other folders."""
    home = folder.parent
    homes = home.parent.iterdir() if home.name.startswith("checkpoint-") else [home]
    beside = [p for h in sorted(homes) if h.is_dir() for p in sorted(h.iterdir()) if p.is_dir()]
    whole = [p for p in beside if p != folder and _looks_whole(p)]
    return [p.name if p.parent == home else f"{p.parent.name}/{p.name}" for p in whole]


def _looks_whole(folder: Path) -> bool:
    with contextlib.suppress(ValueError):
        ranks = _by_rank(folder, _OPTIMIZER_FILE)
        return sorted(ranks) == list(range(len(ranks))) and 0 in _by_rank(folder, _MODEL_FILE)
    return False


def open_optimizer(path: Path) -> dict[str, Any]:
    """Map an optimizer file.

    Raises:
        ValueError: it is cut short or no checkpoint.
    """
    with _telling(path), torch.serialization.safe_globals(_CLASSES):
        return torch.load(path, map_location="cpu", mmap=_is_zip(path), weights_only=True)


def open_model(path: Path) -> dict[str, Any]:
    """Map a model file; a caller's client_state may hold anything, so it is DeepSpeed's loader.

    Raises:
        ValueError: it is cut short or no checkpoint.
    """
    with _telling(path):
        return torch.load(path, map_location="cpu", mmap=_is_zip(path), weights_only=False)


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError, KeyError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path.parent.name}/{path.name} ({path.stat().st_size:,} bytes) cannot be read: {text}"
        ) from None


def _is_zip(path: Path) -> bool:
    """Whether torch can map a file; DeepSpeed can be told to write the older format."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"
