# SPDX-License-Identifier: Apache-2.0
"""Show: findings as text, in colour where rich is installed, or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from ds_muon.diagnose.findings import Finding, exit_status

_STYLES = {"ok": "green", "hint": "yellow", "problem": "bold red"}


def print_json(findings: Sequence[Finding]) -> None:
    """Print one JSON object."""
    shown = {"status": exit_status(findings), "findings": [asdict(f) for f in findings]}
    print(json.dumps(shown, indent=1))


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a line per finding, problems last, and a verdict."""
    ordered = sorted(findings, key=lambda f: list(_STYLES).index(f.level))
    problems = sum(f.level == "problem" for f in findings)
    hints = sum(f.level == "hint" for f in findings)
    verdict = f"{problems} problem(s), {hints} hint(s)"
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for f in ordered:
            print(f"{f.level:8} {f.topic:13} {f.text}")
        print(verdict)
        return
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name in ("level", "topic", "text"):
        table.add_column(name, overflow="fold")
    for f in ordered:
        # Plain text in the cells: a path may hold what rich takes for markup.
        table.add_row(f"[{_STYLES[f.level]}]{f.level}[/]", f.topic, f.text.replace("[", r"\["))
    console.print(table)
    console.print(verdict)
