# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says about itself: which range of which parameter each saved leaf holds.

Owns: the versioned `ds_muon` entry of the optimizer's state dict, of plain types only, so that a
later version can find every parameter's momentum by name at any world size and stage.
Never does: read or write files; DeepSpeed's checkpoint engine does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

ENTRY_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice:
    """A range of one parameter in a leaf of this rank; offsets and numel in elements.

    Attributes:
        kind: which half trains it, "muon" or "adamw".
        shape: the whole parameter's.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    parameter_offset: int
    leaf_offset: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointHeader:
    """The run that writes or reads a checkpoint.

    Attributes:
        slices: id(leaf) -> the ranges it holds.
        recipe: resolved choices of the matrix half, for the reader's information.
    """

    world_size: int
    rank: int
    stage: int
    wrapper: str
    recipe: Mapping[str, Any]
    slices: Mapping[int, tuple[ParameterSlice, ...]]

    def as_entry(self, leaves: Sequence[Tensor]) -> dict[str, Any]:
        """Describe `leaves`, in the numbering of the state dict."""
        return {
            "version": ENTRY_VERSION,
            "world_size": self.world_size,
            "rank": self.rank,
            "stage": self.stage,
            "wrapper": self.wrapper,
            "recipe": dict(self.recipe),
            "leaves": [
                {
                    "numel": leaf.numel(),
                    "slices": [asdict(item) for item in self.slices.get(id(leaf), ())],
                }
                for leaf in leaves
            ],
        }

    def require_same(self, entry: Mapping[str, Any] | None, leaves: Sequence[Tensor]) -> None:
        """Check that a saved entry describes exactly `leaves`.

        Raises:
            ValueError: says what differs; nothing has been changed.
        """
        if entry is None:
            raise ValueError(
                "DMuon: the checkpoint's optimizer state was not written by DMuon; load it with "
                "load_optimizer_states=False to take the weights only"
            )
        if entry["version"] > ENTRY_VERSION:
            raise ValueError(
                f"DMuon: the checkpoint's format is version {entry['version']}, this ds_muon reads "
                f"up to {ENTRY_VERSION}; install a newer ds_muon"
            )
        own = self.as_entry(leaves)
        # Without ZeRO every leaf is whole, and rank 0's file serves every rank of any world.
        shape_of_run = ("stage", "wrapper", "world_size") if self.stage else ("stage", "wrapper")
        for key in shape_of_run:
            if entry[key] != own[key]:
                raise ValueError(
                    f"DMuon: the checkpoint was saved with {key} = {entry[key]}, this run has "
                    f"{own[key]}; resume with the same number of ranks, ZeRO stage and precision"
                )
        if len(entry["leaves"]) != len(own["leaves"]):
            raise ValueError(
                f"DMuon: the checkpoint has {len(entry['leaves'])} leaves, this run "
                f"{len(own['leaves'])}; the model or zero_optimization.sub_group_size changed"
            )
        for index, (saved, mine) in enumerate(zip(entry["leaves"], own["leaves"], strict=True)):
            for was, now in zip(saved["slices"], mine["slices"], strict=False):
                if was != now:
                    raise ValueError(
                        f"DMuon: leaf {index} of the checkpoint holds {was}, this run's holds "
                        f"{now}; the model, its parameter groups or DMuon's routing keys changed"
                    )
            if len(saved["slices"]) != len(mine["slices"]) or saved["numel"] != mine["numel"]:
                raise ValueError(f"DMuon: leaf {index} of the checkpoint has another content")
