# SPDX-License-Identifier: Apache-2.0
"""Cuts of a parameter: every placement holds the elements of its map, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_muon.config import parse
from ds_muon.routing import Route, route_parameters
from ds_muon.run.views import view
from tests.harness.fused import HEAD, Zoo


def matrices(route: Route, parameter: Tensor) -> dict[str, Tensor]:
    """What stands in each placement, as (out, in)."""
    flat, found = parameter.detach().reshape(-1), {}
    for placement in route.placements:
        matrix = placement.matrix
        stored = view(flat, placement.block).reshape(matrix.rows, matrix.cols)
        found[matrix.name.removeprefix(route.name)] = stored.T if matrix.transposed else stored
    return found


def cut(module: nn.Module, name: str = "weight", **params: Any) -> dict[str, list[int]]:
    """First column of every matrix of one parameter that counts its elements."""
    parameter = dict(module.named_parameters())[name]
    with torch.no_grad():
        parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    route = route_parameters(module, parse(params)).routes[name]
    covered = torch.cat([m.flatten() for m in matrices(route, parameter).values()])
    assert covered.sort().values.tolist() == list(range(parameter.numel()))
    return {n: m[:, 0].int().tolist() for n, m in matrices(route, parameter).items()}


def test_placements_hold_their_maps() -> None:
    zoo = Zoo()
    table = route_parameters(zoo, parse({}))
    params = dict(zoo.named_parameters())
    for number, unit in enumerate(zoo.units):
        found: list[Tensor] = []
        for name, route in table.routes.items():
            if name.startswith(f"units.{number}."):
                found += matrices(route, params[name]).values()
        maps = list(unit.maps().values())
        assert len(found) == len(maps)
        for weight in maps:
            assert any(torch.equal(weight, m) or torch.equal(weight.T, m) for m in found)


def test_heads_of_fused_parts_are_their_rows() -> None:
    zoo = Zoo()
    table = route_parameters(zoo, parse({"per_head_muon": True}))
    params = dict(zoo.named_parameters())
    for number, name in ((0, "qkv_proj"), (4, "query_key_value"), (3, "c_attn")):
        full = f"units.{number}.{name}.weight"
        found = matrices(table.routes[full], params[full])
        for label, weight in zoo.units[number].maps().items():
            heads = weight.split(HEAD)
            for index, head in enumerate(heads):
                assert torch.equal(found.pop(f"[{label} {index}]"), head)
        assert not found
    gated = table.routes["units.1.gate_up_proj.weight"]
    assert [p.matrix.rows for p in gated.placements] == [7, 7]
    assert table.routes["units.0.qkv_proj.weight"].reason == "matrix, one per head of q, k, v"


def test_split_in_every_way() -> None:
    linear = nn.Linear(2, 12, bias=False)

    def split(rule: dict[str, Any]) -> dict[str, list[int]]:
        return cut(linear, split={"weight": rule})

    every = list(range(0, 24, 2))
    assert split({"rows": [3, 9]}) == {"[rows 0:3]": every[:3], "[rows 3:12]": every[3:]}
    assert split({"heads": 3}) == {f"[head {i}]": every[4 * i : 4 * i + 4] for i in range(3)}
    assert split({"interleaved": [1, 2]}) == {
        "[part 0]": every[::3],
        "[part 1]": [e for i, e in enumerate(every) if i % 3],
    }
    assert split({"none": True}) == {"": every}
    wide = nn.Linear(5, 2, bias=False)
    found = cut(wide, split={"weight": {"cols": [2, 3]}})
    assert found == {"[cols 0:2]": [0, 5], "[cols 2:5]": [2, 7]}


def test_split_wins_over_what_is_recognised() -> None:
    zoo = Zoo()
    rules = {
        "*c_attn*": {"none": True},
        "*query_key*": {"heads": 9},
        "units.2.gate*": {"rows": [5, 7]},
    }
    routes = route_parameters(zoo, parse({"split": rules, "per_head_muon": True})).routes
    shapes = {
        name: [(p.matrix.rows, p.matrix.cols) for p in routes[name].placements]
        for name in ("units.3.c_attn.weight", "units.4.query_key_value.weight")
    }
    assert shapes["units.3.c_attn.weight"] == [(10, 36)]
    assert shapes["units.4.query_key_value.weight"] == [(4, 10)] * 9
    assert [p.matrix.rows for p in routes["units.2.gate_up_proj"].placements] == [5, 7] * 3


MISFITS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"rows": [4, 4]}, "does not cut the 12 rows of weight into blocks of at least 2 rows"),
    ({"rows": [1, 11]}, "at least 2 rows"),
    ({"cols": [4]}, "does not cut the 2 columns"),
    ({"cols": [1, 1]}, "at least 2 columns"),
    ({"heads": 5}, "5 equal blocks of at least 2 rows"),
    ({"heads": 12}, "12 equal blocks of at least 2 rows"),
    ({"interleaved": [5, 2]}, "a whole number of periods of 7 rows"),
    ({"interleaved": [11, 1]}, "with at least 2 rows to a matrix"),
    ({"experts": True}, r"experts.*weight of shape \(12, 2\).*no stack"),
)


@pytest.mark.parametrize(("rule", "told"), MISFITS, ids=lambda x: str(x))
def test_a_split_that_does_not_fit_says_why(rule: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        cut(nn.Linear(2, 12, bias=False), split={"weight": rule})


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({"row": [1]}, "did you mean 'rows'"),
        ({"rows": [1], "heads": 2}, "must be one of"),
        ({"rows": [True]}, "list of positive whole numbers"),
        ({"interleaved": []}, "list of positive whole numbers"),
        ({"heads": 0}, "a positive whole number"),
        ({"none": False}, "must be true"),
        ({}, "must be one of"),
        (None, r"split\['\*'\] must be one of .* got null"),
        ([3], r"split\['\*'\] must be one of"),
    ],
    ids=str,
)
def test_a_split_that_is_none_is_refused_by_the_configuration(rule: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse({"split": {"*": rule}})


class Attention(nn.Module):
    def __init__(self, rows: int, **sizes: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=3, **sizes)
        self.q_proj = nn.Linear(8, rows, bias=False)
        self.qkv = nn.Linear(8, rows, bias=False)


def test_sizes_that_do_not_add_up_are_not_cut() -> None:
    routes = route_parameters(Attention(13, head_dim=4), parse({})).routes
    assert [len(r.placements) for r in routes.values()] == [1, 1]
    # Thirds of three times the inputs need no config; a side of 1 would be no matrix.
    assert len(route_parameters(Attention(24), parse({})).routes["qkv.weight"].placements) == 3
    assert (
        len(route_parameters(Attention(9, head_dim=1), parse({})).routes["qkv.weight"].placements)
        == 3
    )


def test_per_head_needs_heads_that_the_config_confirms() -> None:
    found = route_parameters(Attention(12, head_dim=4), parse({"per_head_muon": True}))
    assert [p.matrix.rows for p in found.routes["q_proj.weight"].placements] == [4, 4, 4]
    with pytest.raises(ValueError, match="per_head_muon is true and no attention"):
        route_parameters(Attention(13, head_dim=4), parse({"per_head_muon": True}))
    excluded = parse({"per_head_muon": True, "exclude": ["*"]})
    with pytest.raises(ValueError, match="per_head_muon"):
        route_parameters(Attention(12, head_dim=4), excluded)


def test_torch_modules_that_fuse() -> None:
    attention = nn.MultiheadAttention(8, 2, bias=False)
    assert list(cut(attention, "in_proj_weight")) == ["[q]", "[k]", "[v]"]
    assert len(cut(nn.GRU(5, 3, bias=False), "weight_ih_l0")) == 3


def test_gates_of_every_layer_and_direction() -> None:
    shape = {"num_layers": 12, "bidirectional": True, "bias": False}
    for module, gates in (
        (nn.LSTM(5, 4, proj_size=3, **shape), ["[i]", "[f]", "[g]", "[o]"]),
        (nn.GRU(5, 4, **shape), ["[r]", "[z]", "[n]"]),
        (nn.LSTMCell(5, 4, bias=False), ["[i]", "[f]", "[g]", "[o]"]),
        (nn.GRUCell(5, 4, bias=False), ["[r]", "[z]", "[n]"]),
        (nn.RNN(5, 4, **shape), [""]),
    ):
        for name, route in route_parameters(module, parse({})).routes.items():
            labels = [p.matrix.name.removeprefix(name) for p in route.placements]
            assert labels == ([""] if "weight_hr" in name else gates), name
    assert list(cut(nn.LSTM(5, 3, 2, bias=False, bidirectional=True), "weight_hh_l1_reverse")) == [
        "[i]",
        "[f]",
        "[g]",
        "[o]",
    ]


def test_names_of_no_hidden_matrix() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rel_pos_h = nn.Parameter(torch.zeros(7, 4))
            self.gate_up_proj_bias = nn.Parameter(torch.zeros(3, 8))
            self.q_norm = nn.Module()
            self.q_norm.weight = nn.Parameter(torch.zeros(3, 4))
            self.config = SimpleNamespace(num_experts=8)
            # Transposed: experts are columns.
            self.router = nn.Module()
            self.router.weight = nn.Parameter(torch.zeros(6, 8))
            self.gate = nn.Linear(4, 6)

    reasons = {n: r.reason for n, r in route_parameters(Odd(), parse({})).routes.items()}
    assert reasons.pop("rel_pos_h") == "table by name"
    assert reasons.pop("gate_up_proj_bias") == "bias, a row per expert or head"
    assert reasons.pop("q_norm.weight") == "norm, a row per head"
    assert reasons.pop("router.weight") == "router"
    assert reasons == {"gate.weight": "matrix", "gate.bias": "1-D"}
