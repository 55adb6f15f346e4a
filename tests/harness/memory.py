# SPDX-License-Identifier: Apache-2.0
"""Memory: live bytes of all tensors while a function runs, temporaries inside kernels too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """Bytes beyond those at the start: most at a time, and those at the end."""

    peak: int
    left: int


def allocated(run: Callable[[], object]) -> Allocated:
    """Bytes that torch's allocator holds while a function runs, on the accelerator if any."""
    if torch.accelerator.current_accelerator() is not None:
        return _on_accelerator(run)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return Allocated(peak=peak, left=live)


def _on_accelerator(run: Callable[[], object]) -> Allocated:
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    run()
    torch.accelerator.synchronize()
    peak = torch.accelerator.max_memory_allocated()
    return Allocated(peak=peak - before, left=torch.accelerator.memory_allocated() - before)


def peak_allocated(run: Callable[[], object]) -> int:
    """Most bytes that torch's allocator held at a time, beyond what it held at the start."""
    return allocated(run).peak
