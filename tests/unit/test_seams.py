# SPDX-License-Identifier: Apache-2.0
"""Seams: one table of what is private to DeepSpeed, complete, not stale, and probed."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.partition_parameters import Init

from ds_muon.zero import seams

ZERO = Path(seams.__file__).parent
SOURCES = [path for path in sorted(ZERO.rglob("*.py")) if path.name != "seams.py"]
# Not DeepSpeed's: torch's mark of a module that runs compiled code, and its copy of many tensors.
TORCH_NAMES = {"_compiled_call_impl", "_foreach_copy_"}


def is_private(name: Any) -> bool:
    if not isinstance(name, str) or name.endswith("__") or name in TORCH_NAMES:
        return False
    return name.startswith("_") and not name.startswith("_ds_muon")


def private_touches(tree: ast.AST) -> list[str]:
    """Private attributes of anything but the object itself, by dot or by name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found += [] if own else [f"line {node.lineno}: .{node.attr}"]
        named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if named and node.func.id in ("getattr", "setattr", "hasattr", "delattr"):
            names = [a.value for a in node.args if isinstance(a, ast.Constant)]
            found += [f"line {node.lineno}: {n}" for n in names if is_private(n)]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ZERO).as_posix())
def test_private_attributes_are_touched_in_seams_only(path: Path) -> None:
    assert private_touches(ast.parse(path.read_text())) == []


def test_the_rule_sees_every_way_to_touch_one() -> None:
    code = "a._x\na._y = 1\nself._zero._z\ngetattr(a, '_w')\nself._mine\na._ds_muon_own"
    found = private_touches(ast.parse(code))
    assert sorted(f.split()[-1] for f in found) == ["._x", "._y", "._z", "_w"]


def test_no_line_of_the_table_is_stale() -> None:
    used: set[str] = set()
    for path in [*SOURCES, Path(seams.__file__)]:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value)
    assert {seam.name for seam in seams.SEAMS} - used == set()


def test_the_accessors_refuse_what_is_not_in_the_table() -> None:
    for accessor in (seams.private, lambda o, n: seams.override(o, n, 1), seams.available):
        with pytest.raises(AssertionError, match="_no_such"):
            accessor(DeepSpeedEngine, "_no_such")
    with pytest.raises(AssertionError, match="_update_scale"):
        seams.private(DeepSpeedEngine, "_update_scale")
    assert seams.private(stage_1_and_2, "all_gather_dp_groups")
    assert seams.available(Init, "_partition_world_size")


def test_the_installed_deepspeed_has_them_all() -> None:
    assert seams.missing_from_classes() == []
    seams.require_classes()


def test_one_error_names_all_that_classes_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DeepSpeedEngine, "_configure_zero_optimizer")
    monkeypatch.delattr(stage_1_and_2, "all_gather_dp_groups")
    monkeypatch.delattr(Init, "_partition_world_size")
    monkeypatch.setattr(seams.deepspeed, "__version__", "0.19.99")
    real = importlib.import_module

    def import_module(name: str) -> Any:
        if name.endswith("unfused_optimizer"):
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(RuntimeError) as caught:
        seams.require_classes()
    text = str(caught.value)
    for part in (
        "DeepSpeedEngine._configure_zero_optimizer: hooked",
        "stage_1_and_2.all_gather_dp_groups: replaced",
        "FP16_UnfusedOptimizer._update_scale",
        "deepspeed 0.19.99",
        ", ".join(seams.TESTED_VERSIONS),
        f"pip install deepspeed=={seams.TESTED_VERSIONS[-1]}",
    ):
        assert part in text
    # One feature's need is that feature's refusal, not everybody's.
    assert "_partition_world_size" not in text
    assert len(text.splitlines()) == 5


def test_one_error_names_all_that_instances_lack() -> None:
    engine = object.__new__(type("Sub", (DeepSpeedEngine,), {"__del__": lambda self: None}))
    engine.__dict__.update(_config=SimpleNamespace(), seq_dp_world_size=1)
    with pytest.raises(RuntimeError) as caught:
        seams.require_instances(engine, SimpleNamespace())
    text = str(caught.value)
    assert "DeepSpeedEngine.seq_data_parallel_group: the group" in text
    assert "DeepSpeedEngine._global_grad_norm" in text
    assert "seq_dp_world_size" not in text
    with pytest.raises(RuntimeError, match="seq_data_parallel_group"):
        seams.private(engine, "seq_data_parallel_group")
    with pytest.raises(RuntimeError, match="_global_grad_norm"):
        seams.override(engine, "_global_grad_norm", 1.0)


@pytest.mark.parametrize("version", ["0.19.0", "0.19.4", "0.19.8", "0.19.8+abc"])
def test_tested_versions_are_silent(version: str) -> None:
    assert seams.version_warning(version) is None


@pytest.mark.parametrize("version", ["0.18.9", "0.19.9", "0.20.0rc1", "1.0"])
def test_other_versions_are_warned_about(version: str) -> None:
    text = seams.version_warning(version)
    assert text is not None
    assert version in text
    assert "0.19.0 to 0.19.8" in text
    assert "ds_muon selftest" in text
