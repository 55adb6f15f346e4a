# SPDX-License-Identifier: Apache-2.0
"""Clock: points in time on a device's current stream, or on the host where there is none."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Takes time without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Return now."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Milliseconds; waits for the device where it has to."""
        if self._device.type == "cpu":
            return 1e3 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)
