# SPDX-License-Identifier: Apache-2.0
"""Fixtures and process-wide settings of the tests."""

from __future__ import annotations

import os
from typing import Any

from tests.grid import repeats

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out cells that repeat others."""
    found: dict[bool, list[Any]] = {True: [], False: []}
    for item in items:
        cell = getattr(item, "callspec", None)
        found[repeats(item.originalname, cell.params if cell else {})].append(item)
    items[:] = found[False]
    if found[True]:
        config.hook.pytest_deselected(items=found[True])
