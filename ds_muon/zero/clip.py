# SPDX-License-Identifier: Apache-2.0
"""QK-clip of an engine: measured heads, the leaves that hold their rows, and when it is reset."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_muon.attention.find import require_eager, unknown_attention
from ds_muon.attention.probe import LogitProbe
from ds_muon.checkpoint import CheckpointHeader
from ds_muon.log import say
from ds_muon.plan.heads import RowRange, row_ranges
from ds_muon.run.clip import QkClip
from ds_muon.run.metrics import Recorder
from ds_muon.run.publish import Publisher
from ds_muon.zero.prepare import Preparation
from ds_muon.zero.seams import override, private
from ds_muon.zero.wrapping import after


def clip_for(
    engine: Any,
    prepared: Preparation,
    header: CheckpointHeader,
    publisher: Publisher | None,
    recorder: Recorder | None,
) -> QkClip | None:
    """Build what `qk_clip` asks for, and hook the engine's module and step.

    Args:
        publisher: brings updates from other replicas, which have to be here before rows are scaled.
    """
    if prepared.config.qk_clip is None:
        return None
    probe = LogitProbe(prepared.attention, torch.device(get_accelerator().current_device_name()))
    names = {p.name for module in probe.slots.modules for p in module.projections}
    placed: dict[int, list[tuple[str, RowRange]]] = {}
    for leaf, slices in header.slices.items():
        for item in slices:
            if item.name in names:
                ranges = row_ranges(
                    parameter_offset=item.parameter_offset,
                    leaf_offset=item.leaf_offset,
                    numel=item.numel,
                    cols=torch.Size(item.shape[1:]).numel(),
                )
                placed.setdefault(leaf, []).extend((item.name, found) for found in ranges)
    matrices = frozenset(
        placement.matrix.name
        for _, route in prepared.matrices()
        if route.name in names
        for placement in route.placements
    )
    clip = QkClip(
        prepared.transport,
        probe.slots,
        probe.largest,
        placed,
        tau=prepared.config.qk_clip.tau,
        settle=functools.partial(_settle, publisher, matrices),
    )
    engine.compile = after(engine.compile, functools.partial(require_eager, engine.module))
    # After any step, taken or skipped for overflow.
    step = after(private(engine, "_take_model_step"), clip.reset)
    override(engine, "_take_model_step", step)
    if recorder is not None:
        recorder.gauges["max_attention_logit"] = clip.largest
    _report(engine, prepared, probe)
    return clip


def _settle(publisher: Publisher | None, matrices: frozenset[str]) -> None:
    if publisher is not None:
        publisher.settle(matrices)


def _report(engine: Any, prepared: Preparation, probe: LogitProbe) -> None:
    slots, rank = probe.slots, prepared.transport.rank
    say(
        f"qk_clip: {slots.heads} heads of {len(slots.modules)} attention modules are measured and "
        f"scaled above tau = {prepared.config.qk_clip.tau:g}",
        rank=rank,
    )
    others = unknown_attention(engine.module, prepared.attention)
    if others:
        say(
            f"qk_clip: {len(others)} attention modules are of a kind that is not known, and stay "
            f"unclipped: {', '.join(others[:3])}{', ...' if len(others) > 3 else ''}",
            rank=rank,
            level=logging.WARNING,
        )
