# SPDX-License-Identifier: Apache-2.0
"""The tables of scripts/bench_step.py, from times that were made up."""

from __future__ import annotations

import pytest

from scripts.bench_step import Cell, newton_schulz, resources, times
from scripts.step_timing import (
    ADAMW,
    BUILT_IN,
    CLOCK,
    DMUON,
    PROCESSOR,
    Measured,
    RankResult,
    Size,
)
from scripts.tables import Measurements
from tests.harness.memory import Allocated

SIZE = Size(width=8, layers=3, batch=2, length=4)
# Seconds of three iterations on each of two ranks.
STEPS = {ADAMW: ([1, 2, 3], [3, 4, 5]), BUILT_IN: ([8, 8, 80], [8, 16, 80]), DMUON: ([4] * 3,) * 2}


def both(seconds: list[float]) -> dict[str, list[float]]:
    return {CLOCK: [float(s) for s in seconds], PROCESSOR: [s / 2 for s in seconds]}


def measured(kind: str, rank: int) -> Measured:
    step = STEPS[kind][rank]
    return Measured(
        kind=kind,
        step=both(step),
        backward_and_step=both([s + 1 for s in step]),
        iteration=both([s + 2 for s in step]),
        orthogonalising=both([1, 2, 3]),
        flops=(rank + 1) * 10**9,
        memory=Allocated(left=(2 if kind == ADAMW else 1 + rank) * 2**20, peak=2 * 2**20),
        launches=1000 * (1 + rank),
    )


@pytest.fixture
def cell() -> Cell:
    results = [
        RankResult(
            measured=[measured(kind, rank) for kind in STEPS],
            matrix_rate={CLOCK: 1e9, PROCESSOR: 2e9},
            model_rate={CLOCK: 1e6, PROCESSOR: 1e6},
            parameters=1,
            matrices=18,
            built_in_iterations=20,
        )
        for rank in (0, 1)
    ]
    return Cell(ranks=2, stage=2, size=SIZE, results=results)


def by_kind(table: Measurements) -> dict[str, dict[str, str]]:
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return {row.get("optimizer", DMUON): row for row in rows}


def test_ratios_are_medians_over_iterations_of_the_same_turn(cell: Cell) -> None:
    rows = by_kind(times([cell], CLOCK))
    # Means over ranks: 2, 3, 4; 8, 12, 80; 4, 4, 4.
    assert [rows[kind]["step, ms"] for kind in STEPS] == ["3,000.0", "12,000.0", "4,000.0"]
    ratio = f"step / {BUILT_IN}'s"
    assert [rows[kind][ratio] for kind in STEPS] == ["0.25", "1.00", "0.33"]
    assert rows[DMUON][f"backward + step / {BUILT_IN}'s"] == f"{5 / 13:.2f}"
    assert rows[DMUON]["iteration / AdamW's"] == f"{6 / 5:.2f}"
    assert rows[DMUON]["step / its standard form's"] == "-"
    # Two ranks, 2 x 4 tokens each, in six seconds.
    assert rows[DMUON]["tokens/s"] == f"{16 / 6:,.0f}"
    weights = 3 * 12 * 64 + 256 * 8 + 3 * 2 * 8 * 4
    assert rows[DMUON]["model flops utilisation"] == f"{6 * 8 * weights / 6 / 1e6:.2f}"
    assert by_kind(times([cell], PROCESSOR))[DMUON]["step, ms"] == "2,000.0"


def test_newton_schulz_is_compared_with_the_products_rate(cell: Cell) -> None:
    row = by_kind(newton_schulz([cell], CLOCK))[DMUON]
    assert (row["matrices"], row["iterations of the built-in"]) == ("18", "20")
    assert (row["Gflop, all ranks"], row["busiest / mean"]) == ("3.00", "1.33")
    assert row["ms, mean of ranks"] == "2,000.0"
    assert row["of the product's rate"] == "0.75"
    assert row["floor F/(rate N), ms"] == "1,500.0"
    assert row["1.15 AdamW's + floor, ms"] == f"{1e3 * (1.15 * 5 + 1.5):,.1f}"


def test_memory_is_that_of_the_rank_that_takes_most(cell: Cell) -> None:
    rows = by_kind(resources([cell]))
    assert rows[DMUON]["peak of an iteration, MiB"] == "4.00"
    assert rows[DMUON]["between iterations, MiB"] == "2.00"
    assert (rows[ADAMW]["peak / AdamW's"], rows[DMUON]["peak / AdamW's"]) == ("1.00", "1.00")
    assert rows[DMUON]["launches in a step"] == "2,000"
