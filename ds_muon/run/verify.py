# SPDX-License-Identifier: Apache-2.0
"""Verify: a self-check of the running job; `verify_every` says how often.

Owns: three comparisons, and the error that stops all ranks when one of them fails:
- weights that every rank should hold alike are hashed before every step, and the hashes of all
  steps since the last check are compared across ranks;
- master weights are hashed after every step and must be the same before the next one;
- the update of one matrix, another one each time, is computed again from gathered momentum and
  gradient, as one rank would without a plan, and compared with what the owners and exchanges made.
Never does: change a bit of training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_muon.comm.transport import Transport
from ds_muon.log import say
from ds_muon.ortho.chunks import chunks
from ds_muon.ortho.recipes import OrthoSpec
from ds_muon.ortho.update import lr_factor
from ds_muon.plan.blocks import Block
from ds_muon.plan.layout import Fragment, Layout
from ds_muon.run.step import LeafStep, StepEngine
from ds_muon.run.views import view

# Weights may differ by roundings of the elementwise parts, whose vector and scalar loops contract
# multiply-adds differently at the ends of a range: one rounding each of decay, update and sum.
ROUNDINGS = 4
# Integers as wide as an element, whatever its dtype.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """One matrix as it was before its step, whole."""

    plan: int
    index: int
    weights: Tensor
    momentum: Tensor
    grad: Tensor


class Verifier:
    """Observes steps, and runs the step engine with a check where one is due.

    Args:
        every: steps between checks.
        world: transport over all ranks; the engine's is over those that share one partitioning.
        replicated: parameters that every rank holds whole, by name.
        masters: this rank's master weights, by what they hold; they change in steps and loads only.
    """

    def __init__(
        self,
        every: int,
        engine: StepEngine,
        spec: OrthoSpec,
        *,
        world: Transport,
        replicated: Mapping[str, Tensor],
        masters: Mapping[str, Tensor],
    ) -> None:
        self._every, self._engine, self._spec = every, engine, spec
        self._replicated, self._masters = dict(replicated), dict(masters)
        self._world, self._row = world, engine.transport
        self._matrices = [
            (plan, index)
            for plan, p in enumerate(engine.plans)
            for index in range(len(p.layout.matrices))
        ]
        self.step = 0
        self.checks = 0
        self._hashes = [0] * len(self._replicated)
        self._left_masters: list[int] | None = None
        self._changed_masters: list[str] = []
        self._wrong: str | None = None

    @property
    def due(self) -> bool:
        """Whether this step ends with a check."""
        return self.step % self._every == 0

    def forget(self) -> None:
        """Take the master weights as they are: a checkpoint was loaded."""
        self._left_masters = None

    def begin(self) -> None:
        """Hash what this rank holds."""
        self.step += 1
        self._hashes = [
            (31 * known + _hash(tensor)) % 2**64
            for known, tensor in zip(self._hashes, self._replicated.values(), strict=True)
        ]
        if self._left_masters is not None:
            pairs = zip(self._left_masters, self._masters.items(), strict=True)
            self._changed_masters += [name for left, (name, now) in pairs if left != _hash(now)]

    def run(self, plan: int, leaves: Sequence[LeafStep]) -> None:
        """Step the leaves of one plan, and check one matrix if it is its turn."""
        before = None
        if self.due and self._matrices:
            turn = (self.step // self._every - 1) % len(self._matrices)
            if self._matrices[turn][0] == plan:
                before = self._gather(*self._matrices[turn], leaves)
        self._engine.run(plan, leaves)
        if before is not None:
            self._wrong = self._compare(before, leaves)

    def finish(self) -> None:
        """Keep the hashes of what this step left, and compare where a check is due.

        Raises:
            RuntimeError: on all ranks, with what differs, where and by how much.
        """
        self._left_masters = [_hash(tensor) for tensor in self._masters.values()]
        if not self.due:
            return
        shown = self._world.all_gather_object(
            (
                self._hashes,
                self._changed_masters,
                self._wrong,
                dict(zip(self._masters, self._left_masters, strict=True)),
            )
        )
        self.checks += 1
        found = [
            *self._diverged([hashes for hashes, *_ in shown]),
            *self._diverged_masters([left for *_, left in shown]),
            *(
                f"rank {rank}: master weights of {', and of '.join(dict.fromkeys(names))} were "
                "changed between two steps by something else than the optimizer"
                for rank, (_, names, _, _) in enumerate(shown)
                if names
            ),
            *(text for text in dict.fromkeys(text for _, _, text, _ in shown) if text),
        ]
        self._changed_masters, self._wrong = [], None
        if found:
            raise RuntimeError(
                f"DMuon: verify_every found a difference at step {self.step} (checks run every "
                f"{self._every} steps); weights cannot be trusted, go back to a checkpoint. "
                + "; ".join(found)
            )
        if self.checks == 1:
            say(
                f"verify_every: the first check passed, at step {self.step}; later ones are silent",
                rank=self._world.rank,
            )

    def _diverged(self, hashes: Sequence[Sequence[int]]) -> list[str]:
        """Name parameters that ranks hold differently, the ranks that deviate, and by how much."""
        found = []
        for number, (name, tensor) in enumerate(self._replicated.items()):
            common, _ = Counter(h[number] for h in hashes).most_common(1)[0]
            deviating = [rank for rank, h in enumerate(hashes) if h[number] != common]
            if deviating:
                base = next(rank for rank, h in enumerate(hashes) if h[number] == common)
                gap = self._gap(tensor, deviating[0], base)
                found.append(
                    f"{name} was not the same on all ranks: rank {deviating[0]} differs from rank "
                    f"{base} (ranks that deviate: {deviating}); largest difference now {gap:.3g}"
                )
        return found

    def _diverged_masters(self, hashes: Sequence[Mapping[str, int]]) -> list[str]:
        """Name master weights that replicas hold differently; replica r starts at rank r * size."""
        size = self._row.world_size
        return [
            f"rank {rank}: master weights of {name} differ from those of its replica, rank {first}"
            for rank in range(size, len(hashes))
            for first in [rank % size]
            for name, own in hashes[rank].items()
            if hashes[first].get(name) != own
        ]

    def _gap(self, tensor: Tensor, one: int, other: int) -> float:
        copies = []
        for source in (one, other):
            copy = tensor.detach().clone()
            self._world.broadcast(copy, source=source).wait()
            copies.append(copy.double())
        return float((copies[0] - copies[1]).abs().max())

    def _gather(self, plan: int, index: int, leaves: Sequence[LeafStep]) -> _Before:
        layout = self._engine.plans[plan].layout
        return _Before(
            plan=plan,
            index=index,
            weights=self._whole(layout, index, [leaf.weights for leaf in leaves]),
            momentum=self._whole(layout, index, [leaf.momentum for leaf in leaves], momentum=True),
            grad=self._whole(layout, index, [leaf.grad for leaf in leaves]),
        )

    def _whole(
        self, layout: Layout, index: int, flats: Sequence[Tensor], *, momentum: bool = False
    ) -> Tensor:
        """Bring one matrix together on every rank of its row, flat, in fp32, where leaves are."""
        pieces = layout.fragments[index]
        rank, size = self._row.rank, layout.world_size
        own = [_piece(flats, p, momentum=momentum) for p in pieces if p.rank == rank]
        if layout.is_replicated(index):
            return own[0].float().clone()
        held = [sum(p.numel for p in pieces if p.rank == r) for r in range(size)]
        width = max(held)
        sent = torch.zeros(width, dtype=torch.float32, device=self._engine.device)
        if own:
            sent[: held[rank]].copy_(torch.cat([part.float() for part in own]))
        received = sent.new_empty(size * width)
        self._row.all_gather(received, sent).wait()
        whole = sent.new_empty(layout.matrices[index].numel)
        offsets = [r * width for r in range(size)]
        for p in pieces:
            part = received[offsets[p.rank] : offsets[p.rank] + p.numel]
            whole[p.matrix_offset : p.matrix_offset + p.numel] = part
            offsets[p.rank] += p.numel
        return whole.to(flats[0].device)

    def _compare(self, before: _Before, leaves: Sequence[LeafStep]) -> str | None:
        """Do the matrix's step again in one place; return what is wrong with the real one."""
        plan, spec = self._engine.plans[before.plan], self._spec
        matrix = plan.layout.matrices[before.index]
        leaf = leaves[plan.layout.fragments[before.index][0].leaf]
        found = self._whole(plan.layout, before.index, [s.weights for s in leaves])
        wire = torch.empty_like(before.grad, dtype=spec.wire_dtype)
        # Run by run as the owners do, since a run's end may round differently.
        for piece in plan.layout.fragments[before.index]:
            cut = slice(piece.matrix_offset, piece.matrix_offset + piece.numel)
            held, grad = (_laid_out(t[cut], piece.place) for t in (before.momentum, before.grad))
            held = held.lerp_(grad, 1 - leaf.mu).to(leaf.momentum.dtype).float()
            wire[cut] = (grad.lerp(held, leaf.mu) if spec.nesterov else held).reshape(-1)
        wire = wire.view(matrix.rows, matrix.cols)
        update = self._engine.backend.orthogonalize(wire.to(self._engine.device))
        update = update.float().reshape(-1).to(before.weights.device)
        rows, cols = matrix.rows, matrix.cols
        factor = lr_factor(spec.lr_scale, *((cols, rows) if matrix.transposed else (rows, cols)))
        change = leaf.lr * factor * update
        expected = before.weights * (1 - leaf.lr * leaf.weight_decay) - change
        gap = (found - expected).abs()
        gap = gap.masked_fill(found.isnan() & expected.isnan(), 0.0)
        unit = torch.finfo(torch.float32).eps * (before.weights.abs() + change.abs())
        wrong = ~(gap <= ROUNDINGS * unit)
        wrong &= ~(found.isnan() & expected.isnan())
        if not bool(wrong.any()):
            return None
        worst = int((gap / unit.clamp(min=1e-38)).nan_to_num(float("inf")).argmax())
        holder = next(
            p.rank
            for p in plan.layout.fragments[before.index]
            if p.matrix_offset <= worst < p.matrix_offset + p.numel
        )
        return (
            f"the update of {matrix.name} (owner rank {plan.owners[before.index]}) is not what one "
            f"rank computes: element {worst}, held by rank {holder}, is {float(found[worst]):.9g} "
            f"instead of {float(expected[worst]):.9g}; {int(wrong.sum())} of "
            f"{matrix.numel} elements differ"
        )


def _piece(flats: Sequence[Tensor], fragment: Fragment, *, momentum: bool) -> Tensor:
    flat = view(flats[fragment.leaf], fragment.momentum if momentum else fragment.place)
    return flat.reshape(-1)


def _laid_out(flat: Tensor, block: Block) -> Tensor:
    """A copy of (numel,) elements in the shape and at the strides of a block."""
    copy = view(flat.new_empty(block.stop - block.start), block.moved(-block.start))
    return copy.copy_(flat.view(block.shape))


def _hash(tensor: Tensor) -> int:
    """Sum of the elements' bits, each times an odd number of its own, modulo 2^64.

    Any single changed bit, and any two elements that changed places, change it.
    """
    flat = tensor.detach().reshape(-1)
    bits = flat.view(_BITS.get(flat.element_size(), torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    start = 0
    for (part,) in chunks(bits):
        odd = torch.arange(start, start + part.numel(), device=flat.device).mul_(2).add_(1)
        total += odd.mul_(part).sum()
        start += part.numel()
    return int(total) % 2**64
