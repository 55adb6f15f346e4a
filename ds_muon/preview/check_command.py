# SPDX-License-Identifier: Apache-2.0
"""`ds_muon check`: whether optimizer.params of a ds_config.json is valid."""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_muon.ortho.recipes import resolve
from ds_muon.planning import read_owner_costs
from ds_muon.preview.config_file import read_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("config", type=Path)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    found = read_config(args.config)
    config, stage = found.params, found.zero_optimization.stage
    spec = resolve(config)
    if config.owner_costs is not None:
        read_owner_costs(config.owner_costs)
    dtype = str(spec.compute_dtype).removeprefix("torch.")
    print(
        f"{args.config}: DMuon's keys are valid; recipe {config.recipe}, {len(spec.triples)} "
        f"Newton-Schulz steps in {dtype}, ZeRO stage {stage}, exchange {config.exchange}"
    )
    return 0
