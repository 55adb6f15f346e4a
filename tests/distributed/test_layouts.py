# SPDX-License-Identifier: Apache-2.0
"""Layouts: every matrix rebuilt from its fragments is the parameter, however ZeRO laid it out."""

from __future__ import annotations

import contextlib
from typing import Any

import deepspeed
import pytest
import torch

from ds_muon.plan.predict import PlannedParameter, predict_layouts
from ds_muon.preview.config_file import read_config
from ds_muon.run.views import view
from ds_muon.zero.seams import user_config
from tests.harness import models, ranks
from tests.harness.training import ds_config, start_engine, train_steps

FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 0 fp32": {"stage": 0},
    "stage 0 bf16": {"stage": 0, "dtype": "bf16"},
    "stage 0 fp16": {"stage": 0, "dtype": "fp16"},
    "stage 1": {"stage": 1},
    "stage 1 round robin": {"stage": 1, "zero": {"round_robin_gradients": True}},
    "stage 2": {"stage": 2, "dtype": "bf16"},
    "stage 2 round robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "stage 2 aligned": {"stage": 2, "dtype": "bf16", "zero": {"parameter_alignment": True}},
    "BF16_Optimizer": {"stage": 1, "dtype": "bf16", **FP32_ACCUMULATION},
    "stage 3": {"stage": 3},
    "stage 3 tiny sub-groups": {"stage": 3, "zero": {"sub_group_size": 700}},
    "stage 3 zero.Init": {"stage": 3, "zero_init": True, "dtype": "bf16"},
    "stage 3 zero.Init tiny sub-groups": {
        "stage": 3,
        "zero_init": True,
        "zero": {"sub_group_size": 700},
    },
}


def rebuild(*, zero_init: bool = False, steps: int = 0, **config: Any) -> dict[str, Any]:
    """Run on a rank: put every matrix together from all ranks' fragments and compare."""
    stage = config.pop("stage")
    engine = start_engine(ds_config(stage, params={"lr": 1e-2}, **config), zero_init=zero_init)
    train_steps(engine, models.global_batches(steps))
    binding = engine.basic_optimizer.binding
    transport = binding.engine.transport
    mine = {}
    for plan, leaves in zip(binding.engine.plans, binding.leaf_sets, strict=True):
        for matrix, fragments in zip(plan.layout.matrices, plan.layout.fragments, strict=True):
            for f in fragments:
                if f.rank == transport.rank:
                    leaf = leaves[f.leaf].detach().reshape(-1)
                    piece = view(leaf, f.place).flatten().clone()
                    mine[matrix.name, f.matrix_offset] = piece
    everyone = transport.all_gather_object(mine)
    params = dict(engine.module.named_parameters())
    equal, split = [], 0
    for group in engine.basic_optimizer.preparation.groups:
        for route in group.routes:
            with _whole(params[route.name]) as weights:
                for placement in route.placements:
                    m = placement.matrix
                    rebuilt = torch.full((m.numel,), float("nan"))
                    holders = 0
                    for pieces in everyone:
                        found = {o: p for (n, o), p in pieces.items() if n == m.name}
                        holders += bool(found)
                        for offset, piece in found.items():
                            rebuilt[offset : offset + piece.numel()] = piece
                    expected = view(weights, placement.block).flatten()
                    equal.append(torch.equal(rebuilt.to(expected.dtype), expected))
                    split += holders > 1
    return {
        "equal": equal,
        "split": split,
        "masters": _masters_are_weights(engine, transport),
        "predicted": _predicted(engine) == [plan.layout for plan in binding.engine.plans],
    }


def _predicted(engine: Any) -> list[Any]:
    """The layouts that `ds_muon plan` expects of this engine."""
    muon = [g for g in engine.basic_optimizer.preparation.groups if g.kind == "muon"]
    groups = [
        [PlannedParameter(numel=r.numel, placements=r.placements) for r in g.routes] for g in muon
    ]
    settings = read_config(user_config(engine)).zero_settings
    return predict_layouts(groups, settings, world_size=torch.distributed.get_world_size())


def _masters_are_weights(engine: Any, transport: Any) -> bool:
    """Put every parameter together from the leaves' slices, both halves, and compare.

    Not with safe_get_full_fp32_param: under round_robin_gradients DeepSpeed 0.19.8 returns other
    parameters' elements there, for any optimizer.
    """
    optimizer = engine.basic_optimizer
    header, leaves = optimizer.binding.header, optimizer.binding.leaf_sets
    tensors = [t for group in leaves for t in group] + list(optimizer.binding.adamw_leaves)
    mine = {
        (item.name, item.parameter_offset): leaf.detach()
        .reshape(-1)[item.leaf_offset : item.leaf_offset + item.numel]
        .clone()
        for leaf in tensors
        for item in header.slices[id(leaf)]
    }
    pieces: dict[tuple[str, int], torch.Tensor] = {}
    for other in transport.all_gather_object(mine):
        pieces.update(other)
    for name, param in engine.module.named_parameters():
        with _whole(param) as weights:
            rebuilt = torch.full(weights.shape, float("nan"))
            for (owner, offset), piece in pieces.items():
                if owner == name:
                    rebuilt[offset : offset + piece.numel()] = piece
            if not torch.equal(rebuilt.to(weights.dtype), weights):
                return False
    return True


@contextlib.contextmanager
def _whole(param: torch.nn.Parameter) -> Any:
    gathered = hasattr(param, "ds_id")
    with deepspeed.zero.GatheredParameters([param]) if gathered else contextlib.nullcontext():
        yield param.detach().reshape(-1).clone()


@pytest.mark.parametrize(
    ("world", "name"),
    [*((3, name) for name in LAYOUTS), *((4, f"stage {n}") for n in range(1, 4))],
)
def test_matrices_rebuilt_from_fragments_are_the_parameters(world: int, name: str) -> None:
    for steps in (0, 2):
        for out in ranks.run(world, rebuild, steps=steps, **LAYOUTS[name]):
            assert len(out["equal"]) == 14
            assert all(out["equal"])
            assert out["split"] > 0, "no matrix was split, the test shows nothing"
            assert out["predicted"], "ds_muon plan expects another layout"
            assert out["masters"], "master weights differ from the model's weights"
