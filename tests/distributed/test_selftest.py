# SPDX-License-Identifier: Apache-2.0
"""`ds_muon selftest`: it passes here, and says what is broken where something is."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ds_muon.run.step
from ds_muon.cli import main
from ds_muon.optimizer import MatrixOwnerOptimizer
from ds_muon.selftest import __main__ as program
from ds_muon.selftest import reference, session, training
from ds_muon.selftest.parts import parts_for
from tests.harness import ranks

ROOT = Path(__file__).parents[2]


def other_rank() -> bool:
    return torch.distributed.get_rank() == 1


@contextlib.contextmanager
def broken(what: str) -> Iterator[None]:
    """Break one thing in this process."""
    if what == "Newton-Schulz":
        real = ds_muon.run.step.orthogonalize_into

        def longer(*args: Any, **kwargs: Any) -> Any:
            return real(*args, **kwargs).mul_(1.001)

        with mock.patch.object(ds_muon.run.step, "orthogonalize_into", longer):
            yield
    elif what == "one rank":
        step = MatrixOwnerOptimizer.step

        def nudged(self: Any, closure: None = None) -> None:
            step(self, closure)
            if other_rank() and self.binding is not None:
                with torch.no_grad():
                    self.binding.leaf_sets[0][0].view(-1)[0] += 1e-6

        with mock.patch.object(MatrixOwnerOptimizer, "step", nudged):
            yield
    elif what == "one exchange":
        start = training.start

        def start_other(stage: int, **params: Any) -> Any:
            wrong = {"lr": 0.0101} if params.get("exchange") == "p2p" else {}
            return start(stage, **params, **wrong)

        with mock.patch.object(training, "start", start_other):
            yield
    elif what == "loading":
        with mock.patch.object(MatrixOwnerOptimizer, "load_state_dict", lambda *_: None):
            yield
    elif what == "DeepSpeed":
        with mock.patch.object(training, "start", mock.Mock(side_effect=RuntimeError("no engine"))):
            yield
    else:
        yield


def run_session(only: str, what: str = "") -> tuple[int, str, tuple[str, ...]]:
    """Run on a rank: status, verdict and lines."""
    with broken(what):
        report = session.run(only)
    return report.exit_status, report.verdict(), tuple(o.line() for o in report.outcomes)


@pytest.mark.parametrize(
    ("only", "told"),
    [
        ("stage ?", "update error: matrices"),
        ("stage 2, [be]*", "same bits by all_to_all, all_gather, broadcast, p2p; up to"),
        ("stage 3, [Hc]*", "saved, loaded, continued with the same bits"),
    ],
)
def test_it_passes_here(only: str, told: str) -> None:
    out = ranks.run(2, run_session, only=only)
    # Only rank 0's text is shown; status and verdict, but for the time, are everybody's.
    assert [o[0] for o in out] == [0, 0]
    assert all(o[1].startswith("PASS: ") and "2 rank(s) of cpu" in o[1] for o in out)
    assert told in out[0][2][-1]
    assert all(line.startswith("ok ") for line in out[0][2])


@pytest.mark.parametrize(
    ("what", "only", "told"),
    [
        ("Newton-Schulz", "stage 1", "stage 1 (matrices: update off by"),
        ("one rank", "stage 0", "stage 0 (ranks [1] hold other bits than rank 0)"),
        ("one exchange", "stage 3, exchanges", "stage 3, exchanges (strategies give other bits"),
        ("loading", "stage 1, checkpoint", "stage 1, checkpoint (training that was resumed has"),
        ("DeepSpeed", "stage 2", "stage 2 (RuntimeError: no engine)"),
    ],
)
def test_it_says_what_is_broken(what: str, only: str, told: str) -> None:
    out = ranks.run(2, run_session, only=only, what=what)
    assert [o[0] for o in out] == [1, 1]
    for _, verdict, lines in out:
        assert verdict.startswith("FAIL: 1 of 1 parts on 2 rank(s)")
        assert told in verdict
        assert lines[0].startswith("FAIL")


def test_its_parts_follow_the_number_of_ranks() -> None:
    names = {world: {p.name for p in parts_for(world)} for world in (1, 2, 3)}
    assert names[2] - names[3] == {"stage 2, HSDP", "stage 3, HSDP"}
    assert names[3] - names[1] == {"stage 2, exchanges", "stage 3, exchanges"}
    assert names[1] >= {"stage 0", "stage 1", "stage 2", "stage 3", "stage 3, checkpoint"}


def test_its_reference_is_on_its_own() -> None:
    source = Path(reference.__file__).read_text()
    assert "import ds_muon" not in source and "from ds_muon" not in source
    # Jordan's quintic takes the singular values of a well-conditioned matrix to 0.68 .. 1.14.
    matrix = torch.randn(9, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(reference.polar(matrix))
    assert values.min() > 0.65 and values.max() < 1.21


def test_the_command_launches_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ds_muon", "selftest", "--ranks", "2", "--only", "stage 2"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: 1 parts in" in done.stdout
    assert "on 2 rank(s) of cpu" in done.stdout


def run_main(what: str) -> tuple[int, str]:
    """Run on a rank: exit status and last line of the rank's program, in a world that exists."""
    shown = io.StringIO()
    with (
        broken(what),
        mock.patch.object(sys, "argv", ["selftest", "--local_rank=0", "--only", "stage 1"]),
        mock.patch.object(program, "_quieten"),
        mock.patch.object(torch.distributed, "destroy_process_group"),
        contextlib.redirect_stdout(shown),
    ):
        status = program.main()
    return status, shown.getvalue().splitlines()[-1] if shown.getvalue() else ""


@pytest.mark.parametrize(("what", "status", "verdict"), [("", 0, "PASS"), ("DeepSpeed", 1, "FAIL")])
def test_a_ranks_program_exits_by_the_verdict(what: str, status: int, verdict: str) -> None:
    out = ranks.run(2, run_main, what=what)
    assert [o[0] for o in out] == [status, status]
    assert out[0][1].startswith(f"{verdict}: ")
    assert out[1][1] == ""


def test_a_glob_that_matches_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--ranks", "2", "--only", "stage 9"]) == 1
    assert "--only 'stage 9' matches none of 'stage 0'" in capsys.readouterr().err


@pytest.mark.parametrize("ranks_asked", ["0", "-1"])
def test_no_ranks_are_an_error(ranks_asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(subprocess, "run") as launched:
        assert main(["selftest", "--ranks", ranks_asked]) == 1
    assert not launched.called
    assert f"--ranks must be at least 1, got {ranks_asked}" in capsys.readouterr().err
