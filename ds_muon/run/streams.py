# SPDX-License-Identifier: Apache-2.0
"""Streams: the order of work that one stream of a device launches and another one finishes.

ZeRO-3 gathers parameters on a stream of its own, and what arrives for them is applied there. On a
device without streams nothing is done.
"""

from __future__ import annotations

import torch
from torch import Tensor


class StreamOrder:
    """Orders streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._finished: dict[torch.Stream, torch.Event] = {}

    def current(self) -> torch.Stream | None:
        """The stream that work is put on now."""
        if self._device.type == "cpu":
            return None
        return torch.accelerator.current_stream(self._device)

    def follow(self, launched: torch.Stream | None, buffer: Tensor) -> None:
        """Let the current stream go on after everything on `launched`, and use its buffer."""
        now = self.current()
        if now is None or launched is None or now == launched:
            return
        now.wait_stream(launched)
        buffer.record_stream(now)

    def finish(self) -> None:
        """Remember that work of the current stream ends here."""
        now = self.current()
        if now is not None:
            self._finished[now] = now.record_event()

    def join(self) -> None:
        """Let the current stream go on after all work that other streams finished."""
        now = self.current()
        if now is None:
            return
        for stream, event in self._finished.items():
            if stream != now:
                now.wait_event(event)
        self._finished.clear()
