# SPDX-License-Identifier: Apache-2.0
"""Command line: which module has which command.

Only the command that runs is imported, so that one command's dependencies are nobody else's: the
doctor has to work where they are broken.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

# Each module has add_arguments(parser) and run(args) -> exit status.
COMMANDS = {
    "plan": ("ds_muon.preview.plan_command", "what a run would do: routing, owners, traffic"),
    "check": ("ds_muon.preview.check_command", "validate optimizer.params of a ds_config.json"),
    "doctor": ("ds_muon.diagnose.command", "what is wrong, slow or large on this machine"),
    "to-universal": (
        "ds_muon.zero.checkpoint.command",
        "write a checkpoint in DeepSpeed's universal format",
    ),
    "selftest": ("ds_muon.selftest.command", "is training exact on these devices?"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="ds_muon", description="Exact Muon for DeepSpeed.")
    commands = parser.add_subparsers(dest="command", required=True)
    command: Any = None
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if given[:1] == [name]:
            try:
                command = importlib.import_module(module)
            except ImportError as error:
                print(f"ds_muon {name}: {error}", file=sys.stderr)
                return 1
            command.add_arguments(sub)
    args = parser.parse_args(given)
    try:
        return command.run(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"ds_muon {args.command}: {error}", file=sys.stderr)
        return 1
