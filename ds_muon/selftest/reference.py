# SPDX-License-Identifier: Apache-2.0
"""Reference: one process, float64, whole matrices; uses nothing of ds_muon, torch.optim or ZeRO.

The quintic acts on a matrix's singular values alone, so here it is applied to those, found by SVD:
no product of matrices is shared with what is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

# Jordan's coefficients, five steps: https://kellerjordan.github.io/posts/muon/
_A, _B, _C, _STEPS = 3.4445, -4.7750, 2.0315, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is trained with; training.py writes the same into a ds_config.json."""

    lr: float = 0.01
    weight_decay: float = 0.1
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 0.5


@dataclass(slots=True)
class _Memory:
    """One parameter's optimizer state."""

    first: Tensor | float = 0.0
    second: Tensor | float = 0.0
    steps: int = field(default=0)


def polar(matrix: Tensor) -> Tensor:
    """The quintic's result for a float64 matrix, in its shape."""
    left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(_STEPS):
        values = _A * values + _B * values.pow(3) + _C * values.pow(5)
    return (left * values) @ right


def train(
    model: nn.Module,
    batches: Sequence[Tensor],
    is_matrix: Callable[[str], bool],
    settings: Settings,
) -> dict[str, Tensor]:
    """Train a float64 model on whole batches; return its parameters by name."""
    memories: dict[str, _Memory] = {}
    model.double()
    named = dict(model.named_parameters())
    for batch in batches:
        grads = torch.autograd.grad(model(batch), list(named.values()))
        norm = torch.stack([g.norm() for g in grads]).norm()
        factor = min(1.0, settings.clip / (float(norm) + 1e-6))
        with torch.no_grad():
            for (name, weight), grad in zip(named.items(), grads, strict=True):
                memory = memories.setdefault(name, _Memory())
                memory.steps += 1
                (_muon if is_matrix(name) else _adamw)(weight, grad * factor, memory, settings)
    return {name: weight.detach().clone() for name, weight in named.items()}


def _muon(weight: Tensor, grad: Tensor, memory: _Memory, s: Settings) -> None:
    memory.first = memory.first * s.momentum + grad * (1 - s.momentum)
    ahead = memory.first * s.momentum + grad * (1 - s.momentum)
    length = 0.2 * max(weight.shape) ** 0.5
    weight.copy_(weight * (1 - s.lr * s.weight_decay) - s.lr * length * polar(ahead))


def _adamw(weight: Tensor, grad: Tensor, memory: _Memory, s: Settings) -> None:
    b1, b2 = s.betas
    memory.first = memory.first * b1 + grad * (1 - b1)
    memory.second = memory.second * b2 + grad.square() * (1 - b2)
    mean = memory.first / (1 - b1**memory.steps)
    root = (memory.second / (1 - b2**memory.steps)).sqrt() + s.eps
    decay = s.weight_decay if weight.ndim > 1 else 0.0
    weight.copy_(weight * (1 - s.lr * decay) - s.lr * mean / root)


def relative_error(
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    start: dict[str, Tensor],
    names: Sequence[str],
) -> float:
    """Distance of the updates from the expected ones, in sizes of the expected ones."""
    off = torch.stack([(found[n].cpu().double() - expected[n]).norm() for n in names]).norm()
    size = torch.stack([(expected[n] - start[n].double()).norm() for n in names]).norm()
    return float(off / size)
