# SPDX-License-Identifier: Apache-2.0
"""Command line: finds and runs a command of commands/.

Only the command that runs is imported, so that one command's dependencies are nobody else's: the
doctor has to work where they are broken.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

# Each has a module in commands/.
COMMANDS = {
    "plan": "what a run would do: routing, owners, traffic",
    "check": "would a run start with this ds_config.json?",
    "doctor": "what is wrong, slow or large on this machine",
    "to-universal": "write a checkpoint in DeepSpeed's universal format",
    "selftest": "is training exact on these devices?",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="ds_muon", description="Exact Muon for DeepSpeed.")
    commands = parser.add_subparsers(dest="command", required=True)
    command: Any = None
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if given[:1] == [name]:
            try:
                command = importlib.import_module(f"ds_muon.commands.{name.replace('-', '_')}")
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
