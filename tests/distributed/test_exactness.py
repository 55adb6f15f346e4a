# SPDX-License-Identifier: Apache-2.0
"""Exactness: the same bits whatever the plan, and the bits of torch.optim where promised."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from ds_muon.plan.traffic import STRATEGIES
from tests.distributed.test_parity import train
from tests.grid import FULL_GRID
from tests.harness import models, ranks
from tests.harness.training import counting_newton_schulz, ds_config, masters, start_engine

# Everything that may change how bytes travel, and no bit of the result.
AXES = {
    "exchange": STRATEGIES,
    "owner_scope": ("balance", "straddlers"),
    "tiny": (False, True),
    "max_inflight_buckets": (1, 2),
}
# Eight runs in which any two choices of two axes meet, half of them with one thread per rank, half
# with two; DS_MUON_FULL_GRID=1 runs all 32 with both.
PAIRWISE = tuple((e, a, (a + e) % 2, (a + e // 2) % 2) for e in range(4) for a in range(2))
FULL = tuple(itertools.product(range(4), range(2), range(2), range(2)))


def cells_for(threads: int) -> tuple[tuple[int, ...], ...]:
    """What one test runs: four cells, one of each exchange, unless all are asked for."""
    if FULL_GRID:
        return FULL
    return tuple(cell for cell in PAIRWISE if (cell[0] + cell[1]) % 2 == threads - 1)


def train_with_tiny_workspace(**kwargs: Any) -> dict[str, Any]:
    """Run on a rank: the cap in bytes instead of MiB, so that every bucket holds one matrix."""
    import ds_muon.planning as planning

    with mock.patch.object(planning, "MIB", 1):
        return train(**kwargs)


def train_with_other_owners(**kwargs: Any) -> dict[str, Any]:
    """Run on a rank: every matrix is owned by the next rank, so that other pieces travel."""
    import ds_muon.plan.plan as plan

    real = plan.assign_owners

    def rotated(layout: Any, costs: Any, *, scope: str) -> tuple[int, ...]:
        return tuple((o + 1) % layout.world_size for o in real(layout, costs, scope=scope))

    with mock.patch.object(plan, "assign_owners", rotated):
        return train(**kwargs)


def train_cells(*, stage: int, dtype: str, cells: Sequence[Sequence[int]]) -> list[str]:
    """Run on a rank: the same training once per cell; digests of the master weights."""
    digests = []
    for cell in cells:
        chosen = {name: values[i] for (name, values), i in zip(AXES.items(), cell, strict=True)}
        run = train_with_tiny_workspace if chosen.pop("tiny") else train
        params = {"ns_dtype": dtype, **chosen}
        digests.append(run(stage=stage, dtype=dtype, steps=5, params=params)["digest"])
    return digests


def test_the_cells_meet_pairwise() -> None:
    for one, other in itertools.combinations(range(len(AXES)), 2):
        sizes = [len(v) for v in AXES.values()]
        met = {(c[one], c[other]) for threads in (1, 2) for c in cells_for(threads)}
        assert met == set(itertools.product(range(sizes[one]), range(sizes[other])))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_plans_do_not_change_a_bit(world: int, stage: int, dtype: str, threads: int) -> None:
    cells = cells_for(threads)
    out = ranks.run(
        world, train_cells, threads=threads, stage=stage, dtype=dtype, cells=cells, timeout_s=900
    )
    assert len({digest for digests in out for digest in digests}) == 1


@pytest.mark.parametrize("ns_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_owners_and_kept_memory_do_not_change_a_bit(stage: int, ns_dtype: str) -> None:
    runs = (
        (train, {}),
        (train_with_other_owners, {}),
        (train, {"preallocate_workspace": False, "exchange": "broadcast"}),
        (train_with_tiny_workspace, {"exchange": "all_gather"}),
    )
    digests = set()
    for run, params in runs:
        out = ranks.run(4, run, stage=stage, params={"ns_dtype": ns_dtype, **params})
        digests |= {o["digest"] for o in out}
    assert len(digests) == 1


def against_torch(*, dtype: str, lr_scale: str) -> list[str]:
    """Run on one rank: recipe torch beside torch.optim.Muon and AdamW; return what differs."""
    params = {"lr": 1e-2, "recipe": "torch", "lr_scale": lr_scale}
    engine = start_engine(ds_config(0, params=params, dtype=dtype))
    twin = models.build("llama").to(engine.module.embed_tokens.weight.dtype)
    copies = {n: torch.nn.Parameter(p.detach().float()) for n, p in twin.named_parameters()}
    matrices = [p for n, p in copies.items() if models.is_matrix(n)]
    decayed = [p for n, p in copies.items() if not models.is_matrix(n) and p.ndim > 1]
    undecayed = [p for n, p in copies.items() if not models.is_matrix(n) and p.ndim <= 1]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn=lr_scale)
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    with counting_newton_schulz() as shapes:
        for batch in models.global_batches(5, batch=4):
            engine.backward(engine(batch))
            engine.step()
            twin.zero_grad()
            twin(batch).backward()
            for name, p in twin.named_parameters():
                copies[name].grad = p.grad.float()
            muon.step()
            adamw.step()
            for name, p in twin.named_parameters():
                p.data.copy_(copies[name])
    assert len(shapes) == 14 * 5
    found = masters(engine)
    return [n for n in copies if not torch.equal(found[n], copies[n])]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("lr_scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recipe_torch_has_the_bits_of_torch(dtype: str, lr_scale: str, threads: int) -> None:
    [different] = ranks.run(1, against_torch, threads=threads, dtype=dtype, lr_scale=lr_scale)
    assert different == []
