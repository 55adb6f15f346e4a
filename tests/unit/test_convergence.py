# SPDX-License-Identifier: Apache-2.0
"""What scripts/compare_convergence.py reads from its runs: edges, crossings, bands, records."""

import math
from dataclasses import replace

import pytest

from scripts import compare_convergence, convergence_report
from scripts.convergence import (
    Band,
    Cell,
    Run,
    append_run,
    band,
    best,
    beyond_edge,
    curve,
    read_runs,
    steps_to,
)

CELL = Cell(part="pretrain", kind="AdamW", lr=1e-3, seed=0, width=8, layers=1, steps=40, windows=2)


def run_of(*losses: float, **changes: object) -> Run:
    steps = tuple(range(10, 10 * len(losses) + 1, 10))
    return Run(cell=replace(CELL, **changes), steps=steps, losses=losses)


def sweep(*losses: float) -> list[Run]:
    return [run_of(loss, lr=1e-3 * 2**i) for i, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((3.0, 2.0, 2.5), None),
        ((3.0, 2.5, 2.0), 8e-3),
        ((2.0, 2.5, 3.0), 5e-4),
        ((2.0, 2.5, math.inf), 5e-4),
        ((math.inf, 2.0, math.inf), None),
        # Of two equal runs the smaller lr counts, so a flat edge does not run away.
        ((3.0, 2.0, 2.0), None),
        ((2.0,), 2e-3),
    ],
)
def test_a_sweep_goes_on_beyond_the_edge_where_its_best_lies(losses, expected):
    assert beyond_edge(sweep(*losses)) == expected
    assert beyond_edge(sweep(*losses)[::-1]) == expected


def test_a_sweep_ends_where_the_best_is_inside():
    runs = sweep(5.0, 4.0)
    while (lr := beyond_edge(runs)) is not None:
        runs.append(run_of(abs(math.log(lr / 0.05)), lr=lr))
    rates = sorted(run.cell.lr for run in runs)
    found = best(runs).cell.lr
    assert rates[0] < found < rates[-1]
    assert found == min(rates, key=lambda lr: abs(math.log(lr / 0.05)))


def test_steps_to_a_loss_are_interpolated_at_the_first_crossing():
    run = run_of(4.0, 3.0, 3.5, 2.0)
    assert steps_to(run, 3.25) == pytest.approx(17.5)
    assert steps_to(run, 3.0) == 20
    assert steps_to(run, 2.5) == pytest.approx(30 + 10 * 1.0 / 1.5)
    assert steps_to(run, 4.5) == 10  # there at the first evaluation already
    assert steps_to(run, 1.9) is None
    assert steps_to(run_of(math.inf, 2.0), 3.0) == 20


def test_bands_over_seeds():
    assert band([1.0, 2.0, 6.0]) == Band(mean=3.0, low=1.0, high=6.0)
    assert f"{band([1.0, 2.0, 6.0]):.1f}" == "3.0 (1.0 to 6.0)"
    # A seed that stopped early counts only where all were evaluated.
    points = curve([run_of(4.0, 2.0), run_of(3.0, 3.0, 1.0, seed=1)])
    assert points == [
        (10, Band(mean=3.5, low=3.0, high=4.0)),
        (20, Band(mean=2.5, low=2.0, high=3.0)),
    ]


def test_records_survive_an_interruption(tmp_path):
    path = tmp_path / "runs" / "runs.jsonl"
    runs = [run_of(3.0, 2.0), run_of(math.inf, seed=1)]
    for run in runs:
        append_run(path, run)
    with path.open("a") as file:
        file.write('{"cell": {"part": "pre')
    assert read_runs(path) == runs
    append_run(path, run_of(1.0, seed=2))
    assert read_runs(path) == [*runs, run_of(1.0, seed=2)]
    assert read_runs(tmp_path / "none.jsonl") == []


def test_tables_compare_each_seed_with_its_own_target(tmp_path):
    adamw = [run_of(4.0, 3.0, 2.0, lr=lr) for lr in (1e-3,)]
    adamw += [run_of(4.0, 3.5, 3.0), run_of(4.0, 3.5, 1.0, seed=1)][1:]
    dmuon = [run_of(3.0, 1.0, 0.5, seed=s, kind="DMuon", lr=4e-3) for s in (0, 1)]
    never = run_of(5.0, 4.0, 3.9, kind="built-in Muon")
    runs = [*dmuon, never, *adamw, run_of(9.0, kind="DMuon", lr=8e-3)]
    times = [{"kind": "DMuon", "seconds": 2.0}]
    rows = convergence_report.seeds_table(runs, times).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| AdamW", "| DMuon", "| built-in Muon"]
    # Targets 2.0 and 1.0: 15 and 20 steps of 40, 2 s each.
    assert "| 18 (15 to 20) | 0.44 | 35 |" in rows[1]
    assert "not reached by 1 of 1" in rows[2]
    assert "| AdamW | **2.000** |" in convergence_report.sweep_table(runs)
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n")
    convergence_report.splice(page, "x", "new")
    assert page.read_text() == "a\n<!-- begin x -->\nnew\n<!-- end x -->\nb\n"
    convergence_report.plot(runs, tmp_path / "plot.svg", title="")
    assert (tmp_path / "plot.svg").stat().st_size > 1000


class Pretend(compare_convergence.Runner):
    """A runner whose loss is the distance of lr to the optimizer's best."""

    def __init__(self, **optima: float) -> None:
        self.optima, self.cells = optima, []

    def run(self, cell: Cell) -> Run:
        self.cells.append(cell)
        distance = abs(math.log(cell.lr / self.optima[cell.kind]))
        return Run(cell=cell, steps=(cell.steps,), losses=(distance,))


def test_each_optimizer_is_swept_then_repeated_and_dmuon_is_run_at_adamw_s_lr():
    runner = Pretend(AdamW=3e-2, DMuon=1.5e-2)
    found = compare_convergence.compare(runner, CELL, ["AdamW", "DMuon"], seeds=3)
    assert {kind: run.cell.lr for kind, run in found.items()} == {"AdamW": 3.2e-2, "DMuon": 1.6e-2}
    rates = {
        (kind, seed): [c.lr for c in runner.cells if (c.kind, c.seed) == (kind, seed)]
        for kind in found
        for seed in range(3)
    }
    assert rates["AdamW", 0] == [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2]
    assert rates["DMuon", 0] == [8e-3, 1.6e-2, 3.2e-2]
    assert rates["AdamW", 1] == rates["AdamW", 2] == [3.2e-2]
    runner = Pretend(AdamW=2e-3, DMuon=1.5e-2)
    compare_convergence.compare(runner, CELL, ["AdamW", "DMuon"], seeds=1)
    assert 2e-3 in [c.lr for c in runner.cells if c.kind == "DMuon"]


def test_only_the_optimizer_differs_between_configs():
    configs = {
        kind: compare_convergence.cell_config(replace(CELL, kind=kind), 2)
        for kind in compare_convergence.KINDS
    }
    params = {kind: config.pop("optimizer")["params"] for kind, config in configs.items()}
    zero = {kind: config.pop("zero_optimization") for kind, config in configs.items()}
    for kind, config in configs.items():
        clipping = 0.0 if "no clipping" in kind else 1.0
        assert config == configs["AdamW"] | {"gradient_clipping": clipping}
        assert zero[kind].get("reduce_scatter", True) == (not kind.startswith("built-in"))
    assert configs["AdamW"]["train_micro_batch_size_per_gpu"] == 1
    assert {p["weight_decay"] for p in params.values()} == {0.1}
    two = params["built-in Muon, two lr, no clipping"]
    assert (two["muon_lr"], two["adam_lr"]) == (1e-3, 2e-3)
