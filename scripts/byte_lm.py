# SPDX-License-Identifier: Apache-2.0
"""A small byte-level language model, its training, and real text that every machine has."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CONTEXT = 128
HEADS = 4
EVAL_BATCH = 32


def read_text(kind: str, *, max_bytes: int = 4_000_000) -> tuple[Tensor, Tensor]:
    """Read source files; every 20th is held out.

    Args:
        kind: "stdlib", Python's standard library, or "headers", the C++ headers of torch.

    Returns:
        Training and held-out bytes, 1-D uint8.
    """
    root, pattern = {
        "stdlib": (Path(sysconfig.get_paths()["stdlib"]), "*.py"),
        "headers": (Path(torch.__file__).parent / "include" / "c10", "*.h"),
    }[kind]
    skipped = {"site-packages", "test", "tests", "idlelib", "__pycache__"}
    files = [f for f in sorted(root.rglob(pattern)) if not skipped & set(f.relative_to(root).parts)]
    parts: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
    for index, file in enumerate(files):
        parts[index % 20 == 19] += file.read_bytes()
        if len(parts[False]) > max_bytes:
            break
    train, held_out = (torch.frombuffer(parts[k], dtype=torch.uint8) for k in (False, True))
    return train, held_out


def sample(text: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    """Draw (batch, CONTEXT + 1) windows as int64 tokens."""
    starts = torch.randint(0, len(text) - CONTEXT - 1, (batch,), generator=generator)
    return torch.stack([text[s : s + CONTEXT + 1] for s in starts.tolist()]).long()


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = self.norm_1(x)
        q, k, v = (
            p(h).view(batch, length, self.heads, -1).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down_proj(nn.functional.gelu(self.up_proj(self.norm_2(x))))


class ByteLM(nn.Module):
    """Returns the mean cross-entropy, in nats per byte, of predicting each next byte."""

    def __init__(self, *, width: int = 128, heads: int = HEADS, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, 256, bias=False)
        # GPT-2's initialisation: N(0, 0.02), projections onto the residual stream scaled down.
        for name, param in self.named_parameters():
            if param.ndim > 1:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(param, std=0.02 / (2 * layers) ** (0.5 * into_residual))

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions = torch.arange(inputs.shape[1], device=tokens.device)
        x = self.embed(inputs) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step: its number from 1, this rank's last loss, and wall and CPU seconds."""

    number: int
    loss: float
    seconds: float
    cpu_seconds: float


def training_steps(engine: Any, text: Tensor, *, steps: int, seed: int) -> Iterator[Step]:
    """Train on random windows; yields after every optimizer step.

    A rank's windows depend on the seed and its rank only, so two optimizers see the same ones.
    """
    micro = engine.train_micro_batch_size_per_gpu()
    generator = torch.Generator().manual_seed(seed * 1000 + engine.global_rank)
    for number in range(1, steps + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(sample(text, micro, generator).to(engine.device))
            engine.backward(loss)
            engine.step()
        yield Step(
            number=number,
            loss=float(loss.detach()),
            seconds=time.perf_counter() - started,
            cpu_seconds=time.process_time() - cpu_started,
        )


@torch.no_grad()
def held_out_loss(engine: Any, text: Tensor, *, batches: int = 8) -> float:
    """Mean loss in nats per byte over fixed held-out windows, shared among the ranks."""
    engine.eval()
    generator = torch.Generator().manual_seed(1234)
    total = torch.zeros((), device=engine.device)
    for _ in range(batches):
        own = sample(text, EVAL_BATCH, generator).chunk(engine.world_size)[engine.global_rank]
        total += engine(own.to(engine.device))
    engine.train()
    torch.distributed.all_reduce(total)
    return float(total) / batches / engine.world_size
