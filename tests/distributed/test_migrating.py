# SPDX-License-Identifier: Apache-2.0
"""From the built-in Muon of deepspeed 0.19.8 (case C14): keys, tags, and what changes in numbers.

docs/migrating.md quotes what these tests print.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_muon.config import parse
from ds_muon.ortho.update import lr_factor
from ds_muon.routing import route_parameters
from tests.harness import models, ranks
from tests.harness.training import ds_config, masters, start_engine, train_steps

DOC = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
# What the built-in reads besides the keys of its two halves.
OTHERS = {
    "muon_lr": 2e-2,
    "adam_lr": 3e-4,
    "adam_w_mode": True,
    "torch_adam": True,
    "fp32_optimizer_states": True,
    "per_head_muon": False,
}
VALUES = {
    "lr": 2e-2,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "ns_method": "standard",
    "betas": [0.9, 0.99],
    "eps": 1e-10,
}


def test_every_key_of_the_built_in_is_one_of_dmuon_and_in_the_table() -> None:
    halves = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS}
    assert halves == set(VALUES)
    config = parse({**VALUES, **OTHERS})
    for key, value in {**VALUES, **OTHERS}.items():
        found = getattr(config, key)
        assert (list(found) if isinstance(found, tuple) else found) == value, key
        assert f"| `{key}`" in DOC, key


def test_the_built_ins_own_tags_and_dmuons_routes_agree_on_a_decoder() -> None:
    model = models.build("llama")
    deepspeed.set_optimizer_flags(
        SimpleNamespace(optimizer_name="muon", optimizer_params={}), model
    )
    tags = {n: p.use_muon for n, p in model.named_parameters()}
    for p in model.parameters():
        del p.use_muon
    assert {n: r.is_muon for n, r in route_parameters(model, parse({})).routes.items()} == tags
    for p in model.parameters():
        p.use_muon = False
    some = "layers.0.gate_proj.weight"
    model.get_parameter(some).use_muon = True
    routes = route_parameters(model, parse({})).routes
    assert [n for n, r in routes.items() if r.is_muon] == [some]


DMUON: dict[str, dict[str, Any]] = {
    "deepspeed": {"recipe": "deepspeed", "ns_dtype": "bf16"},
    "moonlight": {},
}


def updates(*, kind: str, clip: float) -> dict[str, float]:
    """Run on a rank: norm of the first update of each matrix over lr."""
    params = {"lr": 1e-2, "weight_decay": 0.0, "ns_method": "standard", "torch_adam": True}
    config = ds_config(
        2, params={**params, **DMUON.get(kind, {})}, clip=clip, zero={"reduce_scatter": False}
    )
    config["optimizer"]["type"] = "Muon" if kind == "built-in" else "DMuon"
    # Compiling the built-in's update takes longer than this test.
    with torch.compiler.set_stance("force_eager"):
        engine = start_engine(config)
        start = masters(engine)
        train_steps(engine, models.global_batches(1))
    end = masters(engine)
    return {n: float((end[n] - start[n]).norm()) / 1e-2 for n in end if models.is_matrix(n)}


def test_what_changes_in_the_numbers() -> None:
    free, clipped = (
        {
            kind: ranks.run(2, updates, kind=kind, clip=clip)[0]
            for kind in ("built-in", "deepspeed", "moonlight")
        }
        for clip in (0.0, 1e-3)
    )
    shapes = {n: tuple(p.shape) for n, p in models.build("llama").named_parameters()}
    for name, length in free["built-in"].items():
        # bf16 iterates of another order of operations.
        assert abs(free["deepspeed"][name] / length - 1) < 0.05, name
        longer = lr_factor("match_rms_adamw", *shapes[name]) / lr_factor("original", *shapes[name])
        assert abs(free["moonlight"][name] / length / longer - 1) < 0.05, name
    for kind, shrinks in (("built-in", True), ("deepspeed", False), ("moonlight", False)):
        ratios = [clipped[kind][n] / free[kind][n] for n in free[kind]]
        print(f"{kind}: update with clipping over without: {min(ratios):.5f} to {max(ratios):.5f}")
        assert max(ratios) < 1e-2 if shrinks else min(ratios) > 0.98
