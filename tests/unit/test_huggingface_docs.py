# SPDX-License-Identifier: Apache-2.0
"""docs/huggingface.md: its configurations are the files, and its YAML and Python are readable."""

from __future__ import annotations

import ast
import re

import yaml

from tests.harness.huggingface import ROOT

TEXT = (ROOT / "docs" / "huggingface.md").read_text()
BLOCKS = re.findall(r"`ds_config_examples/(\w+)\.json`:\n\n```json\n(.*?)```", TEXT, re.DOTALL)
EXAMPLES = ROOT / "ds_config_examples"


def test_every_configuration_is_the_file() -> None:
    shown = dict(BLOCKS)
    names = ("hf_trainer", "accelerate", "trl", "llamafactory", "axolotl")
    assert shown.keys() == {p.stem for p in EXAMPLES.glob("*.json") if p.stem.startswith(names)}
    assert len(shown) == TEXT.count("```json")
    for name, text in shown.items():
        assert text == (EXAMPLES / f"{name}.json").read_text(), name


def test_yaml_and_python_blocks_parse() -> None:
    yamls = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)]
    files = [y.get("deepspeed") or y["deepspeed_config"]["deepspeed_config_file"] for y in yamls]
    assert files == [
        f"ds_config_examples/{name}.json"
        for name in ("accelerate_zero3", "llamafactory_zero3_offload", "axolotl_zero3")
    ]
    # accelerate refuses these beside a file of DeepSpeed's.
    assert yamls[0]["deepspeed_config"].keys() == {"deepspeed_config_file", "zero3_init_flag"}
    assert "mixed_precision" not in yamls[0]
    for text in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        ast.parse(text)
