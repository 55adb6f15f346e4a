# SPDX-License-Identifier: Apache-2.0
"""Native: shards of checkpoints that DMuon wrote, by their `ds_muon` entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ds_muon.checkpoint.pieces import MASTER, STATES, Piece, Shard, cut, step_of


def read_shard(state_dict: Mapping[str, Any], masters: Sequence[Tensor]) -> Shard:
    """Read one rank's part.

    Args:
        state_dict: the base optimizer's, with its `ds_muon` entry.
        masters: fp32 weights of the leaves, in the numbering of the state dict.
    """
    pieces: list[Piece] = []
    shapes: dict[str, tuple[int, ...]] = {}
    steps: dict[str, float] = {}
    group_of = {n: group for group in state_dict["param_groups"] for n in group["params"]}
    for number, (leaf, master) in enumerate(
        zip(state_dict["ds_muon"]["leaves"], masters, strict=True)
    ):
        state = state_dict["state"].get(number, {})
        held = {MASTER: master, **{key: state[key] for key in STATES if key in state}}
        step = step_of(state, group_of[number])
        for item in leaf["slices"]:
            name = item["name"]
            shapes[name] = tuple(item["shape"])
            if step is not None:
                steps[name] = step
            pieces.extend(
                cut(
                    name,
                    key,
                    values,
                    offset=item["parameter_offset"],
                    start=item["leaf_offset"],
                    numel=item["numel"],
                )
                for key, values in held.items()
            )
    return Shard(
        pieces=tuple(pieces),
        shapes=shapes,
        steps=steps,
        settings={group["name"]: group for group in state_dict["param_groups"]},
    )
