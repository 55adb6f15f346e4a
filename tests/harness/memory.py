# SPDX-License-Identifier: Apache-2.0
"""Memory: live bytes of all tensors while a function runs, temporaries inside kernels too."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_allocated(run: Callable[[], object]) -> int:
    """Most bytes that torch's allocator held at a time, beyond what it held at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
