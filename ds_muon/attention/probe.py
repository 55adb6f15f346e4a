# SPDX-License-Identifier: Apache-2.0
"""Probe: the largest attention logits of training forwards, for QK-clip.

Measured is what a softmax is given: while a recognised module's forward runs, a torch function mode
sees its call of scaled_dot_product_attention, whose products are taken once more in chunks, or of
softmax, whose input is the logits themselves. Results do not change. A forward that ends without
either is an error, so nothing is ever silently unmeasured.

Counted are forwards in training mode with gradients on: recomputed ones (activation checkpointing)
find the same maximum again, evaluation is left out.

Owns: the hooks, the measurement, and the check that heads lie where they are taken to be.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_muon.attention.find import Attention
from ds_muon.ortho.qk_clip import largest_logits
from ds_muon.plan.heads import Slots

_SOFTMAX = (nn.functional.softmax, torch.softmax, Tensor.softmax)
# Rotary embeddings keep a head's norm; in 16 bit their rounding moves it by a percent or two.
_NORM_SPREAD = 1.05


@dataclass(slots=True, kw_only=True)
class _Watched:
    """One attention module while it is measured.

    Attributes:
        largest: its part of what was measured, (heads,).
        outputs: of its projections in the first forward, by id(projection), for the check.
        hooks: that keep them, removed after it.
        modes: of the forwards under way; None for one that does not count.
    """

    attention: Attention
    largest: Tensor
    outputs: dict[int, Tensor] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)
    modes: list[_SeenLogits | None] = field(default_factory=list)


class LogitProbe:
    """Hooks attention modules for good.

    Attributes:
        slots: of the heads of all modules.
        largest: (heads,) fp32, -inf where nothing was seen; whoever reads it resets it.
    """

    def __init__(self, found: Sequence[Attention], device: torch.device) -> None:
        self.slots = Slots(modules=tuple(a.heads for a in found))
        self.largest = torch.full((self.slots.heads,), -math.inf, device=device)
        parts = self.largest.split([a.heads.heads for a in found])
        for attention, part in zip(found, parts, strict=True):
            for module in attention.modules:
                watched = _Watched(attention=attention, largest=part)
                for linear, _ in attention.checked:
                    hook = functools.partial(_keep_output, watched)
                    watched.hooks.append(linear.register_forward_hook(hook))
                module.register_forward_pre_hook(functools.partial(_enter, watched))
                module.register_forward_hook(functools.partial(_leave, watched), always_call=True)


def _keep_output(watched: _Watched, linear: nn.Module, inputs: Any, output: Tensor) -> None:
    if watched.modes and watched.modes[-1] is not None:
        watched.outputs[id(linear)] = output.detach()


def _enter(watched: _Watched, module: nn.Module, inputs: Any) -> None:
    mode = _SeenLogits(watched) if module.training and torch.is_grad_enabled() else None
    watched.modes.append(mode)
    if mode is not None:
        mode.__enter__()


def _leave(watched: _Watched, module: nn.Module, inputs: Any, output: Any) -> None:
    mode = watched.modes.pop() if watched.modes else None
    if mode is None:
        return
    mode.__exit__(None, None, None)
    for hook in watched.hooks:
        hook.remove()
    watched.hooks.clear()
    watched.outputs.clear()
    # A forward that was cut short, by an error or a recomputation that has all it needs, has none.
    if output is not None and not mode.seen:
        raise ValueError(
            f"optimizer.params.qk_clip: {watched.attention.heads.name} computes attention where "
            "its logits cannot be seen; let it call torch's scaled_dot_product_attention, which "
            'runs flash kernels (transformers: attn_implementation="sdpa"), or softmax, or remove '
            "qk_clip"
        )


class _SeenLogits(TorchFunctionMode):
    """Sees attention and softmax in one forward of one module."""

    def __init__(self, watched: _Watched) -> None:
        super().__init__()
        self._watched, self.seen = watched, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            self._attention(*args, **(kwargs or {}))
        elif func in _SOFTMAX:
            self._softmax(args[0] if args else kwargs["input"])
        return func(*args, **(kwargs or {}))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        self._require_heads(query.shape)
        if self._watched.outputs:
            _check_heads(self._watched, query, key)
        self._see(largest_logits(query, key, mask=attn_mask, causal=is_causal, scale=scale))

    def _softmax(self, logits: Tensor) -> None:
        if logits.ndim != 4:
            return
        self._require_heads(logits.shape)
        self._see(logits.detach().amax(dim=(0, 2, 3)).float())

    def _require_heads(self, shape: torch.Size) -> None:
        heads = self._watched.attention.heads
        if len(shape) < 3 or shape[-3] != heads.heads:
            raise ValueError(
                f"optimizer.params.qk_clip: {heads.name} attends with a tensor of shape "
                f"{tuple(shape)} where (batch, {heads.heads} heads, ...) is expected; remove "
                "qk_clip"
            )

    def _see(self, largest: Tensor) -> None:
        torch.maximum(self._watched.largest, largest, out=self._watched.largest)
        self.seen = True


@torch.no_grad()
def _check_heads(watched: _Watched, *attended: Tensor) -> None:
    """Once: what is attended with must be the projections' rows, head after head, but for rotation.

    Raises:
        ValueError: norms of heads differ by more than a common factor.
    """
    for (linear, heads), seen in zip(watched.attention.checked, attended, strict=False):
        output = watched.outputs[id(linear)].float().unflatten(-1, (heads, -1))
        projected = output.norm(dim=-1).reshape(-1, heads)
        # Keys may come repeated for the heads that share them.
        per_key = seen[..., :: seen.shape[-3] // heads, :, :] if seen.shape[-3] > heads else seen
        norms = per_key.float().norm(dim=-1).transpose(-1, -2).reshape(-1, heads)
        ratio = (norms / projected)[projected > 0] if norms.shape == projected.shape else None
        if ratio is None or ratio.numel() and ratio.max() > _NORM_SPREAD * ratio.min():
            raise ValueError(
                f"optimizer.params.qk_clip: heads of {watched.attention.heads.name} are not the "
                "rows of its projections in order, or are normalised in between, so scaling rows "
                "would not bound logits; remove qk_clip"
            )
