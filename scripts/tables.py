# SPDX-License-Identifier: Apache-2.0
"""Tables of the counting scripts: printed, and as a page of docs/ that names its command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table


def show(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    save: Path | None,
    heading: str,
    command: str,
    text: str,
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
        f"`{command} --save {save}` wrote this page: {title}.",
        "",
        text,
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    save.parent.mkdir(parents=True, exist_ok=True)
    save.write_text("\n".join(lines) + "\n")
