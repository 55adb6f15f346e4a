# SPDX-License-Identifier: Apache-2.0
"""Memory of a whole iteration: DMuon's beside AdamW's, in live tensor bytes."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch

from tests.harness import models, ranks
from tests.harness.memory import allocated
from tests.harness.training import ds_config, start_engine

# Elements of ZeRO's buckets; between iterations it holds one of them, or has just dropped it.
BUCKET = 2**16
# That bucket in bf16, and ZeRO's padding and lists of three groups instead of one.
SLACK = 2 * BUCKET + 2**16


def iterated(*, stage: int, optimizer: dict[str, Any]) -> dict[str, int]:
    """Run on a rank: bytes of an engine between iterations, and at the peak of one."""
    zero = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    config = ds_config(stage, params={}, dtype="bf16", zero=zero, batch=2)
    config["optimizer"] = optimizer
    original, engines = models.LlamaLike, []
    own = models.global_batches(1, batch=2)[0].chunk(2)[torch.distributed.get_rank()]

    def iterate() -> None:
        engines[0].backward(engines[0](own))
        engines[0].step()

    def begin() -> None:
        engines.append(start_engine(config))
        iterate()
        gc.collect()

    with mock.patch.object(
        models, "LlamaLike", lambda: original(width=128, heads=4, hidden=256, layers=5)
    ):
        left = allocated(begin).left
    binding = getattr(engines[0].basic_optimizer, "binding", None)
    return {
        "left": left,
        "total": left + allocated(iterate).peak,
        "arena": binding.engine.arena.nbytes if binding else 0,
        "matrices": sum(leaf.numel() for [leaf] in binding.leaf_sets) if binding else 0,
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_iteration_takes_no_more_memory_than_adamws(stage: int) -> None:
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "fused": True}}
    ours = {"type": "DMuon", "params": {"lr": 1e-3, "workspace_mb": 1}}
    theirs = ranks.run(2, iterated, stage=stage, optimizer=adam)
    for o, a in zip(ranks.run(2, iterated, stage=stage, optimizer=ours), theirs, strict=True):
        # One moment less per element of a matrix, and the arena.
        saved = 4 * o["matrices"] - o["arena"]
        assert saved > 2**19
        assert abs(a["left"] - o["left"] - saved) < SLACK
        assert o["total"] <= a["total"] - saved + SLACK
