# SPDX-License-Identifier: Apache-2.0
"""The counting scripts' arguments, and their tables: printed, and as pages of docs/."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table


def read_arguments(description: str, *, stages: Sequence[int]) -> argparse.Namespace:
    """Read the size of a run, the stages to count, and where to save the table."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--stages", type=int, nargs="+", default=list(stages))
    parser.add_argument("--save", type=Path, help="write the table as a page of docs/")
    return parser.parse_args()


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
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)
    if save is None:
        return
    lines = [
        f"# {heading}",
        "",
        f"`{command} {option} {save}` wrote this page: {title}.",
        "",
        text,
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    save.parent.mkdir(parents=True, exist_ok=True)
    save.write_text("\n".join(lines) + "\n")
