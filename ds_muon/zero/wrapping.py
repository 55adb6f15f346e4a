# SPDX-License-Identifier: Apache-2.0
"""Wrapping: functions of DeepSpeed's objects with something of ours before or after them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


def before(function: Callable[..., Any], action: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that first does `action`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        action()
        return function(*args, **kwargs)

    return call


def after(function: Callable[..., Any], action: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that does `action` once it has a result."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        action()
        return result

    return call


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give one object other attributes for a while."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(owner)[name]
        vars(owner).update(before)
