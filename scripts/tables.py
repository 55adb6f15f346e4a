# SPDX-License-Identifier: Apache-2.0
"""The counting scripts' arguments, and their tables: printed, and as pages of docs/."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.arguments import positive, writable


def read_arguments(description: str, *, stages: Sequence[int]) -> argparse.Namespace:
    """Read the size of a run, the stages to count, and where to save the table."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--ranks", type=positive, default=4)
    parser.add_argument("--width", type=positive, default=128)
    parser.add_argument("--layers", type=positive, default=3)
    parser.add_argument("--stages", type=int, nargs="+", default=list(stages), choices=list(stages))
    parser.add_argument("--save", type=writable, help="write the table as a page of docs/")
    return parser.parse_args()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """One table: what its columns and rows are of, and the cells as text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> list[str]:
        """Lines of a page."""
        return [
            f"| {' | '.join(self.columns)} |",
            f"|{'---|' * len(self.columns)}",
            *(f"| {' | '.join(row)} |" for row in self.rows),
        ]


def show(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    save: Path | None,
    heading: str,
    command: str,
    text: str,
    option: str = "--save",
) -> None:
    """Print a table; with `save`, write it under a heading, the command and a text."""
    table = Measurements(title=title, columns=columns, rows=rows)
    print_table(table)
    if save is not None:
        wrote = f"`{command} {option} {save}` wrote this page: {title}."
        write_page(save, [f"# {heading}", "", wrote, "", text, "", *table.markdown()])


def print_table(measurements: Measurements) -> None:
    """Print a table."""
    table = Table(*measurements.columns, title=measurements.title)
    for row in measurements.rows:
        table.add_row(*row)
    Console(width=160).print(table)


def write_page(save: Path, lines: Sequence[str]) -> None:
    """Write a page of docs/."""
    save.parent.mkdir(parents=True, exist_ok=True)
    save.write_text("\n".join(lines) + "\n")
