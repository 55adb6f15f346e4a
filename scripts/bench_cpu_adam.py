# SPDX-License-Identifier: Apache-2.0
"""Time AdamW on the host: torch's, fused, beside DeepSpeed's CPU Adam, and compare what they do.

python scripts/bench_cpu_adam.py --numels 1000000 16000000 --threads 1 2

DeepSpeed compiles its operator on first use, for minutes. Runs alternate, so that both see the same
machine. A row says median milliseconds of a step, those on the clock and those of processor time of
all threads, which a busy machine does not inflate; and the largest difference of the parameters
after all steps, relative to the largest parameter.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from rich.console import Console
from rich.table import Table
from torch import Tensor

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def leaf(start: Tensor) -> Tensor:
    """A parameter of its own with the given start."""
    return torch.nn.Parameter(start.clone())


def compare(numel: int, repeats: int) -> tuple[list[float], float]:
    """Medians of torch's step and of DeepSpeed's, each on the clock and of the processor, in
    milliseconds; and how far their parameters are apart."""
    start = torch.randn(numel)
    leaves = [leaf(start), leaf(start)]
    optimizers = [
        torch.optim.AdamW([leaves[0]], fused=True, **OPTIONS),
        DeepSpeedCPUAdam([leaves[1]], adamw_mode=True, **OPTIONS),
    ]
    clocks = [time.perf_counter, time.process_time]
    seconds: list[list[float]] = [[], [], [], []]
    for _ in range(repeats + 1):
        grad = torch.randn(numel)
        for number, (parameter, optimizer) in enumerate(zip(leaves, optimizers, strict=True)):
            parameter.grad = grad
            began = [clock() for clock in clocks]
            optimizer.step()
            for kind, clock in enumerate(clocks):
                seconds[2 * number + kind].append(clock() - began[kind])
    one, other = (parameter.detach() for parameter in leaves)
    gap = float((one - other).abs().max() / one.abs().max())
    return [1e3 * statistics.median(values[1:]) for values in seconds], gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numels", type=int, nargs="+", default=[10**6, 16 * 10**6])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--repeats", type=int, default=15)
    asked = parser.parse_args()
    kinds = [f"{name}, {kind} ms" for name in ("torch", "DeepSpeed") for kind in ("clock", "CPU")]
    table = Table("elements", "threads", *kinds, "difference")
    for threads in asked.threads:
        torch.set_num_threads(threads)
        for numel in asked.numels:
            medians, gap = compare(numel, asked.repeats)
            times = [f"{value:.2f}" for value in medians]
            table.add_row(f"{numel:,}", str(threads), *times, f"{gap:.1e}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
