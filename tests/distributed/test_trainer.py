# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer, stock: the optimizer section is all that names DMuon (case C8)."""

from __future__ import annotations

import csv
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
    3: {
        "config": {
            **hf.example("hf_trainer_zero3"),
            "scheduler": hf.example("accelerate_zero3")["scheduler"],
        },
        "lr_scheduler_type": "cosine",
    },
}


def save_pretrained(*, folder: str) -> None:
    """Run on a rank; rank 0 writes."""
    if torch.distributed.get_rank() == 0:
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


# Logged after each of 4 steps with 2 of warm-up; DeepSpeed's scheduler counts from 0.
LOGGED_LRS = {
    1: [5e-3, 1e-2, 5e-3, 0.0],
    2: [5e-3, 1e-2, 5e-3, 0.0],
    3: [0.0, 1e-2, 1e-2, 5e-3],
}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_trains_saves_and_resumes_bit_equal(stage: int, tmp_path: Path) -> None:
    settings = {**RESUMED[stage], **CHOSEN}
    if stage == 3:
        ranks.run(2, save_pretrained, folder=str(tmp_path / "pretrained"))
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
        logged = [log["learning_rate"] for log in whole["logs"]]
        assert logged == pytest.approx(LOGGED_LRS[stage], abs=1e-12)
        assert rest["masters"].keys() == whole["masters"].keys()
        for name, tensor in whole["masters"].items():
            assert torch.equal(rest["masters"][name], tensor), name
    if stage == 2:
        check_other_shape(straight[0], folder, settings)
    check_autos(stage, straight[0])
    check_saved_weights(straight[0])


def check_other_shape(straight: dict[str, Any], folder: str, settings: dict[str, Any]) -> None:
    """One rank at ZeRO-3 goes on where two at ZeRO-2 were, with as many samples per step."""
    other = {
        **settings,
        "config": settings["config"] | {"zero_optimization": {"stage": 3}},
        "gradient_accumulation_steps": 2,
    }
    resume = str(Path(folder) / "checkpoint-2")
    [found] = ranks.run(1, trained, folder=folder + "-other", resume=resume, **other)
    for key in ("step", "learning_rate"):
        assert [log[key] for log in found["logs"]] == [log[key] for log in straight["logs"]]
    # bf16 forward and backward, and another order of sums.
    for key, least in (("loss", 2e-2), ("grad_norm", 1e-1)):
        for one, two in zip(found["logs"], straight["logs"], strict=True):
            assert one[key] == pytest.approx(two[key], rel=least), key


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


def reported(*, folder: str) -> dict[str, Any]:
    """Run on a rank: what a reporter of `report_to` and DeepSpeed's monitor were handed."""
    from unittest import mock

    import transformers.trainer
    from transformers import TrainerCallback

    from ds_muon.hf import DMuonCallback

    seen: list[dict[str, float]] = []

    class Reporter(TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any
        ) -> None:
            seen.append(dict(logs))

    config = hf.example("trl_sft_zero2")
    config["optimizer"]["params"].update(adam_lr=5e-3, metrics={"every": 2})
    config["csv_monitor"] = {"enabled": True, "output_path": folder, "job_name": "run"}
    reporters = mock.Mock(return_value=[Reporter])
    with mock.patch.object(transformers.trainer, "get_reporting_integration_callbacks", reporters):
        trainer = hf.start_trainer(
            config,
            folder,
            callbacks=[DMuonCallback()],
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=2,
        )
    unused = torch.optim.AdamW(trainer.model.parameters())
    trainer.optimizer = unused
    trainer.train()
    trainer.evaluate(hf.samples(4))
    optimizer = trainer.model_wrapped.basic_optimizer
    return {
        "seen": seen,
        "history": trainer.state.log_history,
        "last": optimizer.last_stats.scalars(),
        "unused": unused.state_dict()["state"],
        "rates": {g["name"]: g["lr"] * g["lr_ratio"] for g in optimizer.param_groups},
    }


def test_records_reach_reporters_and_the_monitor(tmp_path: Path) -> None:
    found, other = ranks.run(2, reported, folder=str(tmp_path))
    names = {f"dmuon/{name}" for name in found["last"]}
    assert "dmuon/ns_balance" in names and "dmuon/update_rms_muon" in names
    for logs in (found["seen"], found["history"], other["seen"]):
        training = [log for log in logs if "loss" in log]
        with_record = [i + 1 for i, log in enumerate(training) if names <= log.keys()]
        assert len(training) == 4 and with_record == [2, 4]
        others = [log for log in logs if "loss" not in log]
        assert others and not any(names & log.keys() for log in others)
    for name, value in found["last"].items():
        assert found["seen"][3][f"dmuon/{name}"] == value
    # The monitor of ds_config.json has them without any callback, beside DeepSpeed's own.
    for name in ("DMuon_ns_balance", "lr"):
        [path] = tmp_path.glob(f"run/*{name}.csv")
        rows = list(csv.reader(path.open()))[1:]
        assert len(rows) == (2 if "DMuon" in name else 4)
    assert float(rows[0][1]) == pytest.approx(found["seen"][0]["learning_rate"])
    # The log shows the shared rate; adam_lr stays half of it.
    training = [log for log in found["seen"] if "loss" in log]
    assert [log["learning_rate"] for log in training] == pytest.approx([5e-3, 1e-2, 1e-2, 1e-2])
    assert found["rates"] == pytest.approx({"muon": 1e-2, "adamw": 5e-3, "adamw_no_decay": 5e-3})
    # An optimizer handed to the Trainer beside the section is dropped without a word.
    assert found["unused"] == {}


STOCK = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer
from transformers import TrainingArguments

[args] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
config = AutoConfig.for_model("llama", vocab_size=61, num_key_value_heads=1, **shape)
model = AutoModelForCausalLM.from_config(config)
rows = torch.arange(8 * 16).view(16, 8) % 61
trainer = Trainer(model, args, train_dataset=[{"input_ids": r, "labels": r} for r in rows])
trainer.train()
print("optimizer", type(trainer.model_wrapped.basic_optimizer).__name__)
"""


def test_a_script_that_knows_nothing_of_it(tmp_path: Path) -> None:
    """Own processes, the launcher of torch, an example file as it stands, no import."""
    import os
    import subprocess
    import sys

    script = tmp_path / "train.py"
    script.write_text(STOCK)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
            *(
                str(script),
                "--deepspeed",
                str(hf.ROOT / "ds_config_examples/hf_trainer_zero2.json"),
            ),
            *("--output_dir", str(tmp_path / "out"), "--use_cpu", "True", "--max_steps", "2"),
            *("--save_strategy", "no", "--report_to", "none", "--per_device_train_batch_size", "2"),
        ],
        env={**os.environ, "PYTHONPATH": str(hf.ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("optimizer MatrixOwnerOptimizer") == 2
    assert "ds_muon" not in STOCK
