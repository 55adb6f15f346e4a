# SPDX-License-Identifier: Apache-2.0
"""Routing of real architectures, against reviewed tables in golden/.

python -m tests.unit.test_architectures [name ...]    rewrites them; review the difference by hand
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from torch import nn

from ds_muon.config import parse
from ds_muon.plan.layout import Placement
from ds_muon.routing import Route, route_parameters
from tests.harness.architectures import ARCHITECTURES, with_lora

GOLDEN = Path(__file__).parent / "golden"


def shown(model: nn.Module, **params: object) -> str:
    """One line per kind of parameter, with layer and expert numbers collapsed."""
    table = route_parameters(model, parse(params))
    lines = Counter(_line(route) for route in table.routes.values())
    text = "".join(
        f"{line}{f'    ({count} alike)' if count > 1 else ''}\n" for line, count in lines.items()
    )
    frozen = table.num_frozen_matrices
    return text + (f"{frozen} frozen matrices\n" if frozen else "")


def _line(route: Route) -> str:
    name = re.sub(r"\.\d+(?=\.)", ".*", route.name)
    sizes = "x".join(map(str, route.shape))
    if not route.is_muon:
        return f"{name} {sizes}: AdamW, {route.reason}"
    found: Counter[str] = Counter()
    for placement in route.placements:
        matrix = placement.matrix
        label = re.sub(r"\[\d+\]", "", matrix.name.removeprefix(route.name)).strip("[]")
        label = re.sub(r"^(.*)head \d+$", r"\1head", label)
        label = re.sub(r"^([qkv]) \d+$", r"\1 head", label)
        stored = ", stored in x out" if matrix.transposed else ""
        where = "" if label.endswith("head") else _lines(placement, route)
        size = f"{label} {matrix.rows}x{matrix.cols}".strip()
        found[size + (f" ({(where + stored).lstrip(', ')})" if where + stored else "")] += 1
    said = [f"{count} of {what}" if count > 1 else what for what, count in found.items()]
    return f"{name} {sizes}: Muon, {', '.join(said)}"


def _lines(placement: Placement, route: Route) -> str:
    """Which rows or columns of the stored matrix, counted from its start."""
    matrix, cols = placement.matrix, route.shape[-1]
    stack = route.shape[0] if len(route.shape) == 3 else 1
    if len(route.placements) in (1, stack):
        return ""
    axis = "columns" if matrix.cols < cols else "rows"
    unit = 1 if axis == "columns" else cols
    period = placement.stride or route.shape[-2] * cols
    start = placement.offset % period // unit
    size = (placement.run or matrix.numel) // unit
    text = f"{axis} {start}:{start + size}"
    whole = cols if axis == "columns" else route.shape[-2]
    return text + (f" of every {period // unit}" if period // unit != whole else "")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_routing_is_what_was_reviewed(name: str) -> None:
    assert shown(ARCHITECTURES[name]()) == (GOLDEN / f"{name}.txt").read_text()


def test_lora_is_what_was_reviewed() -> None:
    pytest.importorskip("peft")
    assert shown(with_lora()) == (GOLDEN / "lora.txt").read_text()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "phi3", "deepseek_v3", "vlm"])
def test_per_head_routing_is_what_was_reviewed(name: str) -> None:
    found = shown(ARCHITECTURES[name](), per_head_muon=True)
    assert found == (GOLDEN / f"per_head_{name}.txt").read_text()


def rewrite(names: list[str]) -> None:
    for name in names or [*ARCHITECTURES, "lora"]:
        model = with_lora() if name == "lora" else ARCHITECTURES[name]()
        (GOLDEN / f"{name}.txt").write_text(shown(model))
    for path in GOLDEN.glob("per_head_*.txt"):
        name = path.stem.removeprefix("per_head_")
        if not names or name in names:
            path.write_text(shown(ARCHITECTURES[name](), per_head_muon=True))


if __name__ == "__main__":
    rewrite(sys.argv[1:])
