# SPDX-License-Identifier: Apache-2.0
"""Clip: QK-clip on the master weights, inside the base optimizer's step.

The largest logits of all heads are reduced over all ranks once per step, by one small all-reduce,
and every rank then scales the rows that lie in its own leaves; no weight moves. It happens before
ZeRO copies a leaf to its 16-bit weights, so nothing else has to know of it.

Owns: when the reduction is issued and waited for, and the scaling of leaves.
Never does: measure (attention.py), or touch momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ds_muon.comm.transport import Pending, Transport
from ds_muon.ortho.qk_clip import factor_table
from ds_muon.plan.heads import RowRange, Slots

# Per leaf, by id: the projections that it holds rows of, and where.
Placed = Mapping[int, Sequence[tuple[str, RowRange]]]


class QkClip:
    """Observes steps, and scales leaves after each is stepped.

    Args:
        world: transport over all ranks.
        measured: (heads,) fp32, the largest logits that this rank has seen since the last step.
        placed: of every leaf with rows to scale.
        settle: applies what is still missing of a stepped leaf's update.
    """

    def __init__(
        self,
        world: Transport,
        slots: Slots,
        measured: Tensor,
        placed: Placed,
        *,
        tau: float,
        settle: Callable[[], None],
    ) -> None:
        self._world, self._measured, self._placed = world, measured, placed
        self._tau, self._settle, self._keys = tau, settle, slots.keys
        device = measured.device
        self._key_of = torch.tensor(slots.key_of(), device=device)
        self._slots = {name: torch.tensor(rows, device=device) for name, rows in slots.of_rows()}
        self._largest = torch.full_like(measured, -math.inf)
        self._pending: Pending | None = None
        self._factors: Tensor | None = None
        self._rows: dict[tuple[str, torch.device], Tensor] = {}

    def begin(self) -> None:
        """Share the largest logits of this step; all ranks do."""
        self._largest = self._measured.clone()
        self._factors = None
        self._rows.clear()
        self._pending = self._world.all_reduce_max(self._largest)

    def finish(self) -> None:
        """End a step, also where this rank holds none of the rows."""
        self._wait()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    @torch.no_grad()
    def apply(self, leaves: Sequence[Tensor]) -> None:
        """Scale the rows in leaves that have been stepped."""
        held = [leaf for leaf in leaves if self._placed.get(id(leaf))]
        if not held:
            return
        self._settle()
        for leaf in held:
            flat = leaf.detach().view(-1)
            for name, place in self._placed[id(leaf)]:
                numel = place.rows * place.cols
                block = flat[place.leaf_offset : place.leaf_offset + numel]
                factors = self._factors_of(name, leaf.device)
                factors = factors[place.first_row : place.first_row + place.rows]
                block.view(place.rows, place.cols).mul_(factors[:, None])

    def _factors_of(self, name: str, device: torch.device) -> Tensor:
        """(rows,) factors of one projection, in this step."""
        self._wait()
        if self._factors is None:
            self._factors = factor_table(
                self._largest, self._key_of, keys=self._keys, tau=self._tau
            )
        if (name, device) not in self._rows:
            self._rows[name, device] = self._factors[self._slots[name]].to(device)
        return self._rows[name, device]

    def reset(self) -> None:
        """Forget what was measured: its step has been taken, or skipped."""
        self._measured.fill_(-math.inf)

    def largest(self) -> float:
        """The largest logit of any head in the latest step, over all ranks; -inf before it."""
        self._wait()
        return float(self._largest.max())
