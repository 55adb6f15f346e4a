# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md quotes what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def said() -> list[str]:
    """All texts in the package, those of f-strings with {} for what is filled in."""
    found = []
    for path in (ROOT / "ds_muon").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "{}" for v in node.values]
                found.append("".join(parts))
    return found


def test_quoted_messages_are_in_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text().split("## DeepSpeed itself")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    quotes = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]
    assert len(quotes) > 40
    texts = said()
    assert [quote for quote in quotes if not any(quote in text for text in texts)] == []
