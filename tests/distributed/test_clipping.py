# SPDX-License-Identifier: Apache-2.0
"""Clipping: it scales the gradient, never the orthogonalised update (case C2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import models, ranks
from tests.harness.training import ds_config, masters, start_engine, train_steps

BIAS = "layers.0.down_proj.bias"


def one_step(*, stage: int, clip: float, **config: Any) -> dict[str, Any]:
    """Run on a rank: one step with a huge gradient on one bias."""
    params = {"lr": 1e-2, "ns_dtype": "fp32", "weight_decay": 0.0, "eps": 1e-3}
    config.setdefault("zero", {"stage3_param_persistence_threshold": 0} if stage == 3 else None)
    engine = start_engine(ds_config(stage, params=params, clip=clip, **config))
    start = masters(engine)
    named = dict(engine.module.named_parameters())
    named[BIAS].register_hook(lambda grad: grad * 1e4)
    train_steps(engine, models.global_batches(1))
    update = {n: m - start[n] for n, m in masters(engine).items()}
    norm = engine.get_global_grad_norm()
    return {"update": update, "norm": None if norm is None else float(norm)}


WRAPPERS: dict[str, dict[str, Any]] = {
    "stage 0 fp32": {"stage": 0},
    "stage 0 bf16": {"stage": 0, "dtype": "bf16"},
    "stage 0 fp16": {"stage": 0, "dtype": "fp16", "fp16": {"enabled": True, "loss_scale": 16}},
    "stage 1": {"stage": 1},
    "BF16_Optimizer": {
        "stage": 1,
        "dtype": "bf16",
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "stage 2": {"stage": 2},
    "stage 2 fp16": {"stage": 2, "dtype": "fp16", "fp16": {"enabled": True, "loss_scale": 16}},
    "stage 3": {"stage": 3},
    "stage 3 fp16": {"stage": 3, "dtype": "fp16", "fp16": {"enabled": True, "loss_scale": 16}},
}


def raw_norm() -> float:
    """The global gradient norm in one float64 process, the hook's factor included."""
    model = models.build("llama").double()
    model(models.global_batches(1)[0]).backward()
    squares = {n: p.grad.square().sum() for n, p in model.named_parameters()}
    squares[BIAS] = squares[BIAS] * 1e8
    return float(torch.stack(list(squares.values())).sum().sqrt())


@pytest.mark.parametrize("name", WRAPPERS)
def test_clipping_leaves_the_matrix_update_alone(name: str) -> None:
    free = ranks.run(2, one_step, clip=0.0, **WRAPPERS[name])
    clipped = ranks.run(2, one_step, clip=0.001, **WRAPPERS[name])
    for a, b in zip(free, clipped, strict=True):
        for n, update in a["update"].items():
            if models.is_matrix(n):
                difference = update - b["update"][n]
                assert difference.abs().max() < 1e-6, n
                relative = float(difference.norm() / update.norm())
                assert relative < MATRIX_TOLERANCE, n
        # eps is far above the clipped gradient, so AdamW's step shows the clipping.
        assert b["update"][BIAS].norm() < 0.5 * a["update"][BIAS].norm()
    # Rounding of low-precision gradients, relative to a norm that one bias dominates.
    assert clipped[0]["norm"] == pytest.approx(raw_norm(), rel=2e-2)


# A clip factor that is no power of two rounds the last bit of every element of u, in fp32 in every
# wrapper; five quintic steps lift that (1.9e-6 measured). A clipped update would differ by its
# whole size.
MATRIX_TOLERANCE = 1e-5


def test_no_norm_where_deepspeed_computes_none() -> None:
    out = ranks.run(
        2, one_step, stage=2, clip=0.0, zero={"compute_grad_norm": False, "overlap_comm": False}
    )
    assert all(o["norm"] in (None, 0.0) for o in out)
