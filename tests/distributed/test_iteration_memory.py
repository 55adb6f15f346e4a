# SPDX-License-Identifier: Apache-2.0
"""Memory of an iteration beside AdamW's.

Forward and backward are the same model under the same ZeRO; what an optimizer adds to them is what
it keeps between steps. A step adds what it holds at its peak.
"""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from tests.harness import models, ranks
from tests.harness.memory import peak_allocated
from tests.harness.training import ds_config, start_engine


def held(*, stage: int, optimizer: dict[str, Any]) -> dict[str, int]:
    """Run on a rank: bytes that an optimizer keeps, and that its second step takes beside them."""
    config = ds_config(stage, params={}, dtype="bf16", batch=2)
    config["zero_optimization"].update(reduce_bucket_size=2**16, allgather_bucket_size=2**16)
    config["optimizer"] = optimizer
    original = models.LlamaLike
    with mock.patch.object(
        models, "LlamaLike", lambda: original(width=128, heads=4, hidden=256, layers=5)
    ):
        engine = start_engine(config)
    own = models.global_batches(1, batch=2)[0].chunk(2)[torch.distributed.get_rank()]
    for step in range(2):
        engine.backward(engine(own))
        if step == 0:
            engine.step()
    peak = peak_allocated(engine.step)
    states = [state.values() for state in engine.basic_optimizer.state.values()]
    tensors = [v for v in itertools.chain(*states) if isinstance(v, torch.Tensor)]
    binding = getattr(engine.basic_optimizer, "binding", None)
    arena = binding.engine.arena.nbytes if binding else 0
    return {
        "kept": sum(t.untyped_storage().nbytes() for t in tensors) + arena,
        "peak": peak,
        "arena": arena,
        "matrices": sum(leaf.numel() for [leaf] in binding.leaf_sets) if binding else 0,
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_iteration_takes_no_more_memory_than_adamws(stage: int) -> None:
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "fused": True}}
    ours = {"type": "DMuon", "params": {"lr": 1e-3, "workspace_mb": 1}}
    theirs = ranks.run(2, held, stage=stage, optimizer=adam)
    for o, a in zip(ranks.run(2, held, stage=stage, optimizer=ours), theirs, strict=True):
        # One moment less per element of a matrix, and the arena; groups are padded apart.
        saved = 4 * o["matrices"] - o["arena"]
        assert saved > 2**19
        assert abs(a["kept"] - o["kept"] - saved) < 1024
        assert o["peak"] <= a["peak"]
