# SPDX-License-Identifier: Apache-2.0
"""`ds_muon doctor`: arguments."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from ds_muon.diagnose.environment import judge
from ds_muon.diagnose.findings import exit_status
from ds_muon.diagnose.machine import probe_machine
from ds_muon.diagnose.show import print_findings, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--config", type=Path, help="also judge this ds_config.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 1 if there is a problem, else 0."""
    # DeepSpeed's log goes to where stdout is when it is imported; the result has that to itself.
    with contextlib.redirect_stdout(sys.stderr):
        machine = probe_machine()
        findings = judge(machine)
        if args.config is not None and machine.deepspeed_error is None:
            from ds_muon.diagnose.configuration import judge_file

            findings += judge_file(args.config, machine)
    (print_json if args.json else print_findings)(findings)
    return exit_status(findings)
