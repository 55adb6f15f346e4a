# SPDX-License-Identifier: Apache-2.0
"""Ranks: real gloo processes, started once per world size and reused by every test.

`run(world_size, fn, ...)` calls fn(**kwargs) on every rank and returns the ranks' results. A rank
that raises, or a rank that does not answer in time, ends the test with its traceback or its name,
and the pool of that size is started anew for the next test.
"""

from __future__ import annotations

import atexit
import gc
import io
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

# Ranks share a few cores: OpenMP threads that wait must not spin, or ranks with several crawl.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "deepspeed", "tests.harness.training"])
# The rendezvous and every collective of a test; a hang surfaces as a time-out of the test.
_COLLECTIVE_TIMEOUT = timedelta(seconds=60)


class RankPool:
    """`world_size` processes that run one function after another."""

    def __init__(
        self, world_size: int, *, collective_timeout: timedelta = _COLLECTIVE_TIMEOUT
    ) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        rendezvous = os.path.join(self._folder.name, "store")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            here, there = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve,
                args=(there, rank, world_size, rendezvous, collective_timeout),
                daemon=True,
            )
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def run(
        self,
        fn: Callable[..., Any],
        kwargs: dict[str, Any],
        *,
        timeout_s: float,
        threads: int,
        deaths: bool = False,
    ) -> list[Any]:
        """Run `fn` on all ranks; raises AssertionError naming the rank that failed or hung.

        With `deaths` a rank's process may end; its result is None.
        """
        test = os.environ.get("PYTEST_CURRENT_TEST", fn.__name__)
        for end in self._ends:
            end.send((fn, kwargs, threads))
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            waiting = [r for r in range(self.world_size) if r not in results]
            ready = multiprocessing.connection.wait(
                [self._ends[r] for r in waiting], timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise AssertionError(f"{test}: ranks {waiting} did not answer in {timeout_s} s")
            for rank in waiting:
                if self._ends[rank] in ready:
                    ok, payload = _receive(self._ends[rank])
                    if not ok and payload is None and deaths:
                        results[rank] = None
                    elif not ok:
                        payload = payload or "the process ended without an answer"
                        raise AssertionError(f"{test}: rank {rank} of {self.world_size}\n{payload}")
                    else:
                        results[rank] = payload
        return [results[rank] for rank in range(self.world_size)]

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


_POOLS: dict[int, RankPool] = {}


def run(
    world_size: int,
    fn: Callable[..., Any],
    *,
    timeout_s: float = 300.0,
    threads: int = 1,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(**kwargs)` on `world_size` ranks and return their results in rank order.

    The first run in a new environment waits for DeepSpeed to compile an operator; a hang in a
    collective ends sooner, by its own time-out.
    """
    if world_size not in _POOLS:
        _POOLS[world_size] = RankPool(world_size)
    try:
        return _POOLS[world_size].run(fn, kwargs, timeout_s=timeout_s, threads=threads)
    except BaseException:
        _POOLS.pop(world_size).kill()
        raise


@atexit.register
def _kill_all() -> None:
    while _POOLS:
        _POOLS.popitem()[1].kill()


def run_with_deaths(
    world_size: int, fn: Callable[..., Any], *, collective_timeout: timedelta, **kwargs: Any
) -> list[Any]:
    """Run `fn(**kwargs)` on ranks of their own, some of which end their process: None."""
    pool = RankPool(world_size, collective_timeout=collective_timeout)
    timeout_s = 200.0
    try:
        return pool.run(fn, kwargs, timeout_s=timeout_s, threads=1, deaths=True)
    finally:
        pool.kill()


def die() -> None:
    """End this rank's process at once, as a crash does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _receive(end: Connection) -> tuple[bool, Any]:
    """What a rank sent; (False, None) where its process ended instead."""
    try:
        ok, data = end.recv()
    except (EOFError, ConnectionResetError):
        return False, None
    return ok, torch.load(io.BytesIO(data), weights_only=False) if ok else data


def _serve(
    end: Connection, rank: int, world_size: int, rendezvous: str, collective_timeout: timedelta
) -> None:
    import deepspeed

    warnings.simplefilter("ignore")
    os.environ.update(
        DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size)
    )
    # DeepSpeed refuses fp16 on a CPU without fp16 products; here it only needs to be right.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    # The built-in Muon compiles its iteration for every shape, which takes longer than a test.
    torch._dynamo.config.disable = True
    deepspeed.logger.setLevel("WARNING")
    deepspeed.init_distributed(
        dist_backend="gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=collective_timeout,
        auto_mpi_discovery=False,
        verbose=False,
    )
    runs = 0
    while True:
        if runs < 2:
            # DeepSpeed collects garbage in every start of an engine; what is imported by then, the
            # last of it in the first run, need not be looked at again.
            gc.collect()
            gc.freeze()
        runs += 1
        try:
            fn, kwargs, threads = end.recv()
        except EOFError:
            return
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        try:
            buffer = io.BytesIO()
            torch.save(fn(**kwargs), buffer)
            end.send((True, buffer.getvalue()))
        except BaseException:
            end.send((False, traceback.format_exc()))
