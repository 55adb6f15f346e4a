# SPDX-License-Identifier: Apache-2.0
"""Types of the scripts' arguments: what cannot be measured is said before anything is."""

from __future__ import annotations

import argparse
from pathlib import Path


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def pair(text: str) -> tuple[int, int]:
    """Two whole numbers from 1 on, such as 512x2."""
    parts = text.split("x")
    if len(parts) != 2 or not all(p.isdigit() and int(p) for p in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers from 1 on, such as 512x2")
    return int(parts[0]), int(parts[1])


def writable(text: str) -> Path:
    """A file that can be written; its folders are made."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    return path
