# SPDX-License-Identifier: Apache-2.0
"""What a step launches, by formula, and that nothing in it makes the host wait for a device."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import ds_muon.run.step
from ds_muon.config import DMuonConfig
from ds_muon.optimizer import ADAMW, _inner_adam
from ds_muon.run.schedule import schedule
from tests.distributed.test_qk_clip import Clipped
from tests.harness import models, ranks
from tests.harness.operators import Operators, counting_host_reads
from tests.harness.training import ds_config, start_engine, train_steps

# A piece: momentum, Nesterov's direction, and its rounded copy; decay and update.
DIRECTION, APPLY = 3, 2


def predicted(engine: Any) -> int:
    """Launches of the matrix half on this rank, without those of Newton-Schulz."""
    step_engine = engine.basic_optimizer.binding.engine
    # Where products of bf16 are formed in fp32, a piece is rounded on its way there.
    rounded = int(not torch.ops.mkldnn._is_mkldnn_bf16_supported())
    count = 0
    for plan in step_engine.plans:
        for bucket in schedule(plan, step_engine.transport.rank):
            count += DIRECTION * len(bucket.way_in.sends) + APPLY * len(bucket.way_out.receives)
            count += len(bucket.replicas)
            for owned in bucket.owned:
                count += len(owned.arrivals) + len(owned.departures)
                count += (DIRECTION + rounded + APPLY) * len(owned.local)
    return count


def counted(*, stage: int, clip: bool) -> dict[str, Any]:
    """Run on a rank: the base optimizer's part of the second step."""
    params: dict[str, Any] = {"lr": 1e-3, "exchange": "all_to_all"}
    kind = models.LlamaLike
    if clip:
        params["qk_clip"], kind = {"tau": 1e-3}, Clipped
    with mock.patch.object(models, "LlamaLike", kind):
        engine = start_engine(ds_config(stage, params=params))
    base = engine.basic_optimizer
    operators, real_step = Operators(), base.step
    orthogonalize = ds_muon.run.step.orthogonalize_into
    found = {"ns": 0, "ns_reads": 0, "matrices": 0, "adam": 0, "reads": 0}

    def apart(*args: Any) -> Tensor:
        before = operators.launches.total(), operators.reads.total()
        with counting_host_reads() as reads:
            result = orthogonalize(*args)
        found["ns"] += operators.launches.total() - before[0]
        found["ns_reads"] += operators.reads.total() - before[1]
        # All that was read there is left out of what the rest of the step reads.
        found["reads"] -= reads.total() + operators.reads.total() - before[1]
        found["matrices"] += 1
        return result

    def step(closure: None = None) -> None:
        found["adam"] += any(g["kind"] == ADAMW and g["params"] for g in base.param_groups)
        with operators, counting_host_reads() as reads:
            real_step(closure)
        found["reads"] += reads.total()

    batches = models.global_batches(2)
    train_steps(engine, batches[:1])
    with (
        mock.patch.object(ds_muon.run.step, "orthogonalize_into", apart),
        mock.patch.object(base, "step", step),
    ):
        train_steps(engine, batches[1:])
    names = operators.launches
    collectives = sum(n for name, n in names.items() if name.startswith("c10d"))
    fused = names["aten._fused_adamw_.default"]
    plans = base.binding.engine.plans
    return {
        **found,
        "reads": found["reads"] + operators.reads.total(),
        "fused": fused,
        "launches": names.total() - collectives - found["ns"] - 2 * fused,
        "predicted": predicted(engine),
        "pieces": sum(len(p.layout.matrices) for p in plans),
        "collectives": collectives,
        "buckets": sum(len(p.routes) for p in plans),
    }


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 2), (4, 3)])
def test_launches_are_the_formulas_and_do_not_grow_with_ranks(world: int, stage: int) -> None:
    out = ranks.run(world, counted, stage=stage, clip=False)
    for o in out:
        assert o["reads"] == 0
        # Newton-Schulz looks at a matrix's norm on a CPU, where nothing is queued, and only there.
        assert o["ns_reads"] <= o["matrices"]
        assert o["launches"] == o["predicted"] > 0
        # One kernel and one count of steps per call of ZeRO's, whatever is in its leaf.
        assert o["fused"] == o["adam"] > 0
        assert o["collectives"] == (2 * o["buckets"] if world > 1 else 0)
        # Per matrix a rank has a piece, and of those that it owns the others' pieces.
        assert o["launches"] <= (DIRECTION + 1 + APPLY + 2) * o["pieces"]
    assert sum(o["matrices"] for o in out) == out[0]["pieces"]


def test_qk_clip_does_not_wait_for_the_device() -> None:
    for o in ranks.run(2, counted, stage=3, clip=True):
        assert o["reads"] == 0
        assert o["launches"] > o["predicted"]


def test_adamw_is_fused_where_a_device_has_the_kernel_and_foreach_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, cpu = DMuonConfig(), torch.device("cpu")
    assert _inner_adam(config, cpu).defaults["fused"] is True

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no fused kernel here")

    # torch.optim hides this module's name.
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", refuse)
    found = _inner_adam(config, cpu).defaults
    assert found["fused"] is None and found["foreach"] is True
    assert found["betas"] == config.betas and found["eps"] == config.eps
    bits = _inner_adam(DMuonConfig(recipe="torch"), cpu).defaults
    assert bits["fused"] is None and bits["foreach"] is None
