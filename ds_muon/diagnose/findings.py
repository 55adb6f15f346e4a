# SPDX-License-Identifier: Apache-2.0
"""Findings: what a diagnosis says, and which of it makes the exit status 1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "hint", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of a diagnosis.

    Attributes:
        topic: what it is about, in a word.
        level: "problem" stops or spoils a run; "hint" costs memory or time, or may surprise.
    """

    topic: str
    level: Level
    text: str


def exit_status(findings: Iterable[Finding]) -> int:
    """1 if there is a problem; hints are no reason to stop."""
    return int(any(f.level == "problem" for f in findings))
