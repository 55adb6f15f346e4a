# SPDX-License-Identifier: Apache-2.0
"""Models of the tests: small, with odd sizes, in the shapes of real ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, CONTEXT = 61, 7
# 24 samples divide over 1, 2, 3 and 4 ranks and two accumulation steps.
GLOBAL_BATCH = 24


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width // heads, bias=False)
        self.v_proj = nn.Linear(width, width // heads, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, 1, -1).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, 1, -1).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(
            q, k.expand_as(q), v.expand_as(q), is_causal=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.post_norm = nn.RMSNorm(width)
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x))
        h = self.post_norm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(h)) * self.up_proj(h))


class LlamaLike(nn.Module):
    """A decoder with grouped keys and values; returns the loss of next-token prediction."""

    def __init__(self, width: int = 33, heads: int = 3, hidden: int = 47, layers: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Twice(LlamaLike):
    """The first block is used twice in one forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens[:, :-1])
        for layer in (*self.layers, self.layers[0]):
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


MATRICES = (
    *(f"attention.{p}_proj.weight" for p in "qkvo"),
    "gate_proj.weight",
    "up_proj.weight",
    "down_proj.weight",
)


def is_matrix(name: str) -> bool:
    """Which of LlamaLike's parameters Muon has to train, written down by hand."""
    return name.endswith(MATRICES)


class Mlp(nn.Module):
    """Case C1: linears 32 -> 39 -> 32 -> 32 with biases; tokens are drawn as real inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 39)
        self.second = nn.Linear(39, 32)
        self.third = nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        grid = torch.arange(32, device=tokens.device)
        x = torch.sin(tokens[:, :1] * (grid + 1) * 0.37).to(self.first.weight.dtype)
        y = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return (y - torch.cos(tokens[:, 1:2] * (grid + 2) * 0.21).to(y.dtype)).square().mean()


def build(name: str) -> nn.Module:
    """Build a model with the weights every test starts from."""
    torch.manual_seed(42)
    return {"llama": LlamaLike, "mlp": Mlp, "twice": Twice}[name]()


def global_batches(steps: int, *, batch: int = GLOBAL_BATCH, seed: int = 7) -> list[Tensor]:
    """Token batches of the whole world, one per optimizer step."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, VOCABULARY, (batch, CONTEXT + 1), generator=generator)
        for _ in range(steps)
    ]
