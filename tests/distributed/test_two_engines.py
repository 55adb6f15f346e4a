# SPDX-License-Identifier: Apache-2.0
"""Several engines in one process, interleaved, and a module used twice in a forward: same bits."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

from tests.harness import models, ranks, reference
from tests.harness.training import digest, ds_config, masters, start_engine, train_steps

STEPS = 3
# The first engine holds what could meet the others': gathers under the next forward, own sources.
FIRST = {2: {"hide_param_gather": True}, 3: {"param_source": "owner_broadcast"}}
SMALL = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 2000}


def first_engine(stage: int) -> Any:
    params = {"lr": 1e-2, "ns_dtype": "fp32", **FIRST[stage]}
    return start_engine(ds_config(stage, params=params, zero=SMALL), model="twice")


def second_engine(stage: int) -> Any:
    params = {"lr": 3e-3, "adam_lr": 1e-3, "metrics": {"every": 1}}
    return start_engine(
        ds_config(stage, params=params, zero=SMALL, clip=0.5), model="llama", zero_init=stage == 3
    )


def frozen_engine(stage: int) -> Any:
    """A reference model as preference trainers prepare it: no optimizer, ZeRO only at stage 3."""
    config = copy.deepcopy(ds_config(stage, params={}, zero=SMALL))
    del config["optimizer"]
    if stage != 3:
        config["zero_optimization"]["stage"] = 0
    model = models.build("twice").requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    return engine


def alone(*, stage: int, which: str) -> dict[str, Tensor]:
    """Run on a rank: one engine, nothing beside it."""
    engine = {"first": first_engine, "second": second_engine}[which](stage)
    train_steps(engine, models.global_batches(STEPS))
    return masters(engine)


def together(*, stage: int) -> dict[str, Any]:
    """Run on a rank: two trained engines and a frozen one, one inside the other."""
    first, second, frozen = first_engine(stage), second_engine(stage), frozen_engine(stage)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    outputs = []
    for batch in models.global_batches(STEPS):
        own = batch.chunk(world)[rank]
        with torch.no_grad():
            outputs.append(float(frozen(models.global_batches(1)[0])))
        loss = first(own)
        other = second(own)
        second.backward(other)
        first.backward(loss)
        second.step()
        first.step()
    return {"first": masters(first), "second": masters(second), "frozen": outputs}


@pytest.mark.parametrize("stage", [2, 3])
def test_engines_do_not_meet(stage: int) -> None:
    apart = {w: ranks.run(2, alone, stage=stage, which=w) for w in ("first", "second")}
    for rank, found in enumerate(ranks.run(2, together, stage=stage)):
        for which, results in apart.items():
            assert digest(found[which]) == digest(results[rank]), which
        expected = models.build("twice")(models.global_batches(1)[0])
        # One process's own products against the ranks': fp32 sums in another order.
        assert found["frozen"] == pytest.approx([float(expected)] * STEPS, rel=1e-6)
        assert len(set(found["frozen"])) == 1
    start = {n: p.detach().clone() for n, p in models.build("twice").named_parameters()}
    end = reference.train(
        models.build("twice"), models.global_batches(STEPS), models.is_matrix, reference.Settings()
    )
    # fp32 against float64, as in test_parity.py.
    assert reference.update_error(apart["first"][0], end, start, list(end)) < 1e-4
