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
        precision: of the weights; "fp16" runs have a loss scale.
        slices: id(leaf) -> the ranges it holds.
        recipe: resolved choices of the matrix half, for the reader's information.
    """

    world_size: int
    rank: int
    stage: int
    wrapper: str
    precision: str
    recipe: Mapping[str, Any]
    slices: Mapping[int, tuple[ParameterSlice, ...]]

    def as_entry(self, leaves: Sequence[Tensor], *, save: str | None = None) -> dict[str, Any]:
        """Describe `leaves`, in the numbering of the state dict.

        Args:
            save: names the save, the same on all ranks; files of two saves in one folder differ.
        """
        return {
            "version": ENTRY_VERSION,
            "save": save,
            "world_size": self.world_size,
            "rank": self.rank,
            "stage": self.stage,
            "wrapper": self.wrapper,
            "precision": self.precision,
            "recipe": dict(self.recipe),
            "leaves": [
                {
                    "numel": leaf.numel(),
                    "slices": [asdict(item) for item in self.slices.get(id(leaf), ())],
                }
                for leaf in leaves
            ],
        }

    def difference(self, entry: Mapping[str, Any] | None, leaves: Sequence[Tensor]) -> str | None:
        """Say how a saved entry differs from what describes exactly `leaves`, if it does."""
        if entry is None:
            return "its optimizer state was not written by DMuon"
        own = self.as_entry(leaves)
        # Without ZeRO every leaf is whole, and rank 0's file serves every rank of any world.
        shape_of_run = ("stage", "wrapper", "precision", *(("world_size",) if self.stage else ()))
        changed = [key for key in shape_of_run if entry.get(key) != own[key]]
        if changed:
            there = ", ".join(f"{key} = {entry.get(key)}" for key in changed)
            return (
                f"it was saved with {there}, this run has {', '.join(str(own[k]) for k in changed)}"
            )
        if len(entry["leaves"]) != len(own["leaves"]):
            return f"it has {len(entry['leaves'])} leaves, this run {len(own['leaves'])}"
        for index, (saved, mine) in enumerate(zip(entry["leaves"], own["leaves"], strict=True)):
            if saved != mine:
                return f"leaf {index} of it holds other ranges than this run's"
        return None


def require_readable(entry: Mapping[str, Any] | None) -> None:
    """Check that this version knows an entry's format.

    Raises:
        ValueError: a later version wrote it.
    """
    if entry is not None and entry["version"] > ENTRY_VERSION:
        raise ValueError(
            f"DMuon: the checkpoint's format is version {entry['version']}, this ds_muon reads "
            f"up to {ENTRY_VERSION}; install a newer ds_muon"
        )
