# SPDX-License-Identifier: Apache-2.0
"""Plot the runs of scripts/compare_convergence.py and write their tables into docs/results.md.

python -m scripts.convergence_report --save docs/results

Tables that the page has no markers for are printed, all of them without --save. Nothing is trained
here; what was not run is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from scripts.convergence import Run, band, best, curve, read_runs, steps_to  # noqa: E402

BEGIN, END = "<!-- begin {} -->", "<!-- end {} -->"
BASE = "AdamW"


def kinds_of(runs: Sequence[Run]) -> list[str]:
    """Names of the optimizers, AdamW first, then as they were run."""
    names = dict.fromkeys(run.cell.kind for run in runs)
    return sorted(names, key=lambda name: name != BASE)


def sweep_of(runs: Sequence[Run], kind: str) -> list[Run]:
    """The optimizer's runs at seed 0, by lr."""
    found = [run for run in runs if run.cell.kind == kind and run.cell.seed == 0]
    return sorted(found, key=lambda run: run.cell.lr)


def seeds_of(runs: Sequence[Run], kind: str) -> list[Run]:
    """The optimizer's runs at the best lr of its sweep, by seed."""
    lr = best(sweep_of(runs, kind)).cell.lr
    found = [run for run in runs if run.cell.kind == kind and run.cell.lr == lr]
    return sorted(found, key=lambda run: run.cell.seed)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def sweep_table(runs: Sequence[Run]) -> str:
    """Last held-out loss of every swept lr at seed 0; the best in bold, with its neighbours."""
    rates = sorted({run.cell.lr for run in runs if run.cell.seed == 0})
    rows = []
    for kind in kinds_of(runs):
        found = {run.cell.lr: run.final for run in sweep_of(runs, kind)}
        lowest = best(sweep_of(runs, kind)).cell.lr
        cells = [f"{found[lr]:.3f}" if lr in found else "" for lr in rates]
        rows.append(
            [kind, *(f"**{c}**" if lr == lowest else c for lr, c in zip(rates, cells, strict=True))]
        )
    return table(["lr", *(f"{lr:g}" for lr in rates)], rows)


def seeds_table(runs: Sequence[Run], times: Sequence[dict[str, float]]) -> str:
    """Over seeds at the best lr: last loss, and the steps and seconds to AdamW's last loss."""
    targets = {run.cell.seed: run.final for run in seeds_of(runs, BASE)}
    step_s = {entry["kind"]: entry["seconds"] for entry in times}
    fine_tuned = any(run.first_losses for run in runs)
    rows = []
    for kind in kinds_of(runs):
        own = [run for run in seeds_of(runs, kind) if run.cell.seed in targets]
        total = own[0].cell.steps
        reached = [steps_to(run, targets[run.cell.seed]) for run in own]
        row = [kind, f"{own[0].cell.lr:g}", str(len(own)), f"{band(run.final for run in own):.3f}"]
        if fine_tuned:
            row.append(f"{band(run.first_losses[-1] for run in own):.3f}")
        if None in reached:
            row += [f"not reached by {reached.count(None)} of {len(own)}", "-", "-"]
        else:
            steps = band(reached)
            row.append(f"{steps:.0f}")
            row.append(f"{steps.mean / total:.2f}")
            row.append(f"{steps.mean * step_s[kind]:.0f}" if kind in step_s else "-")
        rows.append(row)
    loss = ["new text", "old text"] if fine_tuned else ["last held-out loss"]
    columns = ["optimizer", "lr", "seeds", *loss, "steps to AdamW's last loss", "of all steps"]
    return table([*columns, "seconds to it"], rows)


def carry_over_table(runs_by_width: dict[int, list[Run]]) -> str:
    """DMuon at AdamW's best lr beside both optimizers' best, per width, seed 0."""
    rows = []
    for width, runs in sorted(runs_by_width.items()):
        if "DMuon" not in kinds_of(runs):
            continue
        adamw, dmuon = (best(sweep_of(runs, kind)) for kind in (BASE, "DMuon"))
        (same,) = [r for r in sweep_of(runs, "DMuon") if r.cell.lr == adamw.cell.lr]
        reached = steps_to(same, adamw.final)
        rows.append(
            [
                str(width),
                f"{adamw.cell.lr:g}",
                f"{adamw.final:.3f}",
                f"{same.final:.3f}",
                "not reached" if reached is None else f"{reached / same.cell.steps:.2f}",
                f"{dmuon.cell.lr:g}",
                f"{dmuon.final:.3f}",
                f"{steps_to(dmuon, adamw.final) / dmuon.cell.steps:.2f}",
                f"{dmuon.cell.lr / adamw.cell.lr:g}",
            ]
        )
    columns = ("width", "AdamW's best lr", "AdamW", "DMuon at that lr", "its share of steps")
    more = ("DMuon's best lr", "DMuon at its own", "its share of steps", "ratio of best lr")
    return table([*columns, *more], rows)


def times_table(times: Sequence[dict[str, float]]) -> str:
    """Seconds per optimizer step beside AdamW's."""
    base = next(entry for entry in times if entry["kind"] == BASE)
    rows = [
        [
            entry["kind"],
            f"{entry['seconds']:.3f}",
            f"{entry['seconds'] / base['seconds']:.2f}",
            f"{entry['cpu_seconds'] / base['cpu_seconds']:.2f}",
        ]
        for entry in times
    ]
    return table(
        ["optimizer", "seconds per step", "beside AdamW", "CPU seconds beside AdamW"], rows
    )


def plot(runs: Sequence[Run], out: Path, *, title: str) -> None:
    """Mean held-out loss over seeds at each optimizer's best lr, with a band from min to max."""
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for kind in kinds_of(runs):
        own = seeds_of(runs, kind)
        points = curve(own)
        steps = [step for step, _ in points]
        label = f"{kind}, lr {own[0].cell.lr:g}"
        (line,) = axes.plot(steps, [b.mean for _, b in points], label=label)
        low, high = [b.low for _, b in points], [b.high for _, b in points]
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.25, lw=0)
    target = band(run.final for run in seeds_of(runs, BASE)).mean
    axes.axhline(target, color="gray", ls=":", lw=1)
    axes.set(xlabel="step", ylabel="held-out loss, nats per byte", title=title)
    highest = max(run.losses[0] for run in seeds_of(runs, BASE))
    axes.set_ylim(top=highest + 0.1)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(out, dpi=100)
    plt.close(figure)


def splice(page: Path, name: str, text: str) -> None:
    """Replace what stands between the page's markers of this name."""
    content = page.read_text()
    begin, end = BEGIN.format(name), END.format(name)
    before, rest = content.split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--save", type=Path, help="folder of plots, beside the page of its name")
    args = parser.parse_args()
    runs = read_runs(args.runs / "runs.jsonl")
    if not runs:
        parser.error(f"{args.runs}/runs.jsonl has no runs; those of the page: --runs docs/results")
    times_file = args.runs / "times.json"
    times = json.loads(times_file.read_text()) if times_file.exists() else []
    pretrain: dict[int, list[Run]] = {}
    for run in runs:
        if run.cell.part == "pretrain":
            pretrain.setdefault(run.cell.width, []).append(run)
    finetune = [run for run in runs if run.cell.part == "finetune"]
    groups = {f"pretrain_{width}": own for width, own in sorted(pretrain.items(), reverse=True)}
    if finetune:
        groups["finetune"] = finetune
    sections = {}
    for name, own in groups.items():
        timed = [entry for entry in times if entry["width"] == own[0].cell.width]
        sections[f"{name} sweep"] = sweep_table(own)
        sections[f"{name} seeds"] = seeds_table(own, timed)
    sections["carry over"] = carry_over_table(pretrain)
    if times:
        sections["times"] = times_table(times)
    for name, text in sections.items():
        page = args.save and args.save.with_suffix(".md")
        if page is not None and BEGIN.format(name) in page.read_text():
            splice(page, name, text)
        else:
            print(f"{name}\n\n{text}\n")
    if args.save is not None:
        args.save.mkdir(parents=True, exist_ok=True)
        for name, own in groups.items():
            cell = own[0].cell
            title = f"{cell.part}, width {cell.width}: mean and range over seeds"
            plot(own, args.save / f"{name}.svg", title=title)


if __name__ == "__main__":
    main()
