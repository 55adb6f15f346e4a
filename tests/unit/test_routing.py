# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from ds_muon.config import parse
from ds_muon.groups import build_groups, incoming_groups
from ds_muon.routing import RoutingTable, route_parameters
from tests.harness.models import LlamaLike, is_matrix


class Zoo(nn.Module):
    """One of each kind of parameter that public reports found on the wrong side."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(10, 8)
        self.wpe = nn.Parameter(torch.zeros(6, 8))
        self.proj = nn.Linear(8, 12)
        self.gate = nn.Linear(8, 4, bias=False)
        self.gate_proj = nn.Linear(8, 16, bias=False)
        self.score = nn.Linear(8, 2)
        self.depthwise = nn.Conv1d(8, 8, 3, groups=8)
        self.patch = nn.Conv2d(3, 8, 2)
        self.experts = nn.Parameter(torch.zeros(3, 6, 4))
        self.row = nn.Linear(8, 1)
        self.lora_A = nn.Linear(8, 2, bias=False)
        self.norm = nn.LayerNorm(8)
        self.upsample = nn.ConvTranspose1d(8, 6, 5)
        self.weighted = weight_norm(nn.Conv1d(6, 6, 3))
        self.query_tokens = nn.Parameter(torch.zeros(1, 7, 6))
        self.A_log = nn.Parameter(torch.zeros(8, 4))


def muon(table: RoutingTable) -> dict[str, list[tuple[int, int]]]:
    return {
        n: [(p.matrix.rows, p.matrix.cols) for p in r.placements]
        for n, r in table.routes.items()
        if r.is_muon
    }


def test_each_kind_goes_where_it_belongs() -> None:
    table = route_parameters(Zoo(), parse({}))
    assert muon(table) == {
        "proj.weight": [(12, 8)],
        "gate_proj.weight": [(16, 8)],
        "patch.weight": [(8, 12)],
        "experts": [(6, 4)] * 3,
        "upsample.weight": [(8, 30)],
    }
    assert table.routes["upsample.weight"].placements[0].matrix.transposed
    reasons = {n: r.reason for n, r in table.routes.items() if not r.is_muon}
    assert reasons["wte.weight"] == "embedding"
    assert reasons["wpe"] == "embedding by name"
    assert reasons["gate.weight"] == "router"
    assert reasons["score.weight"] == "output head by name"
    assert reasons["depthwise.weight"] == "depthwise or grouped convolution"
    assert reasons["row.weight"] == "a side of 1"
    assert reasons["lora_A.weight"] == "LoRA factor"
    assert reasons["norm.weight"] == "1-D"
    assert reasons["query_tokens"] == "a table with a leading dimension of 1"
    weighted = "weighted.parametrizations.weight.original1"
    assert reasons[weighted] == "part of a parametrized weight"
    offsets = [p.offset for p in table.routes["experts"].placements]
    names = [p.matrix.name for p in table.routes["experts"].placements]
    assert (offsets, names) == ([0, 24, 48], ["experts[0]", "experts[1]", "experts[2]"])


def test_a_decoder() -> None:
    table = route_parameters(LlamaLike(), parse({}))
    assert set(muon(table)) == {n for n, _ in LlamaLike().named_parameters() if is_matrix(n)}


def test_the_output_head_is_asked_of_the_model_and_tied_weights_are_embeddings() -> None:
    model = LlamaLike()
    model.final = nn.Linear(33, 61, bias=False)
    model.get_output_embeddings = lambda: model.final
    assert route_parameters(model, parse({})).routes["final.weight"].reason == "output head"
    tied = LlamaLike()
    tied.layers[0].up_proj.weight = tied.embed_tokens.weight
    table = route_parameters(tied, parse({}))
    assert table.routes["embed_tokens.weight"].reason == "embedding tied to another module"


def test_zero_init_shapes_and_compiled_names() -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=False))
    model[0].weight.ds_shape = torch.Size((6, 4))
    model[0].weight.data = torch.empty(0)
    assert muon(route_parameters(model, parse({}))) == {"0.weight": [(6, 4)]}
    wrapper = nn.Module()
    wrapper._orig_mod = nn.Sequential(nn.Linear(4, 6, bias=False))
    assert muon(route_parameters(wrapper, parse({}))) == {"0.weight": [(6, 4)]}


def test_include_exclude_tags_and_size() -> None:
    model = Zoo()
    table = route_parameters(model, parse({"include": ["wpe", "score.weight"]}))
    assert {"wpe", "score.weight"} <= set(muon(table))
    assert table.routes["wpe"].reason == "included by wpe"
    both = parse({"include": ["wpe"], "exclude": ["wp*", "proj.weight"]})
    table = route_parameters(model, both)
    assert "wpe" not in muon(table) and "proj.weight" not in muon(table)
    assert table.routes["wpe"].reason == "exclude 'wp*'"
    model.gate.weight.use_muon = True
    model.proj.weight.use_muon = False
    model.norm.weight.use_muon = True
    table = route_parameters(model, parse({}))
    assert "gate.weight" in muon(table)
    assert table.routes["proj.weight"].reason == "tagged use_muon = False"
    table = route_parameters(model, parse({}), {id(model.gate.weight): False})
    assert "gate.weight" not in muon(table)
    table = route_parameters(model, parse({"adamw_above_mb": 0.0004}))
    assert "adamw_above_mb" in table.routes["gate_proj.weight"].reason
    assert "gate.weight" in muon(table)


def test_patterns_that_cannot_be_honoured_are_errors() -> None:
    with pytest.raises(ValueError, match="matches no trainable parameter.*'proj.weight'"):
        route_parameters(Zoo(), parse({"include": ["prj.weight"]}))
    with pytest.raises(ValueError, match="norm.weight.*1-D"):
        route_parameters(Zoo(), parse({"include": ["norm.weight"]}))
    with pytest.raises(ValueError, match="does not cut the 12 rows"):
        route_parameters(Zoo(), parse({"split": {"proj.weight": {"rows": [4, 4]}}}))


def test_split_cuts_rows_heads_and_stacks() -> None:
    config = parse({"split": {"proj.weight": {"rows": [8, 4]}, "experts": {"heads": 2}}})
    table = route_parameters(Zoo(), config)
    assert muon(table)["proj.weight"] == [(8, 8), (4, 8)]
    assert muon(table)["experts"] == [(3, 4)] * 6
    assert [p.offset for p in table.routes["proj.weight"].placements] == [0, 64]
    names = {p.matrix.name for p in table.routes["experts"].placements}
    assert len(names) == 6


@pytest.mark.parametrize(
    ("name", "rule", "why"),
    [
        ("proj.bias", {"rows": [6, 6]}, "1-D"),
        ("depthwise.*", {"heads": 2}, "depthwise or grouped convolution"),
        ("wte.weight", {"heads": 2}, "embedding"),
        ("gate.weight", {"rows": [2, 2]}, "router"),
        ("query_tokens", {"experts": True}, "leading dimension of 1"),
    ],
)
def test_a_split_of_what_is_no_matrix_is_an_error(name: str, rule: dict, why: str) -> None:
    with pytest.raises(ValueError) as error:
        route_parameters(Zoo(), parse({"split": {name: rule}}))
    for part in (f"split[{name!r}] = {{", name.removesuffix(".*"), why, "narrow the glob"):
        assert part in str(error.value)


def test_a_split_is_honoured_where_the_users_word_makes_a_matrix() -> None:
    config = parse({"split": {"wte.weight": {"heads": 2}}, "include": ["wte.weight"]})
    assert muon(route_parameters(Zoo(), config))["wte.weight"] == [(5, 8)] * 2
    # Whole is what a vector is, too; and a later word of the user's needs no second.
    assert muon(route_parameters(Zoo(), parse({"split": {"*": {"none": True}}})))
    config = parse({"split": {"proj.weight": {"rows": [6, 6]}}, "exclude": ["proj.weight"]})
    assert "proj.weight" not in muon(route_parameters(Zoo(), config))
    shadowed = parse({"split": {"pro*t": {"none": True}, "proj.weight": {"rows": [6, 6]}}})
    with pytest.raises(ValueError, match="'proj.weight' matches is taken by globs before it"):
        route_parameters(Zoo(), shadowed)


def test_the_class_of_a_module_decides_before_its_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_proj = nn.Linear(8, 6, bias=False)
            self.hidden_norm_proj = nn.Linear(8, 6, bias=False)
            self.conv_norm = nn.Conv1d(4, 6, 3, bias=False)
            self.norm_rnn = nn.LSTM(4, 6, bias=False)
            self.norm_attention = nn.MultiheadAttention(6, 2, bias=False)
            self.table_norm = nn.Module()
            self.table_norm.weight = nn.Parameter(torch.zeros(4, 6))
            self.ln = nn.LayerNorm((4, 6))
            self.tokens_embed = nn.Linear(31, 6, bias=False)
            self.head = nn.Linear(6, 9, bias=False)
            self.config = types.SimpleNamespace(vocab_size=31)

    routes = route_parameters(Named(), parse({})).routes
    assert {n: r.reason for n, r in routes.items() if not r.is_muon} == {
        "table_norm.weight": "norm, a row per head",
        "ln.weight": "norm",
        "ln.bias": "norm",
        "tokens_embed.weight": "embedding by name",
        "head.weight": "output head by name",
    }


def test_a_transposed_linear_keeps_its_real_rows_and_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 12))

    module = types.ModuleType("transformers.pytorch_utils")
    module.Conv1D = Conv1D  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "transformers.pytorch_utils", module)
    model = nn.ModuleDict({"embed_proj": Conv1D()})
    [placement] = route_parameters(model, parse({})).routes["embed_proj.weight"].placements
    assert placement.matrix.transposed and (placement.matrix.rows, placement.matrix.cols) == (4, 12)


def test_nothing_for_muon_is_an_error_or_a_loud_warning() -> None:
    with pytest.raises(ValueError, match="none of the 2 trainable"):
        route_parameters(nn.Sequential(nn.LayerNorm(4)), parse({})).require_matrices()
    frozen = LlamaLike().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter"):
        route_parameters(frozen, parse({})).require_matrices()
    frozen.norm.weight.requires_grad_(True)
    assert "frozen" in str(route_parameters(frozen, parse({})).require_matrices())
    excluded = route_parameters(LlamaLike(), parse({"exclude": ["*"]})).require_matrices()
    assert "exclude '*'" in str(excluded)
    assert route_parameters(LlamaLike(), parse({})).require_matrices() is None


def test_the_report_counts_everything() -> None:
    model = Zoo()
    report = route_parameters(model, parse({})).report()
    total = sum(p.numel() for p in model.parameters())
    lines = [line for line in report.splitlines() if not line.startswith(" ")]
    counted = [int(line.split(" elements")[0].split()[-1].replace(",", "")) for line in lines]
    assert sum(counted) == total
    assert "7 matrices" in lines[0]


def test_two_groups_of_one_name_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    config = parse({"lr": 1e-3})
    table = route_parameters(model, config)
    names = {id(p): n for n, p in model.named_parameters()}
    groups = [{"name": "x", "params": [p], "lr": 1e-4} for p in model.parameters()]
    with pytest.raises(ValueError, match="two parameter groups are named 'x'"):
        build_groups(incoming_groups(groups), names, table, config)
