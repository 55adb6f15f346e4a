# SPDX-License-Identifier: Apache-2.0
"""Hugging Face: DMuon's metrics in the Trainer's own log, for a script that wants them there.

Owns: one callback, `Trainer(callbacks=[DMuonCallback()])`. Nothing else of ds_muon needs
transformers or is needed by a Trainer; DeepSpeed's monitor gets the same numbers without it.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers.trainer_callback import (
    CallbackHandler,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.training_args import TrainingArguments

from ds_muon.optimizer import MatrixOwnerOptimizer

PREFIX = "dmuon/"


class DMuonCallback(TrainerCallback):
    """Adds the latest record of `metrics` to the Trainer's training logs, as `dmuon/...`.

    A record goes into one log: the next one of the training loop. Trainers without DMuon, or
    without `optimizer.params.metrics.every`, log what they always do.
    """

    def __init__(self) -> None:
        self._logged_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move before the reporters of `report_to`, which the Trainer puts before any callback."""
        handler = _calling_handler()
        if handler is not None:
            # A new list: the handler is walking over the old one.
            handler.callbacks = [self, *(c for c in handler.callbacks if c is not self)]

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add what was recorded since the last training log."""
        dmuon = _dmuon_in(optimizer)
        stats = dmuon.last_stats if dmuon is not None else None
        if logs is None or "loss" not in logs or stats is None or stats.step == self._logged_step:
            return
        self._logged_step = stats.step
        scalars = {PREFIX + name: value for name, value in stats.scalars().items()}
        logs.update(scalars)
        if state.log_history:
            # The Trainer has already copied the log there, for trainer_state.json.
            state.log_history[-1].update(scalars)


def _dmuon_in(optimizer: Any) -> MatrixOwnerOptimizer | None:
    """The DMuon inside accelerate's and DeepSpeed's wrappers, each with its own `optimizer`."""
    while optimizer is not None and not isinstance(optimizer, MatrixOwnerOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def _calling_handler() -> CallbackHandler | None:
    """The handler that is calling a callback now; transformers hands callbacks no reference."""
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]
