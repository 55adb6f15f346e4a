# SPDX-License-Identifier: Apache-2.0
"""`ds_muon check`: whether a run would start with a ds_config.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ds_muon.diagnose.acceptance import require_accepted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("config", type=Path)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    examined = require_accepted(args.config)
    found, spec = examined.read, examined.spec
    config, stage = found.params, found.zero_optimization.stage
    dtype = str(spec.compute_dtype).removeprefix("torch.")
    if config.ns_dtype is None and not spec.native_products:
        dtype += " (fp32 on a CPU without its products)"
    filled = ", ".join(found.filled_by_trainer)
    print(
        f"{args.config}: DMuon's keys are valid; recipe {config.recipe}, {len(spec.triples)} "
        f"Newton-Schulz steps in {dtype}, ZeRO stage {stage}, exchange {config.exchange}"
        + (f"; the Trainer fills {filled}" if filled else "")
    )
    for glob, rule in config.split.items():
        [(kind, value)] = rule.items()
        print(f"  split {glob}: {kind} {json.dumps(value)}")
    if config.per_head_muon:
        print("  per_head_muon: queries, keys and values one matrix per head")
    return 0
