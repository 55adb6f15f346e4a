# SPDX-License-Identifier: Apache-2.0
"""Training: DeepSpeed engines of the tiny model, their master weights, and hashes of bits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor

from ds_muon.selftest import model
from ds_muon.selftest.reference import Settings

SETTINGS = Settings()
# DeepSpeed's default buckets are sized for models that are a million times larger.
_BUCKETS = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}


def start(stage: int, **params: Any) -> Any:
    """An engine of the tiny model at a ZeRO stage.

    Args:
        params: of optimizer.params, besides what SETTINGS says.
    """
    given = {
        "lr": SETTINGS.lr,
        "weight_decay": SETTINGS.weight_decay,
        "momentum": SETTINGS.momentum,
        "betas": list(SETTINGS.betas),
        "eps": SETTINGS.eps,
        "ns_dtype": "fp32",
        **params,
    }
    config = {
        "train_micro_batch_size_per_gpu": model.MICRO_BATCH,
        "gradient_accumulation_steps": model.MICRO_BATCHES,
        "gradient_clipping": SETTINGS.clip,
        "optimizer": {"type": "DMuon", "params": given},
        "zero_optimization": {"stage": stage, **(_BUCKETS if stage else {})},
    }
    built = model.build()
    engine, *_ = deepspeed.initialize(
        model=built, model_parameters=built.parameters(), config=config
    )
    return engine


def train(engine: Any, batches: Sequence[Tensor]) -> None:
    """One optimizer step per batch of the whole world."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    device = get_accelerator().current_device_name()
    for batch in batches:
        for micro in batch.chunk(world)[rank].to(device).split(model.MICRO_BATCH):
            engine.backward(engine(micro))
            engine.step()


def masters(engine: Any) -> dict[str, Tensor]:
    """Whole fp32 master weights by name; a collective."""
    named = engine.module.named_parameters()
    if not engine.zero_optimization():
        return {name: parameter.detach().clone() for name, parameter in named}
    return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in named}


def digest(tensors: dict[str, Tensor]) -> str:
    """Hash of the bits of fp32 tensors."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]
