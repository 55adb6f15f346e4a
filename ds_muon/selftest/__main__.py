# SPDX-License-Identifier: Apache-2.0
"""One rank of `ds_muon selftest`, started by deepspeed or torchrun."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from datetime import timedelta

import deepspeed
import torch

from ds_muon.selftest.session import run

# A rank that failed leaves the others in a collective for so long.
_TIMEOUT = timedelta(minutes=2)


def main() -> int:
    """Join the world, run the parts, print the verdict on rank 0; returns the exit status."""
    parser = argparse.ArgumentParser(prog="ds_muon.selftest")
    parser.add_argument("--only", help="a glob of parts")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    args = parser.parse_args()
    _quieten()
    deepspeed.init_distributed(timeout=_TIMEOUT, verbose=False)
    report = run(args.only)
    if torch.distributed.get_rank() == 0:
        print(report.verdict(), flush=True)
    torch.distributed.destroy_process_group()
    return report.exit_status


def _quieten() -> None:
    """Leave the terminal to the parts: a dozen engines start here."""
    deepspeed.logger.setLevel(logging.WARNING)
    # A logger that is configured says warnings only.
    logging.getLogger("ds_muon").addHandler(logging.NullHandler())
    warnings.simplefilter("ignore", FutureWarning)


if __name__ == "__main__":
    sys.exit(main())
