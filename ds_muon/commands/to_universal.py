# SPDX-License-Identifier: Apache-2.0
"""`ds_muon to-universal`: a checkpoint in DeepSpeed's universal format."""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_muon.zero.checkpoint.convert import to_universal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("checkpoint", type=Path, help="a tag folder, or the folder with `latest`")
    parser.add_argument("output", type=Path, help="a new folder, which becomes a tag of its parent")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    written = to_universal(args.checkpoint, args.output)
    print(
        f"{args.output}: {written} parameters, each with its states; load it with "
        f'"checkpoint": {{"load_universal": true}} from {args.output.parent}'
    )
    return 0
