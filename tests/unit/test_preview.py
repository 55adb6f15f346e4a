# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig

from ds_muon.cli import main
from ds_muon.diagnose.configuration import judge_file
from ds_muon.planning import read_owner_costs
from ds_muon.preview.config_file import read_config
from ds_muon.preview.model import build_model
from ds_muon.preview.record import preview
from ds_muon.preview.subject import read_subject
from ds_muon.preview.sweep import Cluster, sweep_shard_sizes
from ds_muon.preview.traffic import count, traffic

EXAMPLES = Path(__file__).parents[2] / "ds_config_examples"
MODEL = "tests.harness.models:LlamaLike"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with a config.json, as Hugging Face publishes them."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    return tmp_path


def test_a_hugging_face_folder_is_planned_without_weights(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_model(str(llama))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    arguments = ["--config", str(EXAMPLES / "zero3.json"), "--model", str(llama), "--json"]
    assert main(["plan", *arguments, "--world-size", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    per_layer = 64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 160
    assert (found["num_matrices"], found["matrix_numel"]) == (14, 2 * per_layer)
    assert found["num_straddlers"] == 14
    # 2 (N-1)/N * P/N, since 4 divides every matrix.
    dmuon = next(t for t in found["traffic"] if t["optimizer"] == "DMuon")
    assert dmuon["exchange_mean"] == 2 * 3 / 4 * 2 * per_layer / 4
    assert dmuon["exchange_busiest"] >= dmuon["exchange_mean"]
    rest = found["rest_numel"]
    assert found["state_bytes"] == -(-(2 * per_layer * 4 + rest * 8) // 4)
    assert found["adamw_state_bytes"] == -(-(2 * per_layer + rest) * 8 // 4)


@pytest.mark.parametrize(
    ("example", "per_element"), [("zero2_offload", 4 + 4 + 2), ("zero3_offload", 4 + 4 + 2 + 2)]
)
def test_offload_says_what_stands_on_the_host(
    example: str, per_element: int, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(EXAMPLES / f"{example}.json"), "--model", str(llama)]
    assert main(["plan", *arguments, "--world-size", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    numel = found["matrix_numel"] + found["rest_numel"]
    assert found["state_on_host"]
    assert found["host_bytes"] == -(-per_element * numel // 4) + found["state_bytes"]
    assert main(["plan", *arguments, "--world-size", "4"]) == 0
    printed = capsys.readouterr().out
    assert "on the host" in printed and "on the device" in printed
    assert main(["plan", *arguments, "--world-size", "4", "--sweep-shard-size"]) == 1
    assert "offload_optimizer" in capsys.readouterr().err


@pytest.mark.parametrize("example", ["stage0", "zero1", "zero2", "zero3", "exchange_broadcast"])
def test_every_stage_is_planned_and_printed(
    example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "load.png"
    arguments = ["--config", str(EXAMPLES / f"{example}.json"), "--model", MODEL]
    assert main(["plan", *arguments, "--world-size", "3", "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "14 x matrix" in printed and "makespan over sum/N" in printed
    assert "built-in Muon" in printed or example in ("stage0", "exchange_broadcast")
    assert plot.stat().st_size > 1000


def test_warnings_name_the_sub_groups_and_the_cap() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
    config = {
        "optimizer": {"type": "DMuon", "params": {"workspace_mb": 4}},
        "zero_optimization": {"stage": 3, "sub_group_size": 1_000_000},
    }
    found, run = preview(read_subject(model, read_config(config)), world_size=4)
    assert len(run.sets) == 2
    assert any("sub_group_size = 1,000,000" in w for w in found.warnings)
    assert any("exceed workspace_mb = 4" in w and "0.weight" in w for w in found.warnings)
    assert max(found.workspace_bytes) > 4 * 2**20


def test_buckets_follow_the_owners_load_and_the_bound_is_printed() -> None:
    with torch.device("meta"):
        model = torch.nn.ModuleList([torch.nn.Linear(64, 64, bias=False) for _ in range(9)])
    config = {"optimizer": {"type": "DMuon"}, "zero_optimization": {"stage": 3}}
    found, _ = preview(read_subject(model, read_config(config)), world_size=4)
    # Nine equal matrices on four ranks: one rank runs three.
    assert found.makespan_over_mean == pytest.approx(3 / (9 / 4))
    mean, largest, shared = found.bound_terms
    assert (largest, shared) == (mean / (9 / 4), 2 * largest)


def test_check_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(EXAMPLES / "zero2.json")]) == 0
    said = "5 Newton-Schulz steps in bfloat16 (fp32 on a CPU without its products), ZeRO stage 2"
    assert said in capsys.readouterr().out
    assert main(["check", str(EXAMPLES / "hf_trainer_zero3.json")]) == 0
    assert "the Trainer fills lr, weight_decay\n" in capsys.readouterr().out
    bad = tmp_path / "bad.json"
    for text, words in (
        ('{"optimizer": {"type": "DMuon", "params": {"momentm": 0.9}}}', "'momentum'"),
        ('{"optimizer": {"type": "AdamW"}}', "'AdamW'"),
        ("{", "not JSON"),
    ):
        bad.write_text(text)
        assert main(["check", str(bad)]) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [(["--model", "nowhere"], "module:callable"), (["--world-size", "0"], "at least 1")],
)
def test_plan_says_what_is_wrong(
    change: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(EXAMPLES / "zero3.json"), "--model", MODEL, "--world-size", "2"]
    assert main(["plan", *arguments, *change]) == 1
    assert words in capsys.readouterr().err


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    config = ["--config", str(EXAMPLES / "zero3.json"), "--model", MODEL, "--json"]
    assert main(["plan", *config, *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_times_are_predicted_from_given_rates_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_json(capsys, "--world-size", "4")["ns_seconds"] is None
    slow = plan_json(capsys, "--world-size", "4", "--tflops", "1", "--gb-per-s", "1")
    fast = plan_json(capsys, "--world-size", "4", "--tflops", "2", "--gb-per-s", "4")
    assert slow["ns_seconds"] == 2 * fast["ns_seconds"] > 0
    rows = {t["optimizer"]: t["seconds"] for t in slow["traffic"]}
    assert rows["DMuon"] - rows["AdamW"] == pytest.approx(slow["exchange_seconds"])
    received = slow["traffic"][1]["exchange_busiest"] * 2 / 1e9
    calls = 2 * slow["num_buckets"] * 10e-6
    assert slow["exchange_seconds"] == pytest.approx(received + calls, rel=0.05)
    assert main(["plan", "--config", "x", "--model", MODEL, "--world-size", "2", "--tflops", "1"])
    assert "both --tflops and --gb-per-s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("legs", "stage", "params", "zero"),
    [
        (1, 1, {}, {}),
        (1, 2, {}, {"contiguous_gradients": False, "offload_optimizer": {"device": "cpu"}}),
        (2, 2, {"reduce_scatter_v": False}, {}),
        (2, 2, {}, {"reduce_scatter": False}),
        (2, 1, {}, {"contiguous_gradients": False}),
        (2, 0, {}, {}),
        (1, 3, {"reduce_scatter_v": False}, {}),
    ],
)
def test_gradients_cost_u_where_they_go_to_their_rank_only(
    legs: int, stage: int, params: dict[str, Any], zero: dict[str, Any]
) -> None:
    config = {
        "optimizer": {"type": "DMuon", "params": params},
        "zero_optimization": {"stage": stage, **zero},
    }
    subject = read_subject(build_model(MODEL), read_config(config))
    _, dmuon, *_ = traffic(subject, count(subject.plan(4, 4)), None)
    assert dmuon.gradients == legs * 3 / 4 * 19371


def test_matrices_are_listed_with_holders_and_owner(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, "--world-size", "2", "--matrices")
    assert len(found["matrices"]) == found["num_matrices"] == 14
    assert {m["owner"] for m in found["matrices"]} == {0, 1}
    assert all(m["holders"] == [0, 1] for m in found["matrices"])


def test_shard_sizes_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, "--world-size", "4", "--sweep-shard-size")
    sizes = found["shard_sizes"]
    assert [(s["shard_size"], s["replicas"]) for s in sizes] == [(1, 4), (2, 2), (4, 1)]
    assert sizes[0]["shard_axis"] == 0.0 == sizes[-1]["replicate_axis"]
    everything = found["matrix_numel"] + found["rest_numel"]
    assert sizes[1]["replicate_axis"] == 2 * (1 / 2) * everything / 2
    dmuon = found["traffic"][1]
    legs = dmuon["gradients"] + dmuon["parameters"] + dmuon["exchange_mean"]
    assert sizes[-1]["shard_axis"] == pytest.approx(legs)
    assert sizes[0]["state_bytes"] > sizes[1]["state_bytes"] > sizes[2]["state_bytes"]
    stage0 = ["--config", str(EXAMPLES / "stage0.json"), "--model", MODEL, "--world-size", "2"]
    assert main(["plan", *stage0, "--sweep-shard-size"]) == 1
    assert "stage 1, 2 or 3" in capsys.readouterr().err


def test_a_shard_size_is_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    def best(*flags: str) -> int | None:
        sizes = plan_json(capsys, "--world-size", "8", "--sweep-shard-size", *flags)["shard_sizes"]
        return next((s["shard_size"] for s in sizes if s["recommended"]), None)

    sizes = plan_json(capsys, "--world-size", "8", "--sweep-shard-size")["shard_sizes"]
    weighted = {s["shard_size"]: s["weighted"] for s in sizes}
    assert best() == min(weighted, key=weighted.get)
    # Rows that stay in a node, and what crosses nodes is dear.
    assert best("--ranks-per-node", "4", "--link-ratio", "100") == 4
    need = {s["shard_size"]: s["state_bytes"] + s["workspace_bytes"] for s in sizes}
    room = ["--memory-gib", str(need[8] * 1.01 / 2**30)]
    assert need[8] < need[4]
    assert best("--ranks-per-node", "4", "--link-ratio", "100", *room) == 8
    assert best("--memory-gib", "1e-9") is None


def test_shard_sizes_hold_what_lifetimes_and_sources_hold() -> None:
    def held(**params: Any) -> dict[int, int]:
        config = json.loads((EXAMPLES / "zero3_hsdp.json").read_text())
        config["optimizer"]["params"].pop("hsdp")
        config["optimizer"]["params"].update(params)
        subject = read_subject(build_model(MODEL), read_config(config))
        sizes = sweep_shard_sizes(subject, world_size=4, cluster=Cluster())
        return {size.shard_size: size.state_bytes for size in sizes}

    base, z2 = held(), held(reshard_after_forward=False)
    owners = held(param_source="owner_broadcast")
    matrices = 15114
    for size in (1, 2, 4):
        assert z2[size] - base[size] == 2 * matrices
        assert owners[size] - base[size] == pytest.approx(2 * matrices / size, abs=1)
    # 16-bit weights, fp32 masters and accumulated gradients, momentum, and AdamW's moments.
    numel, rest = 19371, 19371 - matrices
    expected = (2 + 4 + 4) * numel / 4 + 4 * matrices / 4 + 8 * rest / 4
    assert base[4] == pytest.approx(expected, abs=2)


@pytest.mark.parametrize("publish", ["async", "sync"])
@pytest.mark.parametrize("stage", [2, 3])
def test_hsdp_is_planned_as_configured(
    stage: int, publish: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((EXAMPLES / f"zero{stage}_hsdp.json").read_text())
    config["optimizer"]["params"]["hsdp"] = {"shard_size": 2, "publish": publish}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    arguments = ["plan", "--config", str(path), "--model", MODEL]
    assert main([*arguments, "--world-size", "6", "--matrices", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["world_size"], found["shard_size"]) == (6, 2)
    owners = {m["owner"] for m in found["matrices"]}
    assert len(found["matrices"]) == 14 and owners == set(range(6))
    assert all(h // 2 == m["owner"] // 2 for m in found["matrices"] for h in m["holders"])
    dmuon = found["traffic"][1]
    everything = found["matrix_numel"] + found["rest_numel"]
    assert dmuon["replicate"] == pytest.approx(2 * (2 / 3) * everything / 2)
    momentum = found["matrix_numel"] * 4 / 6
    assert found["state_bytes"] == -(-(momentum + found["rest_numel"] * 8 / 2) // 1)
    assert found["publish_bytes"] >= found["matrix_numel"] / 2 * 2
    assert main([*arguments, "--world-size", "6"]) == 0
    assert "3 replicas of 2" in capsys.readouterr().out
    assert main([*arguments, "--world-size", "3"]) == 1
    assert "shard_size = 2 must divide --world-size 3" in capsys.readouterr().err


def test_tables_show_matrices_and_shard_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(EXAMPLES / "zero2.json"), "--model", MODEL, "--world-size", "2"]
    assert (
        main(
            [
                "plan",
                *arguments,
                "--matrices",
                "--sweep-shard-size",
                "--tflops",
                "1",
                "--gb-per-s",
                "1",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "predicted" in printed and "HSDP" in printed and "gate_proj" in printed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "JSON object"),
        ("{", "not JSON"),
        ('{"optimizer": null}', "optimizer: Field required"),
        ('{"optimizer": "DMuon"}', "optimizer: "),
        ('{"optimizer": {"type": "AdamW"}}', "'AdamW'"),
        ('{"optimizer": {"type": "DMuon", "params": [1]}}', "optimizer.params: "),
        ('{"optimizer": {"type": "DMuon"}, "zero_optimization": {"stage": 7}}', "stage: "),
        ('{"optimizer": {"type": "DMuon"}, "zero_optimization": {"stage": "x"}}', "stage: "),
        (
            '{"optimizer": {"type": "DMuon"}, "zero_optimization": {"sub_group_size": -1}}',
            "sub_group_size must not be negative",
        ),
        ('{"optimizer": {"type": "DMuon"}, "bf16": true}', "bf16: "),
        (
            '{"optimizer": {"type": "DMuon"}, "zero_optimization": '
            '{"stage": 3, "offload_optimizer": {"device": "nvme"}}}',
            "offload_optimizer.device",
        ),
        (
            '{"optimizer": {"type": "DMuon"}, "zero_optimization": '
            '{"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}',
            "offload_optimizer.ratio",
        ),
        (
            '{"optimizer": {"type": "DMuon", "params": {"hsdp": {"shard_size": 2}}}, '
            '"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}',
            "optimizer.params.hsdp",
        ),
        (
            '{"optimizer": {"type": "DMuon", "params": {"param_source": "owner_broadcast"}}, '
            '"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}',
            "optimizer.params.param_source",
        ),
        (
            '{"optimizer": {"type": "DMuon", "params": {"hsdp": {"shard_size": 2}}}, '
            '"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, '
            '"data_types": {"grad_accum_dtype": "fp32"}}',
            "BF16_Optimizer",
        ),
        ('{"optimizer": {"type": "DMuon", "params": {"owner_costs": "none.json"}}}', "none.json"),
        ('{"optimizer": {"type": "DMuon", "params": {"weight_decay": Infinity}}}', "weight_decay"),
        ('{"optimizer": {"type": "DMuon", "params": {"lr": true}}}', "lr: must be a number"),
        (
            '{"optimizer": {"type": "DMuon", "params": {"max_grad_norm": 1.0}}}',
            "gradient_clipping, outside optimizer.params",
        ),
        (
            '{"optimizer": {"type": "DMuon"}, "bf16": {"enabled": true}, '
            '"fp16": {"enabled": true}}',
            "bf16.enabled and fp16.enabled are both true",
        ),
        # What only a start would refuse.
        (
            '{"optimizer": {"type": "DMuon"}, "zero_optimization": '
            '{"stage": 3, "zero_hpz_partition_size": 2}}',
            "does not support hierarchical partitioning (ZeRO++ hpZ)",
        ),
        (
            '{"optimizer": {"type": "DMuon"}, "zero_optimization": {"stage": 2, "no_such": 1}}',
            "no_such",
        ),
    ],
)
def test_both_commands_name_the_key_that_is_wrong(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    for command in (
        ["check", str(path)],
        ["plan", "--config", str(path), "--model", MODEL, "--world-size", "2"],
    ):
        assert main(command) == 1
        error = capsys.readouterr().err
        assert words in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not JSON"),
        (b"\x80\x04\x95", "is not text in UTF-8"),
        (b"[" * 100_000, "is not JSON"),
        (None, "cannot be read: No such file or directory"),
        (b'{"optimizer": {"type": 3}}', "optimizer.type: Input should be a valid string, got 3"),
        (b'{"optimizer": "DMuon"}', 'optimizer: must be an object, got "DMuon"'),
        (b'{"optimizer": {}}', "optimizer.type: Field required"),
        (
            b'{"optimizer": {"type": "DMuon"}, "zero_optimization": {"stage": 2, '
            b'"offload_param": 7}}',
            "zero_optimization.offload_param: must be an object, got 7",
        ),
        (
            b'{"optimizer": {"type": "DMuon"}, "bf16": {"enabled": [1]}}',
            "bf16.enabled: Input should be a valid boolean or Input should be 'auto', got [1]",
        ),
    ],
)
def test_a_file_that_is_none_is_one_clear_line(
    content: bytes | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    if content is not None:
        path.write_bytes(content)
    assert main(["check", str(path)]) == 1
    shown = capsys.readouterr().err
    assert told in shown and shown.count("\n") == 1 and len(shown) < 300, shown
    # Doctor says the same of it.
    [found] = judge_file(path, mock.Mock())
    assert (found.level, found.text) == ("problem", shown.strip().removeprefix("ds_muon check: "))


def test_files_that_tables_and_models_are_read_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes(b"\x80\x04")
    (tmp_path / "costs.json").write_bytes(b"\x80\x04")
    arguments = ["--config", str(EXAMPLES / "zero3.json"), "--world-size", "2"]
    assert main(["plan", *arguments, "--model", str(tmp_path)]) == 1
    assert "that transformers builds a causal language model from" in capsys.readouterr().err
    with pytest.raises(ValueError, match="costs.json is not text in UTF-8"):
        read_owner_costs(str(tmp_path / "costs.json"))


def test_a_plot_that_cannot_be_written_stops_before_the_model_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.png").mkdir()
    arguments = ["--config", "none.json", "--model", "none:none", "--world-size", "2"]
    for plot, words in (
        (tmp_path / "no" / "load.png", "load.png cannot be written: No such file or directory"),
        (tmp_path / "folder.png", "is a folder"),
        (Path("/proc/load.png"), "load.png cannot be written"),
    ):
        assert main(["plan", *arguments, "--plot", str(plot)]) == 1
        assert words in capsys.readouterr().err


def test_without_deepspeed_the_keys_are_checked_and_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ds_muon.zero.inspection", None)
    assert main(["check", str(EXAMPLES / "zero2.json")]) == 0
    shown = capsys.readouterr()
    assert "keys are valid" in shown.out and "DeepSpeed cannot be imported here" in shown.err


NOT_A_MODULE, NOT_CALLABLE = int, 3


def failing() -> torch.nn.Module:
    raise RuntimeError("on purpose")


def only_embeddings() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Embedding(8, 4))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "AttributeError"),
        ("NOT_CALLABLE", "TypeError"),
        ("NOT_A_MODULE", "built int"),
        ("failing", "on purpose"),
    ],
)
def test_a_model_that_cannot_be_built_is_named(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(EXAMPLES / "zero3.json"), "--world-size", "2"]
    assert main(["plan", *arguments, "--model", f"{__name__}:{name}"]) == 1
    error = capsys.readouterr().err
    assert words in error and name in error


def test_a_model_without_matrices_is_planned_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(EXAMPLES / "zero3.json"), "--world-size", "2"]
    model = ["--model", f"{__name__}:only_embeddings"]
    assert main(["plan", *arguments, *model, "--plot", str(tmp_path / "empty.png")]) == 0
    assert "NO matrix is trained with Muon" in capsys.readouterr().out
    assert main(["plan", *arguments, *model, "--plot", str(tmp_path)]) == 1
    assert "must end in" in capsys.readouterr().err


def test_a_measured_table_gives_the_predicted_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8, bias=False) for _ in range(4)])
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"seconds": [[8, 8, 0.5]]}))
    config = {
        "optimizer": {"type": "DMuon", "params": {"owner_costs": str(costs)}},
        "zero_optimization": {"stage": 3},
    }
    found, _ = preview(read_subject(model, read_config(config)), world_size=2)
    assert found.ns_seconds == pytest.approx(1.0)
