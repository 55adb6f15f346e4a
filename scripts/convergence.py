# SPDX-License-Identifier: Apache-2.0
"""Runs of scripts/compare_convergence.py: their records on disk, and what is read from them.

Nothing here trains, plots or knows of ranks. Losses are nats per byte; a run that diverged has
infinity as its last loss.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What a run is made of; two runs of one cell are the same run.

    Attributes:
        part: "pretrain", or "finetune" from another cell's weights on another kind of text.
        start: name of that other cell, or "".
        kind: name of the optimizer and its settings (compare_convergence.KINDS).
        windows: windows per optimizer step, of all ranks together.
    """

    part: str
    kind: str
    lr: float
    seed: int
    width: int
    layers: int
    steps: int
    windows: int
    start: str = ""

    @property
    def name(self) -> str:
        """A file name."""
        kind = self.kind.replace(" ", "_").replace(",", "")
        return f"{self.part}_w{self.width}_{kind}_lr{self.lr:g}_s{self.seed}_{self.steps}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A cell's held-out losses.

    Attributes:
        steps: steps after which the model was evaluated, ascending.
        losses: held-out loss at those steps, on the text that the run trains on.
        first_losses: the same on the text of pre-training; empty where that is the same text.
    """

    cell: Cell
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    first_losses: tuple[float, ...] = ()

    @property
    def final(self) -> float:
        """Last held-out loss."""
        return self.losses[-1]


def append_run(path: Path, run: Run) -> None:
    """Add a finished run to the file as a line of its own, also after one that was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("\n" + json.dumps(asdict(run)) + "\n")


def read_runs(path: Path) -> list[Run]:
    """Read finished runs; a last line that was cut off by an interruption is no run."""
    runs = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        cell = Cell(**record.pop("cell"))
        runs.append(Run(cell=cell, **{key: tuple(value) for key, value in record.items()}))
    return runs


def best(runs: Iterable[Run]) -> Run:
    """The run of the lowest last loss; the smaller lr where two are equal."""
    return min(runs, key=lambda run: (run.final, run.cell.lr))


def beyond_edge(runs: Sequence[Run], *, factor: float = 2.0) -> float | None:
    """The lr to try next in a sweep: beyond the edge where its best lies; None if it is inside."""
    rates = sorted(run.cell.lr for run in runs)
    found = best(runs).cell.lr
    if found == rates[-1]:
        return float(f"{found * factor:.6g}")
    if found == rates[0]:
        return float(f"{found / factor:.6g}")
    return None


def steps_to(run: Run, target: float) -> float | None:
    """Steps after which the run first is at `target`, on straight lines between evaluations.

    Returns:
        None where it never is; the first evaluation's step where it is there already.
    """
    before: tuple[int, float] | None = None
    for step, loss in zip(run.steps, run.losses, strict=True):
        if loss <= target:
            if before is None or not math.isfinite(before[1]):
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (step, loss)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Mean, smallest and largest of one value over seeds."""

    mean: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def band(values: Iterable[float]) -> Band:
    """Summarise one value over seeds."""
    values = list(values)
    return Band(mean=statistics.fmean(values), low=min(values), high=max(values))


def curve(runs: Sequence[Run]) -> list[tuple[int, Band]]:
    """Held-out loss over seeds at each step where all runs were evaluated."""
    tables = [dict(zip(run.steps, run.losses, strict=True)) for run in runs]
    common = sorted(set.intersection(*(set(table) for table in tables)))
    return [(step, band(table[step] for table in tables)) for step in common]
