# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer, stock: the optimizer section is all that names DMuon (case C8)."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import huggingface as hf
from tests.harness import ranks
from tests.harness.training import masters

# TrainingArguments that differ from HF's defaults and from DMuon's.
CHOSEN = {
    "weight_decay": 0.02,
    "adam_beta1": 0.8,
    "adam_beta2": 0.93,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.5,
    "warmup_steps": 2,
}
STAGE_1 = hf.example("hf_trainer_zero2") | {"zero_optimization": {"stage": 1}}
RESUMED: dict[int, dict[str, Any]] = {
    1: {"config": STAGE_1, "lr_scheduler_type": "linear", "gradient_accumulation_steps": 2},
    2: {
        "config": hf.example("hf_trainer_zero2"),
        "lr_scheduler_type": "cosine",
        "bf16": True,
        "gradient_checkpointing": True,
    },
    # WarmupDecayLR of the file; the Trainer's lr_scheduler_type is not asked.
    3: {"config": hf.example("hf_trainer_zero3"), "lr_scheduler_type": "cosine"},
}


def save_pretrained(*, folder: str) -> None:
    """Run on a rank."""
    hf.new_llama().save_pretrained(folder)


def trained(
    *, folder: str, config: dict[str, Any], resume: str | None = None, **arguments: Any
) -> dict[str, Any]:
    """Run on a rank: train to the end, from the start or from a checkpoint."""
    from safetensors.torch import load_file

    trainer = hf.start_trainer(config, folder, **arguments)
    start = {n: tuple(getattr(p, "ds_shape", ())) for n, p in trainer.model.named_parameters()}
    trainer.train(resume_from_checkpoint=resume)
    engine = trainer.model_wrapped
    found = {
        "logs": [
            {k: log[k] for k in ("step", "loss", "grad_norm", "learning_rate")}
            for log in trainer.state.log_history
            if "loss" in log
        ],
        "masters": masters(engine),
        "options": hf.options_of(engine),
        "clipping": engine.gradient_clipping(),
        "batch": (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()),
        "zero": engine._config.zero_config.model_dump(),
        "partitioned": start,
        "scheduler": type(engine.lr_scheduler).__name__,
        "recomputes": trainer.model.is_gradient_checkpointing,
    }
    saved = Path(folder) / "checkpoint-4" / "model.safetensors"
    if saved.exists():
        found["saved"] = load_file(saved)
        found["weights"] = trainer.accelerator.get_state_dict(engine)
    return found


def expected_lrs(stage: int) -> list[float]:
    """Logged after each of 4 steps, from 2 steps of warm-up to 1e-2."""
    import math

    if stage == 3:
        # WarmupDecayLR counts its steps from 0 and warms up along a logarithm.
        return [0.0, 1e-2 * math.log(2) / math.log(2), 1e-2, 5e-3]
    if stage == 1:
        return [5e-3, 1e-2, 5e-3, 0.0]
    return [5e-3, 1e-2, 1e-2 * 0.5, 0.0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_trains_saves_and_resumes_bit_equal(stage: int, tmp_path: Path) -> None:
    settings = {**RESUMED[stage], **CHOSEN}
    if stage == 3:
        ranks.run(1, save_pretrained, folder=str(tmp_path / "pretrained"))
        settings["pretrained"] = str(tmp_path / "pretrained")
    folder = str(tmp_path / "run")
    straight = ranks.run(2, trained, folder=folder, save_strategy="steps", save_steps=2, **settings)
    resumed = ranks.run(
        2,
        trained,
        folder=str(tmp_path / "other"),
        resume=str(Path(folder) / "checkpoint-2"),
        **settings,
    )
    for whole, rest in zip(straight, resumed, strict=True):
        assert [log["step"] for log in whole["logs"]] == [1, 2, 3, 4]
        assert rest["logs"] == whole["logs"]
        assert [log["learning_rate"] for log in whole["logs"]] == pytest.approx(
            expected_lrs(stage), abs=1e-12
        )
        assert rest["masters"].keys() == whole["masters"].keys()
        for name, tensor in whole["masters"].items():
            assert torch.equal(rest["masters"][name], tensor), name
    check_autos(stage, straight[0])
    check_saved_weights(straight[0])


def check_autos(stage: int, found: dict[str, Any]) -> None:
    """TrainingArguments are where "auto" stands, and only there."""
    accumulation = 2 if stage == 1 else 1
    assert found["batch"] == (2 * 2 * accumulation, 2)
    assert found["clipping"] == 0.5
    assert found["recomputes"] is (stage == 2)
    assert found["scheduler"] == ("WarmupDecayLR" if stage == 3 else "LambdaLR")
    moments = ((0.9, 0.95), 1e-8) if stage == 3 else ((0.8, 0.93), 1e-6)
    muon, decayed, undecayed = found["options"]
    assert [g["kind"] for g in found["options"]] == ["muon", "adamw", "adamw"]
    assert len(muon["parameters"]) == 14
    assert decayed["parameters"] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert all(n.endswith("norm.weight") for n in undecayed["parameters"])
    assert len(undecayed["parameters"]) == 5
    assert [g["weight_decay"] for g in found["options"]] == [0.02, 0.02, 0.0]
    assert all((tuple(g["betas"]), g["eps"]) == moments for g in found["options"])
    if stage > 1:
        assert found["zero"]["reduce_bucket_size"] == 36 * 36
    if stage == 3:
        assert found["zero"]["prefetch_bucket_size"] == int(0.9 * 36 * 36)
        assert found["zero"]["param_persistence_threshold"] == 10 * 36
        # from_pretrained made the model under zero.Init.
        assert found["partitioned"]["lm_head.weight"] == (61, 36)


def check_saved_weights(found: dict[str, Any]) -> None:
    """model.safetensors is the gathered model."""
    assert found["saved"].keys() == found["weights"].keys()
    for name, tensor in found["saved"].items():
        assert torch.equal(tensor, found["weights"][name]), name
        assert torch.equal(tensor, found["masters"][name].to(tensor.dtype)), name
