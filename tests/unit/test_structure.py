# SPDX-License-Identifier: Apache-2.0
"""Structure rules as tests: floors, lean imports, registration, examples, generated docs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_muon.config import parse
from ds_muon.ortho.recipes import resolve
from tests.harness.huggingface import filled

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ds_muon"
MODULES = sorted(PACKAGE.rglob("*.py"))
# What each floor may import besides the standard library and torch; an arrow may only point down.
FLOOR_0 = {
    "ds_muon.attention",
    "ds_muon.config",
    "ds_muon.log",
    "ds_muon.ortho",
    "ds_muon.plan",
    "ds_muon.planning",
    "ds_muon.preview",
    "ds_muon.routing",
}
FLOOR_1 = {"ds_muon.comm", "ds_muon.run"}
# Floor 3 is everything else: zero/, and what starts runs or looks at DeepSpeed from outside.
USES_DEEPSPEED = ("ds_muon.zero", "ds_muon.selftest")
FACE = {"ds_muon.checkpoint", "ds_muon.optimizer", "ds_muon.groups"}


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def floor_of(module: str) -> int:
    for floor, names in ((0, FLOOR_0), (1, FLOOR_1), (2, FACE)):
        if any(module == n or module.startswith(n + ".") for n in names):
            return floor
    return 3


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_point_down(path: Path) -> None:
    module = dotted(path)
    if module == "ds_muon":
        return
    imported = imports_of(path)
    floor = floor_of(module)
    for name in imported:
        if name.startswith("ds_muon."):
            assert floor_of(name) <= floor, f"{module} imports {name}, which is above it"
        if name.split(".")[0] == "deepspeed":
            assert module.startswith(USES_DEEPSPEED), f"{module} imports {name}"
        if name.split(".")[0] == "transformers":
            assert module.startswith(("ds_muon.hf", "ds_muon.preview")), f"{module} imports {name}"
        if name.startswith("torch.distributed"):
            assert floor > 0, f"{module} imports {name}"
    for package, foreign in (
        ("plan", "torch"),
        ("plan", "ds_muon.comm"),
        ("ortho", "ds_muon.comm"),
    ):
        if module.startswith(f"ds_muon.{package}."):
            assert not any(n == foreign or n.startswith(foreign + ".") for n in imported)


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{path}:{node.name}"


def python(code: str, **env: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **env},
        cwd=ROOT,
    ).stdout.strip()


@pytest.mark.parametrize("module", ["ds_muon", "ds_muon.plan.plan", "ds_muon.ortho.newton_schulz"])
def test_light_modules_leave_deepspeed_unloaded(module: str) -> None:
    code = f"import sys, {module}; print('deepspeed' in sys.modules)"
    assert python(code) == "False"


def test_importing_the_package_loads_nothing_of_it() -> None:
    code = "import sys, ds_muon; print(sorted(m for m in sys.modules if m.startswith('ds_muon')))"
    assert python(code) == "['ds_muon']"


LOOKUP = (
    "import torch, sys; light = 'ds_muon.optimizer' not in sys.modules; "
    "print(light, torch.optim.DMuon.__name__, torch.optim.dmuon is torch.optim.DMuon, "
    "hasattr(torch.optim, 'NoSuchThing'))"
)


def test_an_installed_package_is_enough() -> None:
    assert python(LOOKUP).splitlines()[-1] == "True MatrixOwnerOptimizer True False"


def test_import_registers_where_autoload_is_off() -> None:
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert python("import torch; print(hasattr(torch.optim, 'DMuon'))", **off) == "False"
    assert python("import ds_muon; " + LOOKUP, **off).splitlines()[-1].startswith("True Matrix")


def test_bare_construction_says_where_the_optimizer_belongs() -> None:
    code = (
        "import torch\n"
        "try: torch.optim.DMuon([torch.nn.Parameter(torch.zeros(2, 2))], lr=1e-3)\n"
        "except TypeError as error: print(error)"
    )
    assert "ds_config.json" in python(code).splitlines()[-1]


EXAMPLES = sorted((ROOT / "ds_config_examples").glob("*.json"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_are_valid(path: Path) -> None:
    text = path.read_text()
    config = json.loads(text)
    if '"auto"' in text:
        if path.stem.startswith("accelerate"):
            # accelerate alone fills less than the Trainer, and compares nothing.
            params = config["optimizer"]["params"]
            assert {key for key, value in params.items() if value == "auto"} <= {
                "lr",
                "weight_decay",
            }
            del params["betas"]
            config["bf16"]["enabled"] = "auto"
        config = filled(config)
        assert '"auto"' not in json.dumps(config)
    assert config["optimizer"]["type"] == "DMuon"
    resolve(parse(config["optimizer"]["params"]))
    if "zero" in path.stem:
        assert config["zero_optimization"]["stage"] == int(path.stem.split("zero")[1][0])


def test_the_examples_are_there() -> None:
    names = {p.stem for p in EXAMPLES}
    assert names >= {"stage0", "zero1", "zero2", "zero3", "zero3_bf16"}


def test_generated_docs_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/gen_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_cells_that_are_left_out_belong_to_tests() -> None:
    from tests.grid import REPEATS

    text = "".join(path.read_text() for path in (ROOT / "tests" / "distributed").glob("*.py"))
    assert [name for name in REPEATS if f"def {name}(" not in text] == []
