# SPDX-License-Identifier: Apache-2.0
"""Wrapping: functions of DeepSpeed's objects with something of ours before or after them."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
