# SPDX-License-Identifier: Apache-2.0
"""`ds_muon selftest`: is training exact on these devices?"""

from __future__ import annotations

import argparse

from ds_muon.selftest.launch import launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--ranks", type=int, help="default: one per device; 2 on a CPU, 4 show more of HSDP"
    )
    parser.add_argument("--only", help="run the parts whose name matches this glob")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the launcher's exit status, 0 if everything held."""
    return launch(args.ranks, args.only)
