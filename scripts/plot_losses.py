# SPDX-License-Identifier: Apache-2.0
"""Plot held-out losses of scripts/train.py runs and print them side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", type=Path, nargs="+", help="metrics.json of each run")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for path in args.metrics:
        run = json.loads(path.read_text())
        label = f"{run['optimizer']['type']}, lr {run['optimizer']['params']['lr']:g}"
        steps = [entry["step"] for entry in run["log"]]
        (line,) = axes.plot(steps, [e["held_out"] for e in run["log"]], marker="o", label=label)
        axes.plot(
            steps, [e["train"] for e in run["log"]], ls=":", alpha=0.6, color=line.get_color()
        )
        print(
            f"{label:24s} held-out {run['log'][-1]['held_out']:.4f} nats/byte after "
            f"{run['steps']} steps, {run['tokens_per_second']:,.0f} tokens/s"
        )
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="held-out (dotted: last batch)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(args.out, dpi=120)


if __name__ == "__main__":
    main()
