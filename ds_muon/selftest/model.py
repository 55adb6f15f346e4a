# SPDX-License-Identifier: Apache-2.0
"""Model: small, with sizes that no number of ranks divides, and batches of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH = 67, 9
# Per rank; a step is MICRO_BATCHES of MICRO_BATCH samples on every rank.
MICRO_BATCH, MICRO_BATCHES = 4, 2
# Which of TinyModel's parameters Muon trains, written down by hand.
MATRICES = ("gate.weight", "up.weight", "down.weight", "mix.weight")


class Block(nn.Module):
    """Mix the tokens so far, then a gated MLP; both beside a residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        length = x.shape[1]
        count = torch.arange(1, length + 1, device=x.device, dtype=x.dtype)
        x = x + self.mix(x.cumsum(1) / count[:, None])
        h = self.norm(x)
        return x + self.down(torch.tanh(self.gate(h)) * self.up(h))


class TinyModel(nn.Module):
    """Predicts the next token; returns the loss.

    Blocks differ in size, so that the edge between two ranks cuts a matrix.
    """

    def __init__(self, width: int = 37, hidden: Sequence[int] = (53, 41)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, h) for h in hidden)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length + 1) tokens to a scalar."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def is_matrix(name: str) -> bool:
    """Whether Muon trains a parameter of TinyModel."""
    return name.endswith(MATRICES)


def build() -> TinyModel:
    """The model with the weights that every part starts from."""
    generator = torch.random.get_rng_state()
    torch.manual_seed(20)
    model = TinyModel()
    torch.random.set_rng_state(generator)
    return model


def global_batches(steps: int, world_size: int) -> list[Tensor]:
    """Tokens of all ranks, (batch, length + 1) per optimizer step."""
    generator = torch.Generator().manual_seed(11)
    batch = world_size * MICRO_BATCH * MICRO_BATCHES
    return [
        torch.randint(0, VOCABULARY, (batch, LENGTH + 1), generator=generator) for _ in range(steps)
    ]
