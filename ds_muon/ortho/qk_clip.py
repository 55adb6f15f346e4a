# SPDX-License-Identifier: Apache-2.0
"""QK-clip: the largest attention logit of every head, and the factors that bound it by tau.

Source: Kimi K2 (https://arxiv.org/abs/2507.20534), section 2.1: with S the largest logit of a head
and gamma = min(1, tau / S), queries and keys of the head are each scaled by sqrt(gamma); under MLA
the rotary part of the query takes gamma, since the key it meets is shared by all heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Logits that are held at a time; fp32, so 64 MiB.
CHUNK_NUMEL = 2**24
# An additive mask hides what it lowers by this much or more.
_HIDDEN_BELOW = -1e4


@torch.no_grad()
def largest_logits(
    query: Tensor,  # (..., heads, queries, width)
    key: Tensor,  # (..., key heads, keys, width)
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Return the largest scaled logit of every head that its softmax sees, (heads,) in fp32.

    Args:
        mask: broadcasts to (..., heads, queries, keys); true, or above -1e4, where a query attends.
        causal: query i attends to keys 0 to i.
        scale: of the products; None: 1 / sqrt(width).
    """
    heads, queries, width = query.shape[-3:]
    query, key = (t.detach().reshape(-1, *t.shape[-3:]) for t in (query, key))
    group = heads // key.shape[1]
    # (batch, keys of the module, heads that share each, queries, width)
    grouped = query.unflatten(1, (key.shape[1], group))
    if mask is not None:
        mask = (mask if mask.dtype == torch.bool else mask > _HIDDEN_BELOW).detach()
        mask = mask.reshape(-1, *mask.shape[-3:]) if mask.ndim > 3 else mask
    per_row = max(1, query.shape[0] * heads * key.shape[2])
    rows = max(1, CHUNK_NUMEL // per_row)
    found = query.new_full((heads,), -math.inf, dtype=torch.float32)
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        keys = min(stop, key.shape[2]) if causal else key.shape[2]
        part = grouped[:, :, :, start:stop].flatten(2, 3) @ key[:, :, :keys].transpose(-1, -2)
        logits = part.reshape(-1, heads, stop - start, keys)
        if causal:
            row = torch.arange(start, stop, device=logits.device)
            hidden = torch.arange(keys, device=logits.device) > row[:, None]
            logits = logits.masked_fill(hidden, -math.inf)
        if mask is not None:
            one = mask[..., start:stop, :keys] if mask.shape[-2] > 1 else mask[..., :keys]
            logits = logits.masked_fill(~one, -math.inf)
        found = torch.maximum(found, logits.amax(dim=(0, 2, 3)).float())
    return found * (1 / math.sqrt(width) if scale is None else scale)


@torch.no_grad()
def factor_table(largest: Tensor, key_of: Tensor, *, keys: int, tau: float) -> Tensor:
    """Return the factors of queries, of keys, of what takes all of gamma, and a one.

    A key that several heads share takes sqrt of the smallest gamma among them, and each of their
    queries what is then left of its own: gamma_h / sqrt(gamma_min). The product is gamma_h for
    every head, so no logit exceeds tau and heads below it keep theirs.

    Args:
        largest: (heads,) largest logits; a head without any, or with one that is not finite, is
            left as it is.
        key_of: (heads,) the key of each head, from 0 to `keys` - 1.

    Returns:
        (2 * heads + keys + 1,), fp32.
    """
    largest = largest.double()
    exceeds = (largest > tau) & largest.isfinite()
    gamma = torch.where(exceeds, tau / largest, 1.0)
    smallest = gamma.new_ones(keys).scatter_reduce(0, key_of, gamma, "amin")
    key = smallest.sqrt()
    query = gamma / key[key_of]
    return torch.cat([query, key, gamma, gamma.new_ones(1)]).float()
