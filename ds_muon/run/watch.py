# SPDX-License-Identifier: Apache-2.0
"""Watch: where an optimizer step begins and ends, for those who observe it.

ZeRO calls the base optimizer once per group (1, 2) or sub-group (3), each time with other leaves in
`param_groups`; a step is over when every leaf has been stepped. A step that ZeRO skips for overflow
is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor


class Observer(Protocol):
    """Somebody who is told; on all ranks alike, so it may communicate."""

    def begin(self) -> None:
        """Before the first leaf of a step."""

    def finish(self) -> None:
        """After the last leaf of a step."""


class StepWatch:
    """Tells observers about steps.

    Args:
        leaves: all leaves of an optimizer step.
    """

    def __init__(self, leaves: Sequence[Tensor], observers: Sequence[Observer]) -> None:
        self._all = frozenset(id(leaf) for leaf in leaves)
        self._observers = tuple(observers)
        self._left: set[int] = set()

    @contextlib.contextmanager
    def stepping(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        """Surround one call of the base optimizer, for the leaves that it steps."""
        called = {id(leaf) for leaf in leaves}
        if not self._observers or not called:
            yield
            return
        if not called <= self._left:
            self._left = set(self._all)
            for observer in self._observers:
                observer.begin()
        yield
        self._left -= called
        if not self._left:
            for observer in self._observers:
                observer.finish()
