# SPDX-License-Identifier: Apache-2.0
"""Views: a block of a flat tensor, without a copy.

Owns: the one place where plan/blocks.py's integers become a tensor.
"""

from __future__ import annotations

from torch import Tensor

from ds_muon.plan.blocks import Block


def view(flat: Tensor, block: Block) -> Tensor:
    """Return a block's elements in a flat tensor, in the block's shape."""
    if block.run == block.numel:
        return flat[block.start : block.start + block.numel]
    return flat.as_strided(block.shape, (block.stride, 1), flat.storage_offset() + block.start)


def packed(flat: Tensor, offset: int, block: Block) -> Tensor:
    """Return `numel` elements that lie together from an offset on, in the block's shape."""
    part = flat[offset : offset + block.numel]
    return part if block.run == block.numel else part.view(block.shape)
