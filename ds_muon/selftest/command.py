# SPDX-License-Identifier: Apache-2.0
"""`ds_muon selftest`: launch ranks on this machine."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--ranks", type=int, help="default: one per device; 2 on a CPU, 4 show more of HSDP"
    )
    parser.add_argument("--only", help="run the parts whose name matches this glob")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the launcher's exit status, 0 if everything held."""
    from deepspeed.accelerator import get_accelerator

    from ds_muon.selftest.session import choose

    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    default = 2 if on_cpu else accelerator.device_count()
    ranks = default if args.ranks is None else args.ranks
    if ranks < 1:
        raise ValueError(f"--ranks must be at least 1, got {ranks}")
    choose(ranks, args.only)
    environment = dict(os.environ)
    if on_cpu:
        cores = len(os.sched_getaffinity(0))
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    command += ["--num_gpus", str(ranks), "--master_port", str(_free_port())]
    command += ["--log_level", "warning"]
    command += ["--module", "ds_muon.selftest"]
    command += ["--only", args.only] if args.only else []
    return subprocess.run(command, env=environment, check=False).returncode


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("", 0))
        return listening.getsockname()[1]
