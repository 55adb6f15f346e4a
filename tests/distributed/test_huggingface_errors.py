# SPDX-License-Identifier: Apache-2.0
"""Error texts of transformers, accelerate and DMuon, provoked; docs/huggingface.md quotes them."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import huggingface as hf
from tests.harness import ranks

DOCS = " ".join((hf.ROOT / "docs" / "huggingface.md").read_text().split())


def _trainer(folder: str, config: dict[str, Any] | None = None, **arguments: Any) -> None:
    trainer = hf.start_trainer(config or hf.example("hf_trainer_zero3"), folder, **arguments)
    trainer.train()


def literal_lr(folder: str) -> None:
    config = hf.example("hf_trainer_zero2")
    config["optimizer"]["params"].update(lr=3e-4, betas=[0.9, 0.95])
    _trainer(folder, config)


def auto_on_a_dmuon_key(folder: str) -> None:
    config = hf.example("hf_trainer_zero2")
    config["optimizer"]["params"]["exchange"] = "auto"
    _trainer(folder, config)


def auto_nobody_fills(folder: str) -> None:
    import deepspeed

    config = hf.example("hf_trainer_zero2")
    plain = {**config, "train_batch_size": 2, "gradient_accumulation_steps": 1, "bf16": {}}
    del plain["train_micro_batch_size_per_gpu"], plain["gradient_clipping"]
    plain["zero_optimization"] = {"stage": 2}
    model = hf.new_llama()
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=plain)


def device_map(folder: str) -> None:
    from transformers import LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    Path(folder).mkdir()
    (Path(folder) / "config.json").write_text(hf.llama_config().to_json_string())
    kept = HfDeepSpeedConfig(hf.example("hf_trainer_zero3"))
    LlamaForCausalLM.from_pretrained(folder, device_map="cpu")
    del kept


def no_hidden_size(folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    hf.join_pool()
    args = TrainingArguments(
        output_dir=folder, deepspeed=hf.example("hf_trainer_zero2"), use_cpu=True, report_to="none"
    )
    model = torch.nn.Linear(4, 4)
    model.config = types.SimpleNamespace(use_cache=True)
    Trainer(model=model, args=args, train_dataset=hf.samples()).train()


def cpus_without_saying_so(folder: str) -> None:
    _trainer(folder, use_cpu=False)


def batch_size_finder(folder: str) -> None:
    _trainer(folder, auto_find_batch_size=True)


def best_model_without_its_optimizer(folder: str) -> None:
    _trainer(
        folder,
        save_only_model=True,
        load_best_model_at_end=True,
        eval_strategy="steps",
        save_strategy="steps",
    )


def evaluate_before_training(folder: str) -> None:
    hf.start_trainer(hf.example("hf_trainer_zero2"), folder).evaluate(hf.samples(4))


def resume_from_weights(folder: str) -> None:
    trainer = hf.start_trainer(hf.example("hf_trainer_zero2"), folder)
    Path(folder).mkdir(exist_ok=True)
    trainer.state.train_batch_size = 2
    trainer.state.save_to_json(f"{folder}/trainer_state.json")
    trainer.train(resume_from_checkpoint=folder)


def another_scheduler(folder: str) -> None:
    config = hf.example("hf_trainer_zero2")
    # One folder, as on a machine that ranks share.
    shared = str(Path(folder).parent / "run")
    _trainer(shared, config, max_steps=1, save_strategy="steps", save_steps=1)
    config["scheduler"] = hf.example("accelerate_zero3")["scheduler"]
    trainer = hf.start_trainer(config, shared, max_steps=2)
    trainer.train(resume_from_checkpoint=f"{shared}/checkpoint-1")


def _prepare(*kinds: str, change: Callable[[dict[str, Any]], None] | None = None) -> None:
    from accelerate.utils import DummyOptim, DummyScheduler
    from torch.utils.data import DataLoader

    config = copy.deepcopy(hf.example("accelerate_zero3"))
    config["zero_optimization"] = {"stage": 2}
    if change is not None:
        change(config)
    accelerator = hf.start_accelerator(config)
    model = hf.new_llama()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    made = {
        "AdamW": adam,
        "StepLR": torch.optim.lr_scheduler.StepLR(adam, 1),
        "DummyOptim": DummyOptim(model.parameters()),
        "DummyScheduler": DummyScheduler(adam, total_num_steps=4),
    }
    loader = DataLoader(hf.samples(4), batch_size=2)
    accelerator.prepare(model, loader, *(made[kind] for kind in kinds))


def own_optimizer(folder: str) -> None:
    _prepare("AdamW")


def dummy_without_a_section(folder: str) -> None:
    _prepare("DummyOptim", change=lambda c: c.pop("optimizer"))


def dummy_scheduler_without_a_section(folder: str) -> None:
    _prepare("DummyOptim", "DummyScheduler", change=lambda c: c.pop("scheduler"))


def own_scheduler(folder: str) -> None:
    _prepare("DummyOptim", "StepLR", change=lambda c: c.pop("scheduler"))


def auto_betas_without_the_trainer(folder: str) -> None:
    _prepare("DummyOptim", change=lambda c: c["optimizer"]["params"].update(betas="auto"))


def scheduler_section_without_its_dummy(folder: str) -> None:
    _prepare("DummyOptim")


def no_batch_size(folder: str) -> None:
    from accelerate.utils import DummyOptim

    accelerator = hf.start_accelerator(hf.example("accelerate_zero3"))
    model = hf.new_llama()
    accelerator.prepare(model, DummyOptim(model.parameters()))


def fields_beside_the_file(folder: str) -> None:
    from unittest import mock

    with mock.patch.dict("os.environ", ACCELERATE_CONFIG_DS_FIELDS="mixed_precision"):
        hf.start_accelerator(hf.example("accelerate_zero3"))


def built_by_hand(folder: str) -> None:
    torch.optim.DMuon(hf.new_llama().parameters(), lr=1e-3)


def frozen_reference(folder: str) -> None:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "DMuon", "params": {"lr": 1e-3}},
    }
    deepspeed.initialize(model=hf.new_llama().requires_grad_(False), config=config)


CASES: dict[Callable[[str], None], str] = {
    literal_lr: "Please correct the following DeepSpeed config values that mismatch "
    "TrainingArguments values:",
    auto_on_a_dmuon_key: "`optimizer.params.exchange` not found in kwargs. Please specify "
    "`optimizer.params.exchange` without `auto` (set to correct value) in the DeepSpeed config "
    "file or pass it in kwargs.",
    auto_nobody_fills: 'is "auto" and nothing has filled it in',
    device_map: "DeepSpeed Zero-3 is not compatible with passing a `device_map`.",
    no_hidden_size: "The model's config file has neither `hidden_size` nor `hidden_sizes` entry",
    cpus_without_saying_so: "Check batch related parameters. train_batch_size is not equal to "
    "micro_batch_per_gpu * gradient_acc_step * world_size",
    batch_size_finder: "`auto_find_batch_size` isn't supported yet with DeepSpeed Zero-3.",
    best_model_without_its_optimizer: "DeepSpeed can't be used with `save_only_model` along with "
    "`load_best_model_at_end`.",
    evaluate_before_training: "ZeRO inference only makes sense with ZeRO Stage 3",
    resume_from_weights: "Can't find a valid checkpoint at",
    another_scheduler: "its learning rate scheduler is of another kind than this run's",
    own_optimizer: "You cannot specify an optimizer in the config file and in the code at the same "
    "time.",
    dummy_without_a_section: "You cannot create a `DummyOptim` without specifying an optimizer in "
    "the config file.",
    dummy_scheduler_without_a_section: "Either specify a scheduler in the config file or pass in "
    "the `lr_scheduler_callable` parameter",
    own_scheduler: "You can only specify `accelerate.utils.DummyScheduler` in the code when using "
    "`accelerate.utils.DummyOptim`.",
    auto_betas_without_the_trainer: "`optimizer.params.betas` not found in kwargs.",
    scheduler_section_without_its_dummy: "`scheduler.params.warmup_min_lr` not found in kwargs.",
    no_batch_size: "When using DeepSpeed, `accelerate.prepare()` requires you to pass at least one "
    "of training or evaluation dataloaders",
    fields_beside_the_file: "When using `deepspeed_config_file`, the following accelerate config "
    "variables will be ignored:",
    built_by_hand: "DMuon is built by DeepSpeed from ds_config.json:",
    frozen_reference: "DMuon: no parameter of the model requires a gradient",
}


def error_of(*, provoke: Callable[[str], None], folder: str) -> str:
    """Run on a rank: the error's text, of single spaces."""
    hf.join_pool()
    folder = f"{folder}/{torch.distributed.get_rank()}"
    try:
        provoke(folder)
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    return "no error"


@pytest.mark.parametrize("provoke", CASES, ids=lambda p: p.__name__)
def test_the_text_is_what_the_docs_quote(provoke: Callable[[str], None], tmp_path: Path) -> None:
    for text in ranks.run(2, error_of, provoke=provoke, folder=str(tmp_path)):
        assert CASES[provoke] in text
    assert CASES[provoke] in DOCS.replace("\\|", "|")
