# SPDX-License-Identifier: Apache-2.0
"""param_source owner_broadcast: the same bits, elements as the formula, one buffer per owner."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.test_lifetimes import BARE, MODELS
from tests.harness import models, ranks
from tests.harness.training import (
    CountingTransport,
    digest,
    ds_config,
    masters,
    start_engine,
    train_steps,
)


class Fused(nn.Module):
    """Parameters with several matrices each: fused projections of two sizes, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(models.VOCABULARY, 24)
        self.fused = nn.Linear(24, 24 + 16, bias=False)
        self.experts = nn.Parameter(torch.randn(5, 24, 16) / 8)
        self.lm_head = nn.Linear(24, models.VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens[:, :-1])
        q, k = self.fused(x).split([24, 16], dim=-1)
        x = x + q + torch.einsum("blo,eio->bli", torch.relu(k), self.experts)
        logits = self.lm_head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


SPLIT = {"fused.weight": {"rows": [24, 16]}, "experts": {"experts": True}}


def trained(
    *,
    source: str,
    kind: str = "plain",
    dtype: str = "fp32",
    zero: dict[str, Any] | None = None,
    **params: Any,
) -> str:
    """Run on a rank: weights after four steps of two micro-batches and an evaluation between."""
    params = {"lr": 1e-2, "param_source": source, **params}
    config = ds_config(3, params=params, dtype=dtype, accumulation=2, zero=zero, clip=0.5)
    with mock.patch.object(models, "LlamaLike", {**MODELS, "fused": Fused}[kind]):
        engine = start_engine(config)
    batches = models.global_batches(5)
    train_steps(engine, batches[:2])
    engine.eval()
    with torch.no_grad():
        engine(batches[4].chunk(engine.world_size)[torch.distributed.get_rank()])
    engine.train()
    train_steps(engine, batches[2:4])
    return digest(masters(engine))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, "fp32") for kind in MODELS),
        ("plain", "fp16"),
        ("fused", "bf16"),
    ],
)
def test_sources_do_not_change_a_bit(kind: str, dtype: str) -> None:
    params = {"split": SPLIT} if kind == "fused" else {}
    digests = set()
    # Prefetch and reuse, and none of them; persistence would leave nothing to fetch.
    prefetched = {"stage3_param_persistence_threshold": 0}
    for source, zero in (
        ("shards", {}),
        ("owner_broadcast", prefetched),
        ("owner_broadcast", BARE),
    ):
        out = ranks.run(3, trained, source=source, kind=kind, dtype=dtype, zero=zero, **params)
        digests |= set(out)
    assert len(digests) == 1


def counted(*, reshard: bool) -> dict[str, Any]:
    """Run on a rank: what one step with its forward and backward receives by this source."""
    params = {"lr": 1e-2, "param_source": "owner_broadcast", "reshard_after_forward": reshard}
    fetches: list[list[str]] = []
    from ds_muon.run import packed

    fetch = packed.PackedOwners.fetch
    transports: list[CountingTransport] = []

    def counting_fetch(self: Any, names: list[str]) -> Any:
        if not transports:
            self._transport = CountingTransport(self._transport)
            transports.append(self._transport)
        owners = {self._matrices[name].owner for name in names}
        fetches.append([str(owner) for owner in owners])
        return fetch(self, names)

    engine = start_engine(ds_config(3, params=params, zero=BARE))
    batches = models.global_batches(4)
    with mock.patch.object(packed.PackedOwners, "fetch", counting_fetch):
        train_steps(engine, batches[:3])
        transports[0].received.clear()
        transports[0].calls.clear()
        fetches.clear()
        train_steps(engine, batches[3:])
    return {
        "received": transports[0].received,
        "calls": transports[0].calls,
        "buffers": sum(len(owners) for owners in fetches),
        "fetches": len(fetches),
    }


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("world", [2, 4])
def test_elements_are_the_formula(world: int, reshard: bool) -> None:
    out = ranks.run(world, counted, reshard=reshard)
    named = models.build("llama").named_parameters()
    matrices = sum(p.numel() for n, p in named if models.is_matrix(n))
    total: Counter[str] = sum((o["received"] for o in out), Counter())
    # Each of N - 1 others receives a matrix per fetch: U on average. Pieces to owners: U / N.
    assert total["broadcast"] == (2 if reshard else 1) * (world - 1) * matrices
    u_over_n = (world - 1) / world * matrices / world
    # ZeRO-3 pads parameters to the world, so owners hold a little more or less than 1 / N.
    assert total["all_to_all"] / world == pytest.approx(u_over_n, rel=0.02)
    for o in out:
        assert o["calls"]["broadcast"] == o["buffers"], "one packed buffer per fetch and owner"
        assert o["calls"]["all_to_all"] <= o["fetches"]


def reloaded(*, folder: str) -> bool:
    """Run on a rank: a load makes what owners hold out of date."""
    config = ds_config(3, params={"lr": 1e-2, "param_source": "owner_broadcast"}, zero=BARE)
    engine = start_engine(config)
    batches = models.global_batches(4)
    train_steps(engine, batches[:1])
    engine.save_checkpoint(folder)
    first = train_steps(engine, batches[1:3])
    engine.load_checkpoint(folder)
    return train_steps(engine, batches[1:3]) == first


def test_a_load_reaches_the_owners(tmp_path: Path) -> None:
    assert ranks.run(2, reloaded, folder=str(tmp_path)) == [True, True]


def refused() -> str:
    """Run on a rank: the key at a stage that gathers no parameters."""
    with pytest.raises((ValueError, RuntimeError)) as caught:
        start_engine(ds_config(2, params={"param_source": "owner_broadcast"}))
    return str(caught.value)


def test_it_needs_zero_3() -> None:
    assert all("param_source" in e and "use stage 3" in e for e in ranks.run(2, refused))
