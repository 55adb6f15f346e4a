# SPDX-License-Identifier: Apache-2.0
"""Show: the records of `ds_muon plan` as tables and as a plot.

Never does: compute what it shows.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ds_muon.preview.record import Placed, Preview
from ds_muon.preview.sweep import Cluster, ShardSize

_MIB = 2**20
PLOT_SUFFIXES = (".png", ".pdf", ".svg")


def require_plot(path: Path) -> None:
    """Refuse a plot that could not be written, before anything is computed for it.

    Raises:
        ValueError: names the path and why.
    """
    if path.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"--plot {path} must end in one of {', '.join(PLOT_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ValueError('--plot needs matplotlib: pip install ".[cli]"')
    if path.is_dir():
        raise ValueError(f"--plot {path} is a folder; name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"--plot {path} cannot be written: {error.strerror}") from None


def print_preview(found: Preview, seconds: float) -> None:
    """Print facts, traffic and warnings."""
    console = _console()
    replicas = found.world_size // found.shard_size
    title = f"ZeRO-{found.stage}, {found.world_size} ranks"
    title += f": {replicas} replicas of {found.shard_size}" if replicas > 1 else ""
    facts = Table(title=title, show_header=False)
    for name, value in _facts(found):
        facts.add_row(name, value)
    console.print(facts)
    console.print(f"planned in {seconds:.1f} s")
    traffic = Table(title="millions of elements received per rank and step")
    columns = ["", "gradients", "parameters", "exchange, mean", "exchange, busiest"]
    columns += ["replicas"] * (replicas > 1) + ["total"]
    timed = any(row.seconds is not None for row in found.traffic)
    for column in [*columns, *(["predicted ms"] if timed else [])]:
        traffic.add_column(column, justify="right", no_wrap=not column)
    for row in found.traffic:
        numbers = [row.gradients, row.parameters, row.exchange_mean, row.exchange_busiest]
        numbers += [row.replicate] * (replicas > 1)
        total = row.gradients + row.parameters + row.exchange_mean + row.replicate
        cells = [row.optimizer, *(_millions(n) for n in (*numbers, total))]
        traffic.add_row(*cells, *([_milliseconds(row.seconds)] if timed else []))
    console.print(traffic)
    for warning in found.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)


def _console() -> Console:
    """As wide as the terminal; elsewhere wide enough for every column."""
    return Console(width=None if sys.stdout.isatty() else 160)


def _facts(found: Preview) -> list[tuple[str, str]]:
    mean, largest, shared = found.bound_terms
    workspace = found.workspace_bytes or (0,)
    average = sum(workspace) / len(workspace)
    rows = [
        ("matrices", f"{found.num_matrices:,}, of which {found.num_straddlers:,} on several ranks"),
        ("buckets, exchange", f"{found.num_buckets}, by {', '.join(found.exchange) or 'nothing'}"),
        ("padding received, busiest rank", f"{found.padding_numel:,} elements"),
        ("makespan over sum/N", f"{found.makespan_over_mean:.3f}"),
        ("makespan over the bound", f"{found.makespan_over_bound:.3f}"),
        ("bound: sum/N, largest, two that share", f"{mean:.3g}, {largest:.3g}, {shared:.3g} flops"),
        (
            "optimizer state per rank",
            f"{found.state_bytes / _MIB:,.1f} MiB" + (", on the host" * found.state_on_host),
        ),
        *(
            [("all that is offloaded, per rank", f"{found.host_bytes / _MIB:,.1f} MiB on the host")]
            if found.host_bytes
            else []
        ),
        ("the same for AdamW over all ranks", f"{found.adamw_state_bytes / _MIB:,.1f} MiB"),
        (
            "exchange and iteration at peak, on the device"
            if found.host_bytes
            else "exchange and iteration at peak",
            f"{max(workspace) / _MIB:,.1f} MiB, {average / _MIB:,.1f} on average",
        ),
        *(
            [("updates between replicas at peak", f"{found.publish_bytes / _MIB:,.1f} MiB")]
            if found.publish_bytes
            else []
        ),
        ("communicator (NCCL, estimate)", f"{found.communicator_bytes / _MIB:,.0f} MiB"),
    ]
    for name, seconds in (
        ("Newton-Schulz, predicted", found.ns_seconds),
        ("exchange, predicted", found.exchange_seconds),
    ):
        if seconds is not None:
            rows.append((name, f"{_milliseconds(seconds)} ms"))
    return rows


def print_matrices(matrices: Sequence[Placed]) -> None:
    """Print every matrix with its holders and its owner."""
    table = Table(title="matrices")
    for column in ("name", "shape", "held by", "owner", "bucket"):
        table.add_column(column)
    for m in matrices:
        table.add_row(m.name, f"{m.rows}x{m.cols}", _ranks(m.holders), str(m.owner), str(m.bucket))
    _console().print(table)


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "all, whole"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def print_sweep(rows: Sequence[ShardSize], cluster: Cluster) -> None:
    """Print one line per shard size, and the recommended one."""
    table = Table(title="HSDP: millions of elements per rank and step, MiB per rank")
    for column in (
        "shard size",
        "replicas",
        "makespan over sum/N",
        "shard axis",
        "replicate axis",
        "weighted",
        "weights, gradients, state",
        "workspace",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.shard_size),
            str(row.replicas),
            f"{row.makespan_over_mean:.3f}",
            _millions(row.shard_axis),
            _millions(row.replicate_axis),
            _millions(row.weighted),
            f"{row.state_bytes / _MIB:,.0f}" + ("" if row.fits else " (too much)"),
            f"{row.workspace_bytes / _MIB:,.0f}",
        )
    console = _console()
    console.print(table)
    best = next((row for row in rows if row.recommended), None)
    rule = (
        f"least elements, those between nodes of {cluster.ranks_per_node} ranks counted "
        f"{cluster.link_ratio:g} times"
    )
    if best is None:
        console.print("no shard size fits the memory given: take more ranks or a higher ZeRO stage")
    elif best.replicas == 1:
        console.print(f"recommended: no hsdp ({rule})", soft_wrap=True)
    else:
        console.print(
            f'recommended: "hsdp": {{"shard_size": {best.shard_size}}} ({rule})', soft_wrap=True
        )


def _millions(numel: float) -> str:
    return f"{numel / 1e6:,.3f}" if numel < 1e8 else f"{numel / 1e6:,.0f}"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.2f}"


def plot_loads(loads: Sequence[int], path: Path) -> None:
    """Draw the owners' Newton-Schulz load."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.bar(range(len(loads)), loads)
    axes.axhline(sum(loads) / max(1, len(loads)), color="black", lw=1, label="mean")
    axes.set(xlabel="rank", ylabel="Newton-Schulz flops per step", title="owners' load")
    axes.legend()
    figure.savefig(path, dpi=120)
