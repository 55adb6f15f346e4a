# SPDX-License-Identifier: Apache-2.0
"""Universal: DeepSpeed's universal checkpoint format, one folder per parameter.

`zero/<parameter>/<key>.pt` holds {"param": the whole tensor}, with key fp32, exp_avg, exp_avg_sq as
DeepSpeed has them, and momentum_buffer for what Muon trains; `step.pt` AdamW's step count;
`zero/optimizer_state.pt` the parameter groups. Format:
https://www.deepspeed.ai/tutorials/universal-checkpointing/
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ds_muon.checkpoint.pieces import MASTER, STATES, Piece, Shard, whole

FOLDER = "zero"
GROUPS_FILE = "optimizer_state.pt"
_GROUPS = "param_groups"
_WRITER = "ds_muon"


def write(folder: Path, shards: Iterable[Shard], common: Mapping[str, Any]) -> int:
    """Write all parameters, one at a time.

    Args:
        common: what else goes into the file of parameter groups.

    Returns:
        How many parameters were written.

    Raises:
        ValueError: a parameter whose elements are not all there.
    """
    found: dict[str, dict[str, list[Piece]]] = defaultdict(lambda: defaultdict(list))
    shapes: dict[str, tuple[int, ...]] = {}
    steps: dict[str, float] = {}
    groups: list[Mapping[str, Any]] = []
    shared_lr, is_own = None, False
    for shard in shards:
        shapes.update(shard.shapes)
        steps.update(shard.steps)
        groups = groups or list(shard.settings.values())
        shared_lr, is_own = shard.shared_lr, is_own or shard.is_own
        for piece in shard.pieces:
            found[piece.name][piece.key].append(piece)
    for name, by_key in found.items():
        home = folder / FOLDER / name
        home.mkdir(parents=True, exist_ok=True)
        for key, pieces in by_key.items():
            torch.save({"param": whole(shapes[name], pieces)}, home / f"{key}.pt")
        if name in steps:
            torch.save(torch.tensor(steps[name]), home / "step.pt")
    if shared_lr is not None:
        groups = [{"lr": shared_lr, "params": []}]
    state = {**common, _GROUPS: [dict(group) for group in groups], _WRITER: is_own}
    torch.save(state, folder / FOLDER / GROUPS_FILE)
    return len(found)


def read(
    folder: Path, wanted: Mapping[str, tuple[int, ...]], load: Callable[[Path], Any]
) -> tuple[Shard, Mapping[str, Any]]:
    """Read some parameters, and the file of parameter groups.

    Args:
        wanted: name -> shape; what the checkpoint does not have is left out.
        load: opens a file.

    Raises:
        ValueError: the folder is not a universal checkpoint.
    """
    home = folder / FOLDER
    if not (home / GROUPS_FILE).is_file():
        raise ValueError(f"not a universal checkpoint: it has no {FOLDER}/{GROUPS_FILE}")
    state = load(home / GROUPS_FILE)
    groups = state.get(_GROUPS, [])
    pieces: list[Piece] = []
    shapes: dict[str, tuple[int, ...]] = {}
    steps: dict[str, float] = {}
    # DeepSpeed's ZeRO-3 converter writes flat tensors, and the step count into the groups' file.
    nested = state.get("optimizer_state_dict", {}).get("state", {})
    common = next((s["step"] for s in nested.values() if "step" in s), None)
    for name, shape in wanted.items():
        for key in (MASTER, *STATES):
            path = home / name / f"{key}.pt"
            if path.is_file():
                found = load(path)
                value = found["param"] if isinstance(found, Mapping) else found.view(shape)
                shapes[name] = tuple(value.shape)
                pieces.append(Piece(name=name, key=key, offset=0, values=value.reshape(-1)))
        if (home / name / "step.pt").is_file():
            steps[name] = float(load(home / name / "step.pt"))
        elif common is not None:
            steps[name] = float(common)
    own = bool(state.get(_WRITER))
    lrs = {float(group["lr"]) for group in groups}
    shard = Shard(
        pieces=tuple(pieces),
        shapes=shapes,
        steps=steps,
        settings={group["name"]: group for group in groups} if own else {},
        shared_lr=lrs.pop() if not own and len(lrs) == 1 else None,
        is_own=own,
    )
    return shard, state
