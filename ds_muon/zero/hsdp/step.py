# SPDX-License-Identifier: Apache-2.0
"""Replicas: what HSDP adds to one ZeRO step, before ZeRO looks at norms and overflow.

Owns: the second reduction, norms and overflow over the world, and the fall-back from hidden to
plain publishing, which all ranks take at the same step.

ZeRO's model-parallel group is what norms and overflow are summed over beyond its own group, with
replicated parameters counted on its first rank only. That is what replicas need: the column takes
its place, and matrices, whose gradients stand in one replica and are zero in the others, are
declared to be parallel.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_muon.comm.transport import Transport
from ds_muon.log import say
from ds_muon.plan.replicas import Reduction
from ds_muon.run.publish import Publisher
from ds_muon.run.reduce import reduce_over_replicas
from ds_muon.zero.hsdp.mesh import Mesh
from ds_muon.zero.seams import override, private

# Hidden publishing ends when a rank waited for this share of its time on so many steps in a row.
WAITED_SHARE = 0.2
WAITED_STEPS = 3


class ReplicatedStep:
    """Overrides the step of one ZeRO optimizer.

    Args:
        zero: the optimizer, partitioned over a row.
        matrices: parameters that Muon trains.
        reductions: per leaf of ZeRO's, plan/replicas.py's chunks of this column.
        world: transport over all ranks, for the decision to fall back.
    """

    def __init__(
        self,
        zero: Any,
        mesh: Mesh,
        matrices: Sequence[torch.nn.Parameter],
        *,
        reductions: Sequence[Sequence[Reduction]],
        publisher: Publisher,
        world: Transport,
    ) -> None:
        self._zero, self._mesh, self._reductions = zero, mesh, reductions
        self._publisher, self._world = publisher, world
        self._began: float | None = None
        self._slow_steps = 0
        self.steps = 0
        override(zero, "model_parallel_group", mesh.column.group)
        override(zero, "model_parallel_rank", mesh.replica)
        if not isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            zero.model_parallel_world_size = mesh.replicas
        for parameter in matrices:
            parameter.model_parallel = True
        self._override()

    def _override(self) -> None:
        step = self._zero.step

        @functools.wraps(step)
        def step_over_replicas(closure: None = None) -> Any:
            self.steps += 1
            self._publisher.settle()
            if self._publisher.hidden:
                self._fall_back()
            self._reduce()
            return step(closure)

        self._zero.step = step_over_replicas

    def _reduce(self) -> None:
        gradients = private(self._zero, "averaged_gradients")
        for index, reductions in enumerate(self._reductions):
            if gradients.get(index) is not None:
                reduce_over_replicas(self._mesh.column, reductions, gradients[index])

    def _fall_back(self) -> None:
        """Publish in the step from now on, if any rank found that hiding does not work."""
        now, waited = time.perf_counter(), self._publisher.take_waited() / 1e3
        slow = self._began is not None and waited > WAITED_SHARE * (now - self._began)
        self._slow_steps = self._slow_steps + 1 if slow else 0
        self._began = now
        asked = torch.zeros(1, device=self._zero.device)
        asked += self._slow_steps >= WAITED_STEPS
        self._world.all_reduce(asked).wait()
        if asked.item():
            self._publisher.hidden = False
            say(
                f"hsdp.publish: updates were waited for during more than {WAITED_SHARE:.0%} of "
                f"{WAITED_STEPS} steps in a row on {int(asked.item())} rank(s), so from step "
                f"{self.steps} on they are published in the step (sync)",
                rank=self._world.rank,
                level=logging.WARNING,
            )
