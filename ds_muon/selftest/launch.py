# SPDX-License-Identifier: Apache-2.0
"""Launch: start the ranks of a self-test with the deepspeed launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from deepspeed.accelerator import get_accelerator

from ds_muon.selftest.session import choose


def launch(ranks: int | None, only: str | None) -> int:
    """Run the parts that `only` matches on this machine.

    Args:
        ranks: None: one per device, 2 on a CPU.
        only: a glob of parts' names; None: all.

    Returns:
        The launcher's exit status, 0 if everything held.

    Raises:
        ValueError: there are no such ranks, or no such parts.
    """
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    if ranks is None:
        ranks = 2 if on_cpu else accelerator.device_count()
    if ranks < 1:
        raise ValueError(f"--ranks must be at least 1, got {ranks}")
    choose(ranks, only)
    environment = dict(os.environ)
    if on_cpu:
        cores = len(os.sched_getaffinity(0))
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    command += ["--num_gpus", str(ranks), "--master_port", str(_free_port())]
    command += ["--log_level", "warning"]
    command += ["--module", "ds_muon.selftest"]
    command += ["--only", only] if only else []
    return subprocess.run(command, env=environment, check=False).returncode


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("", 0))
        return listening.getsockname()[1]
