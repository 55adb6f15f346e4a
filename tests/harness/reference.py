# SPDX-License-Identifier: Apache-2.0
"""The reference: one process, float64, written out plainly; shares no code with ds_muon."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Settings:
    """Optimizer settings in the terms of ds_config.json."""

    lr: float = 1e-2
    adam_lr: float | None = None
    weight_decay: float = 0.1
    clip: float = 0.0
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8


def polar_quintic(matrix: Tensor, steps: int = 5) -> Tensor:
    """Jordan's quintic on the singular values themselves, by SVD: no iteration on matrices."""
    if matrix.norm() == 0:
        return torch.zeros_like(matrix)
    u, s, vh = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


def train(
    model: nn.Module,
    batches: Sequence[Tensor],
    is_matrix: Callable[[str], bool],
    settings: Settings,
    after_step: Callable[[nn.Module], None] | None = None,
) -> dict[str, Tensor]:
    """Train a float64 copy on the global batches; return its parameters by name."""
    model = model.double()
    s = settings
    state: dict[str, Tensor] = {}
    for t, batch in enumerate(batches, start=1):
        model.zero_grad()
        model(batch).backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        total = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        if s.clip:
            shrink = 1.0 / max(1.0, (total + 1e-6) / s.clip)
            grads = {n: g * shrink for n, g in grads.items()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name not in grads:
                    continue
                if is_matrix(name):
                    _muon(name, p, grads[name], state, s)
                else:
                    _adamw(name, p, grads[name], state, s, t)
            if after_step is not None:
                after_step(model)
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def _muon(name: str, p: Tensor, g: Tensor, state: dict[str, Tensor], s: Settings) -> None:
    m = state.get(name, torch.zeros_like(p))
    m = s.momentum * m + (1 - s.momentum) * g
    state[name] = m
    direction = s.momentum * m + (1 - s.momentum) * g
    rows, cols = p.shape
    p.mul_(1 - s.lr * s.weight_decay)
    p.sub_(s.lr * 0.2 * math.sqrt(max(rows, cols)) * polar_quintic(direction))


def _adamw(name: str, p: Tensor, g: Tensor, state: dict[str, Tensor], s: Settings, t: int) -> None:
    lr = s.lr if s.adam_lr is None else s.adam_lr
    b1, b2 = s.betas
    first = b1 * state.get(name + ".m", torch.zeros_like(p)) + (1 - b1) * g
    second = b2 * state.get(name + ".v", torch.zeros_like(p)) + (1 - b2) * g * g
    state[name + ".m"], state[name + ".v"] = first, second
    if p.ndim > 1:
        p.mul_(1 - lr * s.weight_decay)
    p.sub_(lr * (first / (1 - b1**t)) / ((second / (1 - b2**t)).sqrt() + s.eps))


def update_error(
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    start: dict[str, Tensor],
    names: Sequence[str],
) -> float:
    """Distance of the updates from start, relative to the expected update's size."""
    difference = sum(float((found[n].double() - expected[n]).square().sum()) for n in names)
    size = sum(float((expected[n] - start[n].double()).square().sum()) for n in names)
    return math.sqrt(difference / size)
