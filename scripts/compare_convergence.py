# SPDX-License-Identifier: Apache-2.0
"""Train the byte-level model with AdamW, the built-in Muon and DMuon, each at its best lr.

deepspeed --num_gpus 2 --module scripts.compare_convergence
python -m scripts.convergence_report        # plots and tables, at any time

Every optimizer's lr is swept in factors of 2 at seed 0, beyond an edge as long as the best lies
there; then the best lr is run with more seeds. All runs of a part share initialisation, windows,
schedule, batch, decay and clipping; only the optimizer differs. The ranks run one cell after
another, without a new start; finished cells are lines of runs/convergence/runs.jsonl, and are
not run again.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch

from scripts.byte_lm import ByteLM, held_out_loss, read_text, training_steps
from scripts.convergence import Cell, Run, append_run, best, beyond_edge, read_runs

CONFIG = Path("ds_config_examples/zero2.json")
EVAL_EVERY, EVAL_BATCHES = 10, 2
PARTS = ("pretrain", "finetune", "time")
BETAS = [0.9, 0.95]  # DMuon's default, given to the built-in too


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An optimizer as the config names it, and where its sweep begins.

    Attributes:
        lr_key: the parameter that is swept.
        clipping: None is the example config's.
    """

    type: str
    params: dict[str, Any]
    rates: tuple[float, ...]
    lr_key: str = "lr"
    clipping: float | None = None


# The built-in clips what it orthogonalised, so that its matrices move far less than lr says and
# decay as fast as lr says. It is shown with the same config, and without clipping, where the lr of
# the rest of the model is the same or AdamW's best.
KINDS = {
    # Its loss has more than one minimum along lr, so its sweep begins wide.
    "AdamW": Kind(
        type="AdamW", params={"torch_adam": True}, rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
    ),
    # In the arithmetic that it has on a GPU, wherever this runs.
    "DMuon": Kind(type="DMuon", params={"ns_dtype": "bf16"}, rates=(8e-3, 1.6e-2, 3.2e-2)),
    "built-in Muon": Kind(
        type="Muon",
        params={"betas": BETAS, "torch_adam": True},
        rates=(8e-3, 1.6e-2, 3.2e-2),
    ),
    "built-in Muon, no clipping": Kind(
        type="Muon",
        params={"betas": BETAS, "torch_adam": True},
        rates=(1.6e-2, 3.2e-2, 6.4e-2),
        clipping=0.0,
    ),
    "built-in Muon, two lr, no clipping": Kind(
        type="Muon",
        params={"betas": BETAS, "torch_adam": True, "adam_lr": 2e-3},
        rates=(3.2e-2, 6.4e-2, 0.128),
        lr_key="muon_lr",
        clipping=0.0,
    ),
    "DMuon, keller": Kind(
        type="DMuon",
        params={"recipe": "keller", "ns_dtype": "bf16"},
        rates=(1.6e-2, 3.2e-2, 6.4e-2),
    ),
    "AdamW, beta2 0.95": Kind(
        type="AdamW", params={"betas": BETAS, "torch_adam": True}, rates=(1e-3, 2e-3, 4e-3)
    ),
}


class Runner:
    """Runs cells on the ranks of this process group, each once."""

    def __init__(self, out: Path) -> None:
        self._file = out / "runs.jsonl"
        self._weights = out / "weights"
        self._done = {run.cell: run for run in read_runs(self._file)}
        self._texts = {kind: read_text(kind) for kind in ("stdlib", "headers")}
        self._is_first = torch.distributed.get_rank() == 0
        if self._is_first:
            self._weights.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()

    def start_engine(self, cell: Cell) -> Any:
        """A new engine on the cell's model, initialised by its seed or with another's weights."""
        torch.manual_seed(cell.seed)
        model = ByteLM(width=cell.width, layers=cell.layers)
        if cell.start:
            model.load_state_dict(torch.load(self._weights / f"{cell.start}.pt"))
        world = torch.distributed.get_world_size()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=cell_config(cell, world)
        )
        return engine

    def run(self, cell: Cell) -> Run:
        """Train and evaluate, unless that was done."""
        if cell in self._done:
            return self._done[cell]
        started = time.perf_counter()
        engine = self.start_engine(cell)
        train_text, held_out = self._texts["headers" if cell.part == "finetune" else "stdlib"]
        _, first_held_out = self._texts["stdlib"]
        steps, losses, first_losses = [], [], []
        for step in training_steps(engine, train_text, steps=cell.steps, seed=cell.seed):
            if step.number % EVAL_EVERY and step.number != cell.steps:
                continue
            loss = held_out_loss(engine, held_out, batches=EVAL_BATCHES)
            steps.append(step.number)
            losses.append(loss if math.isfinite(loss) else math.inf)
            if cell.part == "finetune":
                first_losses.append(held_out_loss(engine, first_held_out, batches=EVAL_BATCHES))
            if losses[-1] == math.inf:  # the same on every rank
                break
        run = Run(
            cell=cell, steps=tuple(steps), losses=tuple(losses), first_losses=tuple(first_losses)
        )
        self._done[cell] = run
        if self._is_first:
            if cell.part == "pretrain" and cell.seed == 0:
                torch.save(engine.module.state_dict(), self._weights / f"{cell.name}.pt")
            append_run(self._file, run)
            seconds = time.perf_counter() - started
            print(f"{cell.name}: held-out {run.final:.4f}, {seconds:.0f} s", flush=True)
        engine.destroy()
        del engine
        gc.collect()
        torch.distributed.barrier()
        return run

    def sweep(self, cell: Cell, rates: Sequence[float]) -> Run:
        """Run the cell at these lrs and beyond until the best is inside; returns that run."""
        runs = [self.run(replace(cell, lr=lr)) for lr in sorted(set(rates))]
        while (lr := beyond_edge(runs)) is not None:
            runs.append(self.run(replace(cell, lr=lr)))
        return best(runs)


def cell_config(cell: Cell, world: int) -> dict[str, Any]:
    """The example config with the cell's optimizer, batch and schedule."""
    config = json.loads(CONFIG.read_text())
    kind = KINDS[cell.kind]
    params = {"lr": cell.lr, "weight_decay": config["optimizer"]["params"]["weight_decay"]}
    config["optimizer"] = {
        "type": kind.type,
        "params": params | copy.deepcopy(kind.params) | {kind.lr_key: cell.lr},
    }
    config["train_micro_batch_size_per_gpu"] = cell.windows // world
    config["scheduler"]["params"] = {
        "total_num_steps": cell.steps,
        "warmup_num_steps": cell.steps // 12,
    }
    if kind.clipping is not None:
        config["gradient_clipping"] = kind.clipping
    if kind.type == "Muon":
        config["zero_optimization"]["reduce_scatter"] = False  # its own requirement
    return config


def compare(runner: Runner, cell: Cell, kinds: Sequence[str], *, seeds: int) -> dict[str, Run]:
    """Sweep each optimizer at seed 0, then run the best lr with the other seeds."""
    found: dict[str, Run] = {}
    for kind in kinds:
        rates = KINDS[kind].rates
        if kind == "DMuon" and "AdamW" in found:
            rates = (*rates, found["AdamW"].cell.lr)  # how far AdamW's own lr carries
        found[kind] = runner.sweep(replace(cell, kind=kind), rates)
        for seed in range(1, seeds):
            runner.run(replace(found[kind].cell, seed=seed))
    return found


def time_steps(runner: Runner, cells: Sequence[Cell], *, rounds: int, steps: int) -> list[Any]:
    """Seconds per step of all cells' engines, kept side by side and stepped in turns.

    Returns:
        Per cell its kind, and the median over all its steps of this rank's wall and CPU seconds;
        the first turn warms up.
    """
    engines = [(cell, runner.start_engine(cell), [], []) for cell in cells]
    text, _ = read_text("stdlib")
    for turn in range(rounds + 1):
        for _, engine, seconds, cpu_seconds in engines:
            for step in training_steps(engine, text, steps=steps, seed=turn):
                if turn:
                    seconds.append(step.seconds)
                    cpu_seconds.append(step.cpu_seconds)
    return [
        {
            "kind": cell.kind,
            "width": cell.width,
            "seconds": statistics.median(seconds),
            "cpu_seconds": statistics.median(cpu_seconds),
        }
        for cell, _, seconds, cpu_seconds in engines
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--finetune_steps", type=int, default=60)
    parser.add_argument("--windows", type=int, default=16, help="per step, of all ranks")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.logger.setLevel("ERROR")
    # The built-in's functions would be compiled, for minutes on a CPU; DMuon's run as they are.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # A paused machine is no hang.
    deepspeed.init_distributed(timeout=timedelta(hours=6))
    runner = Runner(args.out)
    cell = Cell(
        part="pretrain",
        kind="AdamW",
        lr=0.0,
        seed=0,
        width=args.width,
        layers=args.layers,
        steps=args.steps,
        windows=args.windows,
    )
    if "pretrain" in args.parts:
        compare(runner, cell, args.kinds, seeds=args.seeds)
    if "finetune" in args.parts:
        start = runner.sweep(cell, KINDS["AdamW"].rates).cell.name
        tuned = replace(cell, part="finetune", start=start, steps=args.finetune_steps)
        compare(runner, tuned, args.kinds, seeds=args.seeds)
    if "time" in args.parts:
        cells = [replace(cell, kind=kind, lr=1e-3) for kind in args.kinds]
        times = time_steps(runner, cells, rounds=6, steps=4)
        if torch.distributed.get_rank() == 0:
            (args.out / "times.json").write_text(json.dumps(times, indent=1) + "\n")


if __name__ == "__main__":
    main()
