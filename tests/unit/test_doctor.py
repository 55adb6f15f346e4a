# SPDX-License-Identifier: Apache-2.0
"""`ds_muon doctor`: every finding is forced by facts that call for it, and by no others."""

from __future__ import annotations

import builtins
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_muon.cli import main
from ds_muon.diagnose import machine as probing
from ds_muon.diagnose.configuration import judge_file
from ds_muon.diagnose.environment import judge
from ds_muon.diagnose.findings import Finding, exit_status
from ds_muon.diagnose.machine import Lock, Machine
from ds_muon.diagnose.show import print_findings
from ds_muon.zero.inspection import foresee, installed

EXAMPLES = Path(__file__).parents[2] / "ds_config_examples"
VERSIONS = {
    "python": "3.11.9",
    "torch": "2.13.0+cpu",
    "deepspeed": "0.19.4",
    "pydantic": "2.14.4",
    "transformers": "5.24.0",
    "accelerate": "1.15.0",
}
HEALTHY = Machine(
    versions=VERSIONS,
    deepspeed_tested=("0.19.0", "0.19.8"),
    accelerator="cpu",
    device_bytes=2**34,
    cpu="a processor",
    cores=8,
    omp_threads="4",
    launcher="/bin/deepspeed",
    compiler="/bin/c++",
    ninja="/bin/ninja",
)
GPU = replace(HEALTHY, accelerator="cuda", devices=8, omp_threads=None)


def test_a_healthy_machine_has_nothing_to_say() -> None:
    for healthy in (HEALTHY, GPU):
        findings = judge(healthy)
        assert {f.level for f in findings} == {"ok"}
        assert exit_status(findings) == 0


def test_low_precision_products_are_one_hint() -> None:
    lacking = judge(replace(HEALTHY, bf16_products=False, fp16_products=False))
    [hint] = [f for f in lacking if f.topic == "products"]
    assert "no bf16 or fp16 products (of avx2" in hint.text


def versions(**other: str | None) -> dict[str, Any]:
    return {"versions": {**VERSIONS, **other}}


CASES: dict[str, tuple[Machine, dict[str, Any], str, str]] = {
    "no torch": (HEALTHY, versions(torch=None), "problem", "torch is not installed: pip install"),
    "old deepspeed": (HEALTHY, versions(deepspeed="0.18.9"), "problem", "at least 0.19.0"),
    "new deepspeed": (
        HEALTHY,
        versions(deepspeed="0.20.1"),
        "hint",
        "deepspeed 0.20.1; tested with 0.19.0 to 0.19.8",
    ),
    "old python": (HEALTHY, versions(python="3.9.2"), "problem", "python 3.9.2 is too old"),
    "new torch": (HEALTHY, versions(torch="2.14.1"), "hint", "torch 2.14.1; tested with 2.13"),
    "no transformers": (HEALTHY, versions(transformers=None), "ok", "models of Hugging Face"),
    "no seams": (
        HEALTHY,
        {"missing_seams": ("DeepSpeedEngine._gone: hooked",)},
        "problem",
        "lacks DeepSpeedEngine._gone: hooked; install one of 0.19.0, 0.19.8",
    ),
    "no deepspeed": (
        HEALTHY,
        {"deepspeed_error": "ImportError: gone"},
        "problem",
        "cannot be imported: ImportError: gone",
    ),
    "autoload off": (
        HEALTHY,
        {"registers": False, "autoload": "0"},
        "hint",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading ds_muon: `import ds_muon`",
    ),
    "not a package": (HEALTHY, {"registers": False}, "hint", "not installed as a package"),
    "no optimizer": (
        HEALTHY,
        {"unresolved": "RuntimeError: lost"},
        "problem",
        "torch.optim.DMuon: RuntimeError: lost",
    ),
    "no device": (GPU, {"devices": 0}, "problem", "finds no device"),
    "no launcher": (HEALTHY, {"launcher": None}, "problem", "`deepspeed` launcher is not beside"),
    "no bf16": (
        HEALTHY,
        {"bf16_products": False, "cpu_flags": frozenset({"avx2"})},
        "hint",
        "no bf16 products (of avx2, avx512f, avx512_bf16, avx512_fp16, amx_bf16, amx_fp16 it has "
        "avx2): recipes in bf16 compute in fp32 here unless ns_dtype is set",
    ),
    "no fp16": (HEALTHY, {"fp16_products": False}, "hint", "no fp16 products"),
    "threads unset": (
        HEALTHY,
        {"omp_threads": None},
        "hint",
        "every rank on this machine uses all 8 cores",
    ),
    "too many threads": (HEALTHY, {"omp_threads": "9"}, "hint", "more than the 8 cores"),
    "bad threads": (HEALTHY, {"omp_threads": "all"}, "problem", "OMP_NUM_THREADS=all is not"),
    "stale lock": (
        HEALTHY,
        {"locks": (Lock(path="/x/lock", age=7200.0),)},
        "problem",
        "/x/lock is 120 minutes old: a compilation was interrupted",
    ),
    "young lock": (
        HEALTHY,
        {"locks": (Lock(path="/x/lock", age=30.0),)},
        "hint",
        "is being compiled",
    ),
    "no compiler": (
        HEALTHY,
        {"compiler": None, "ninja": None},
        "problem",
        "a C++ compiler and ninja not found",
    ),
    "no ninja on a GPU": (GPU, {"ninja": None}, "hint", "ninja not found"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fact_brings_its_finding(name: str) -> None:
    machine, change, level, text = CASES[name]
    before, after = judge(machine), judge(replace(machine, **change))
    [found] = [f for f in after if text in f.text]
    assert found.level == level
    assert not any(text in f.text for f in before)
    assert exit_status(after) == (1 if level == "problem" else 0)


def judged(tmp_path: Path, machine: Machine = GPU, **config: Any) -> list[Finding]:
    path = tmp_path / "ds_config.json"
    params = config.pop("params", {})
    content = {"optimizer": {"type": "DMuon", "params": params}, **config}
    path.write_text(json.dumps(content))
    return judge_file(path, machine)


ZERO1, ZERO2, ZERO3 = ({"zero_optimization": {"stage": s}} for s in (1, 2, 3))
BF16 = {"bf16": {"enabled": True}}
# What brings a hint, what does not, and the hint.
HINTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "reduce bucket": (
        {"zero_optimization": {"stage": 2, "overlap_comm": True}},
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1e6}},
        "reduce_bucket_size = 5e+08 elements: up to 3.73 GiB of gradients on their way in two",
    ),
    "gather bucket": (
        ZERO1,
        {"zero_optimization": {"stage": 1, "allgather_bucket_size": 1000}},
        "allgather_bucket_size = 5e+08",
    ),
    "live": ({**ZERO3, **BF16}, ZERO2, "stage3_max_live_parameters = 1e+09: up to 1.86 GiB"),
    "persistent": (
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1e7}},
        ZERO3,
        "never freed, matrices too",
    ),
    "accumulation": (
        {**ZERO2, **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
        {**ZERO2, **BF16},
        "a partition's gradients take 4 bytes",
    ),
    "accumulation of all": (
        {**ZERO1, **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
        ZERO1,
        "the whole model's gradients",
    ),
    "all-reduce": (
        {**ZERO2, "params": {"reduce_scatter_v": False}},
        ZERO2,
        "reduce_scatter_v is false: DeepSpeed's own reduction",
    ),
    "all-reduce of whole buckets": (
        {"zero_optimization": {"stage": 1, "contiguous_gradients": False}},
        {"zero_optimization": {"stage": 3, "contiguous_gradients": False}},
        "contiguous_gradients is false: DeepSpeed's own reduction",
    ),
    "gather": (ZERO2, {**ZERO2, "params": {"hide_param_gather": True}}, "hide_param_gather is"),
    "sub-groups": (
        {"zero_optimization": {"stage": 3, "sub_group_size": 1e6}},
        ZERO3,
        "sub_group_size = 1e+06",
    ),
    "workspace": (
        {"params": {"max_inflight_buckets": 2, "workspace_mb": 64}},
        {},
        "workspace_mb = 64: exchange (3 sets of buffers)",
    ),
    "Z2": (
        {**ZERO3, "params": {"reshard_after_forward": False}},
        {**ZERO3, "params": {"reshard_after_forward": True}},
        "is false (Z2)",
    ),
    "owners": (
        {**ZERO3, "params": {"param_source": "owner_broadcast"}},
        ZERO3,
        "owners keep their matrices packed",
    ),
    "communicators": (
        {**ZERO2, "params": {"hsdp": {"shard_size": 4}, "hide_param_gather": True}},
        {},
        "5 communicator(s)",
    ),
    "publish async": ({**ZERO2, "params": {"hsdp": {"shard_size": 4}}}, {}, "publish async"),
    "publish sync": (
        {**ZERO2, "params": {"hsdp": {"shard_size": 4, "publish": "sync"}}},
        {},
        "hsdp.publish sync: every step waits",
    ),
    "exchange": ({"params": {"exchange": "p2p"}}, {}, 'exchange = "p2p": auto takes'),
    "overlap": ({}, {"params": {"max_inflight_buckets": 2}}, "max_inflight_buckets = 1"),
    "reallocation": ({"params": {"preallocate_workspace": False}}, {}, "allocates its working"),
    "verify": ({"params": {"verify_every": 1}}, {"params": {"verify_every": 9}}, "verify_every ="),
}


@pytest.mark.parametrize("name", HINTS)
def test_a_setting_brings_its_hint(name: str, tmp_path: Path) -> None:
    with_it, without, text = HINTS[name]
    [found] = [f for f in judged(tmp_path, **with_it) if text in f.text]
    assert found.level == "hint"
    quiet = judged(tmp_path, **without)
    assert not any(text in f.text for f in quiet)
    assert exit_status(quiet) == 0


def test_products_of_this_cpu(tmp_path: Path) -> None:
    slow = replace(HEALTHY, bf16_products=False)
    for machine, params, text in (
        (slow, {"ns_dtype": "bf16"}, 'ns_dtype = "bf16" is emulated on this CPU'),
        (slow, {"recipe": "torch"}, "10 to 100 times slower"),
    ):
        assert any(text in f.text for f in judged(tmp_path, machine, params=params))
        for other in (HEALTHY, GPU):
            assert not any(text in f.text for f in judged(tmp_path, other, params=params))
        exact = {**params, "ns_dtype": "fp32"}
        assert not any(text in f.text for f in judged(tmp_path, machine, params=exact))
    assert any("16-bit forward" in f.text for f in judged(tmp_path, slow, **BF16))


PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "DMuon's key": ({"params": {"momentun": 0.9}}, "did you mean 'momentum'?"),
    "stage": ({"params": {"hide_param_gather": True}}, "use stage 1 or 2"),
    "unknown ZeRO key": ({"zero_optimization": {"stage": 2, "no_such": 1}}, "no_such"),
    "two precisions": ({**BF16, "fp16": {"enabled": True}}, "are both true"),
    "hpZ": (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        "hierarchical partitioning (ZeRO++ hpZ)",
    ),
    "elastic": (
        {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
        "elastic checkpoints (zero_optimization.elastic_checkpoint); set it to false",
    ),
    "autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        "torch autocast (torch_autocast.enabled)",
    ),
    "ulysses": ({"sequence_parallel_size": 2}, "sequence parallelism"),
    "compile": ({**ZERO3, "compile": {"deepcompile": True}}, "DeepCompile"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_a_start_would_refuse_is_a_problem(name: str, tmp_path: Path) -> None:
    config, text = PROBLEMS[name]
    findings = judged(tmp_path, **config)
    assert any(text in f.text for f in findings if f.level == "problem"), findings
    assert exit_status(findings) == 1


def test_examples_and_auto_values_have_no_problem(tmp_path: Path) -> None:
    for path in sorted(EXAMPLES.glob("*.json")):
        assert exit_status(judge_file(path, GPU)) == 0, path
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    assert exit_status(judged(tmp_path, **auto)) == 0
    assert foresee({"train_batch_size": 4096, "train_micro_batch_size_per_gpu": 2}).error is None


def test_the_probes_read_this_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "py311_cpu" / "op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 5000, time.time() - 5000))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "executable", sys.executable)
    found = probing.probe_machine()
    assert [(item.path, round(item.age, -2)) for item in found.locks] == [(str(lock), 5000.0)]
    assert (found.omp_threads, found.autoload, found.compiler) == ("3", "0", None)
    assert found.registers is False
    assert found.unresolved == ""
    assert found.deepspeed_error is None
    assert found.missing_seams == ()
    assert found.versions["deepspeed"] == installed().version
    assert found.accelerator == "cpu"
    assert found.device_bytes > 2**28
    assert found.launcher == str(Path(sys.executable).parent / "deepspeed")


def test_the_command_prints_json_and_exits_by_problems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ds_muon.commands.doctor.probe_machine", lambda: GPU)
    config = str(EXAMPLES / "zero3.json")
    assert main(["doctor", "--config", config, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["status"] == 0
    assert {f["topic"] for f in shown["findings"]} >= {"versions", "config", "memory"}
    broken = replace(GPU, deepspeed_error="ImportError: gone")
    monkeypatch.setattr("ds_muon.commands.doctor.probe_machine", lambda: broken)
    assert main(["doctor", "--config", config]) == 1
    assert "1 problem(s)" in capsys.readouterr().out
    monkeypatch.setattr("ds_muon.commands.doctor.probe_machine", lambda: GPU)
    assert main(["doctor", "--config", str(tmp_path / "none.json")]) == 1


def test_it_prints_without_rich_and_takes_paths_for_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [
        Finding(topic="building", level="problem", text="/a[bold]/lock is old"),
        Finding(topic="versions", level="ok", text="fine"),
    ]
    print_findings(findings)
    assert "/a[bold]/lock is old" in capsys.readouterr().out
    real = builtins.__import__

    def without_rich(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    print_findings(findings)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "versions", "fine"]
    assert lines[1].split()[:3] == ["problem", "building", "/a[bold]/lock"]
    assert lines[2] == "1 problem(s), 0 hint(s)"
