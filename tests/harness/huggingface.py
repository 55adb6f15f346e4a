# SPDX-License-Identifier: Apache-2.0
"""Hugging Face on the ranks of a pool: a stock Trainer, a stock Accelerator, a small Llama.

transformers is imported inside the functions: the ranks of other tests do not wait for it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
VOCABULARY, LENGTH = 61, 8


def example(name: str) -> dict[str, Any]:
    """One of ds_config_examples, as a dict."""
    return json.loads((ROOT / "ds_config_examples" / f"{name}.json").read_text())


def filled(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration once transformers has put TrainingArguments' defaults where "auto" is.

    Raises:
        ValueError: transformers' own, where a written value differs from the arguments.
    """
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    # Arguments of 8 processes, without the process-wide state that making them needs.
    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    args = SimpleNamespace(**defaults, world_size=8, get_warmup_steps=lambda steps: 10)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=4096))
    found = HfTrainerDeepSpeedConfig(config)
    found.trainer_config_process(args)
    found.trainer_config_finalize(args, model, 100)
    return found.config


def join_pool() -> None:
    """Let accelerate find the pool's process group; it looks for a world of CPUs by variables."""
    os.environ.update(
        LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"], MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1"
    )
    for name in ("transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


def llama_config() -> Any:
    """A Llama with sides that do not divide over ranks."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=36,
        intermediate_size=47,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
    )


def new_llama() -> Any:
    """The model every test starts from, as users make it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(42)
    return AutoModelForCausalLM.from_config(llama_config())


def samples(count: int = 32) -> list[dict[str, Tensor]]:
    """A map-style dataset of token rows."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def start_trainer(
    config: dict[str, Any] | str,
    folder: str,
    *,
    pretrained: str | None = None,
    callbacks: list[Any] | None = None,
    **arguments: Any,
) -> Any:
    """A Trainer as a training script makes one: arguments first, then the model."""
    join_pool()
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    given = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        # accelerate gives a DeepSpeed run on a machine without accelerators one process only.
        "use_cpu": True,
        **arguments,
    }
    args = TrainingArguments(output_dir=folder, deepspeed=config, **given)
    model = new_llama() if pretrained is None else AutoModelForCausalLM.from_pretrained(pretrained)
    return Trainer(model=model, args=args, train_dataset=samples(), callbacks=callbacks)


def start_accelerator(config: dict[str, Any]) -> Any:
    """An Accelerator over the pool's ranks."""
    join_pool()
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DeepSpeedPlugin

    # The states are process-wide; a CPU world has to be known before DeepSpeed is asked for.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState(cpu=True)
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))


def options_of(engine: Any) -> list[dict[str, Any]]:
    """Settings of the optimizer's groups, and the names of their parameters."""
    optimizer = engine.basic_optimizer
    return [
        {
            **{k: group[k] for k in ("kind", "lr", "lr_ratio", "weight_decay", "betas", "eps")},
            "parameters": [route.name for route in routed.routes],
        }
        for group, routed in zip(optimizer.param_groups, optimizer.preparation.groups, strict=True)
    ]
