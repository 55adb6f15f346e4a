# SPDX-License-Identifier: Apache-2.0
"""Model: where the model of a preview comes from."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from torch import nn


def build_model(source: str) -> nn.Module:
    """Build a model on the meta device.

    Args:
        source: a folder (or file) with a Hugging Face config.json, or module:callable.

    Raises:
        ValueError: neither of both.
    """
    path = Path(source)
    with torch.device("meta"):
        return _published(path) if path.exists() else _call(source)


def _published(path: Path) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    except Exception as error:  # whatever a file that is no config.json brings about
        raise ValueError(
            f"--model {str(path)!r} is not, or does not hold, a config.json that transformers "
            f"builds a causal language model from: {type(error).__name__}: {error}"
        ) from error


def _call(source: str) -> nn.Module:
    module, _, name = source.partition(":")
    if not name:
        raise ValueError(
            f"--model {source!r} is neither an existing folder with a config.json nor "
            "module:callable"
        )
    sys.path.insert(0, "")
    try:
        model = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise ValueError(
            f"--model {source!r} could not be built: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"--model {source!r} built {type(model).__name__}, not a torch.nn.Module")
    return model
