# SPDX-License-Identifier: Apache-2.0
"""Observe: the recorder and the verifier of an engine, as the configuration asks for them.

Owns: what they need of DeepSpeed: its accelerator's memory counters, its monitor, and the loads
after which master weights are new.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_muon.comm.transport import Transport
from ds_muon.config import DMuonConfig
from ds_muon.log import say
from ds_muon.optimizer import ADAMW, MUON
from ds_muon.ortho.recipes import OrthoSpec
from ds_muon.routing import clean_name
from ds_muon.run.metrics import MemoryProbe, Recorder, StepStats
from ds_muon.run.step import StepEngine
from ds_muon.run.verify import Verifier
from ds_muon.zero.wrapping import after


def recorder_for(
    engine: Any, step_engine: StepEngine, transport: Transport, config: DMuonConfig
) -> Recorder | None:
    """Build the recorder that `metrics` asks for, and let the step engine show it its phases.

    Args:
        transport: over all ranks; the step engine's may be over a row of them.
    """
    if not config.metrics.every:
        return None
    replicas = transport.world_size // step_engine.transport.world_size
    copies = replicas if engine.zero_optimization() else transport.world_size
    accelerator = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    sinks: list[Callable[[StepStats], None]] = []
    if config.metrics.monitor and engine.monitor.enabled:
        sinks.append(functools.partial(_write_to_monitor, engine))
    if config.metrics.buckets:
        sinks.append(lambda stats: say(stats.table(), rank=transport.rank))
    recorder = Recorder(
        config.metrics.every,
        step_engine.plans,
        rank=step_engine.transport.rank,
        device=device,
        share=functools.partial(_share, transport, device),
        copies={MUON: copies if replicas == 1 else 1, ADAMW: copies},
        memory=MemoryProbe(
            allocated=accelerator.memory_allocated,
            peak=accelerator.max_memory_allocated,
            reset_peak=accelerator.reset_peak_memory_stats,
        ),
        sinks=sinks,
    )
    step_engine.recorder = recorder
    return recorder


def _share(transport: Transport, device: torch.device, numbers: list[float]) -> list[list[float]]:
    sent = torch.tensor(numbers, dtype=torch.float64, device=device)
    received = sent.new_empty(transport.world_size * len(numbers))
    transport.all_gather(received, sent).wait()
    return received.view(transport.world_size, -1).tolist()


def _write_to_monitor(engine: Any, stats: StepStats) -> None:
    # DeepSpeed counts a step's samples after the optimizer's step, and then writes its own events.
    samples = engine.global_samples + engine.train_batch_size()
    events = [(f"Train/DMuon/{k}", v, samples) for k, v in stats.scalars().items()]
    engine.monitor.write_events(events)


def verifier_for(
    engine: Any,
    step_engine: StepEngine,
    transport: Transport,
    config: DMuonConfig,
    spec: OrthoSpec,
    masters: Mapping[str, Tensor],
) -> Verifier | None:
    """Build the verifier that `verify_every` asks for; `transport` is over all ranks."""
    if not config.verify_every:
        return None
    stage = int(engine.zero_optimization_stage())
    named = [(f"master weights of {name}", m) for name, m in masters.items() if not stage]
    named += [] if stage == 3 else list(engine.module.named_parameters())
    verifier = Verifier(
        config.verify_every,
        step_engine,
        spec,
        world=transport,
        replicated={clean_name(name): parameter for name, parameter in named},
        masters=masters,
    )
    for name in ("load_checkpoint", "load_module_state_dict"):
        setattr(engine, name, after(getattr(engine, name), verifier.forget))
    return verifier
