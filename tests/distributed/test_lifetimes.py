# SPDX-License-Identifier: Apache-2.0
"""reshard_after_forward: gathers of matrices counted, nothing left alive, the same bits."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import models, ranks
from tests.harness.training import digest, ds_config, masters, start_engine, train_steps

# ZeRO-3 without reuse, prefetch or persistence: every use of a module gathers.
BARE = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


class Checkpointed(models.LlamaLike):
    """Blocks are recomputed in backward."""

    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens[:, :-1])
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        logits = self.lm_head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Reentrant(Checkpointed):
    reentrant = True


MODELS = {
    "plain": models.LlamaLike,
    "checkpointed": Checkpointed,
    "reentrant": Reentrant,
    "twice": models.Twice,
}


def counted(
    *,
    reshard: bool | None,
    accumulation: int = 1,
    kind: str = "plain",
    zero: dict[str, Any] | None = None,
    zero_init: bool = False,
) -> dict[str, Any]:
    """Run on a rank: gathers in one step, in copies of the matrices and of the rest."""
    params = {"lr": 1e-2, "reshard_after_forward": reshard}
    config = ds_config(
        3, params=params, accumulation=accumulation, zero=BARE if zero is None else zero
    )
    with mock.patch.object(models, "LlamaLike", MODELS[kind]):
        engine = start_engine(config, zero_init=zero_init)
    named = dict(engine.module.named_parameters())
    matrices = {id(p) for n, p in named.items() if models.is_matrix(n)}
    gathered: Counter[str] = Counter()

    def watch(parameter: Any, name: str) -> None:
        real = getattr(parameter, name)

        def gather(*args: Any, **kwargs: Any) -> Any:
            params = kwargs.get("param_list") or (args[0] if args else None) or [parameter]
            for p in params:
                if p.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                    gathered["matrices" if id(p) in matrices else "rest"] += p.ds_numel
            return real(*args, **kwargs)

        setattr(parameter, name, gather)

    for p in named.values():
        watch(p, "all_gather_coalesced")
        watch(p, "all_gather")
    batches = models.global_batches(5)
    train_steps(engine, batches[:3])
    gathered.clear()
    train_steps(engine, batches[3:4])
    in_step = Counter(gathered)
    alive = [n for n, p in named.items() if p.ds_status != ZeroParamStatus.NOT_AVAILABLE]
    engine.eval()
    with torch.no_grad():
        engine(batches[4].chunk(engine.world_size)[torch.distributed.get_rank()])
    engine.train()
    alive_after_eval = [n for n, p in named.items() if p.ds_status != ZeroParamStatus.NOT_AVAILABLE]
    train_steps(engine, batches[4:])
    sizes = Counter({"matrices": 0, "rest": 0})
    for p in named.values():
        sizes["matrices" if id(p) in matrices else "rest"] += p.ds_numel
    return {
        "copies": {k: in_step[k] / sizes[k] for k in sizes},
        "alive": [n for n in alive if models.is_matrix(n)],
        "alive_after_eval": [n for n in alive_after_eval if models.is_matrix(n)],
        "digest": digest(masters(engine)),
    }


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_matrices_are_gathered_twice_a_micro_batch_or_once_a_step(
    reshard: bool, accumulation: int
) -> None:
    out = ranks.run(2, counted, reshard=reshard, accumulation=accumulation)
    for o in out:
        assert o["copies"]["matrices"] == (2 * accumulation if reshard else 1)
        assert o["copies"]["rest"] == 2 * accumulation, "the rest keeps ZeRO's own rules"
        assert o["alive"] == o["alive_after_eval"] == []


@pytest.mark.parametrize("zero_init", [False, True])
def test_lifetimes_are_independent_of_zeros_settings(zero_init: bool) -> None:
    """ZeRO's defaults keep everything this small: persistent, and reused within 1e9 elements."""
    copies = {}
    for reshard in (True, False, None):
        out = ranks.run(2, counted, reshard=reshard, accumulation=2, zero={}, zero_init=zero_init)
        copies[reshard] = out[0]["copies"]
        if reshard is not None:
            assert out[0]["alive"] == out[0]["alive_after_eval"] == []
    assert copies[True]["matrices"] == 4 and copies[False]["matrices"] == 1
    assert copies[True]["rest"] == copies[False]["rest"] == copies[None]["rest"] < 2


# Recomputation uses every module a third time; without re-entry it stops before a block's last one.
LAST = 33 * 47 / (2 * 33 * 33 + 2 * 33 * 11 + 3 * 33 * 47)


@pytest.mark.parametrize(("kind", "copies"), [("checkpointed", 3 - LAST), ("reentrant", 3.0)])
def test_checkpointed_blocks(kind: str, copies: float) -> None:
    held = ranks.run(2, counted, reshard=False, kind=kind)[0]["copies"]["matrices"]
    freed = ranks.run(2, counted, reshard=True, kind=kind)[0]["copies"]["matrices"]
    print(f"{kind}: true {freed:.3f}, false {held:.3f} copies per micro-batch")
    assert held == 1
    assert freed == pytest.approx(copies)


@pytest.mark.parametrize("kind", MODELS)
def test_lifetimes_do_not_change_a_bit(kind: str) -> None:
    digests = set()
    for reshard in (None, True, False):
        out = ranks.run(2, counted, reshard=reshard, kind=kind, accumulation=2)
        digests |= {o["digest"] for o in out}
    assert len(digests) == 1


def gathered_between_micro_batches() -> bool:
    """Run on a rank: a user reads whole parameters while matrices are held."""
    config = ds_config(
        3, params={"lr": 1e-2, "reshard_after_forward": False}, accumulation=2, zero=BARE
    )
    engine = start_engine(config)
    [batch] = models.global_batches(1)
    own = batch.chunk(engine.world_size)[torch.distributed.get_rank()].chunk(2)
    engine.backward(engine(own[0]))
    engine.step()
    parameters = list(engine.module.parameters())
    held = [p for p in parameters if p.ds_status == ZeroParamStatus.AVAILABLE]
    with deepspeed.zero.GatheredParameters(parameters):
        whole = all(p.numel() == p.ds_numel for p in parameters)
    engine.backward(engine(own[1]))
    engine.step()
    return whole and len(held) == 14


def test_held_matrices_may_be_gathered_by_the_user() -> None:
    assert ranks.run(2, gathered_between_micro_batches) == [True, True]


def refused() -> str:
    """Run on a rank: the key at a stage that frees nothing."""
    with pytest.raises((ValueError, RuntimeError)) as caught:
        start_engine(ds_config(2, params={"reshard_after_forward": True}))
    return str(caught.value)


def test_a_lifetime_needs_stage_3() -> None:
    for error in ranks.run(2, refused):
        assert "reshard_after_forward" in error and "stage 3" in error
