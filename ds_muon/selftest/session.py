# SPDX-License-Identifier: Apache-2.0
"""Session: run the parts on all ranks, show progress on rank 0, and agree on a verdict."""

from __future__ import annotations

import fnmatch
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

from ds_muon.comm.transport import Transport
from ds_muon.selftest.parts import ComparisonError, Part, parts_for
from ds_muon.zero.transport import DeepSpeedTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one part.

    Attributes:
        problems: what each rank that failed says; none: it passed.
        text: what rank 0 measured.
    """

    name: str
    problems: tuple[str, ...]
    text: str
    seconds: float

    def line(self) -> str:
        """One line for the terminal."""
        verdict = "FAIL" if self.problems else "ok"
        return f"{verdict:4} {self.seconds:6.1f} s  {self.name}: {self.problems or self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of all parts; the same on every rank."""

    outcomes: tuple[Outcome, ...]
    where: str

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The parts that did not hold."""
        return tuple(o for o in self.outcomes if o.problems)

    @property
    def exit_status(self) -> int:
        """0 if everything held."""
        return int(bool(self.failed))

    def verdict(self) -> str:
        """The last line."""
        seconds = sum(o.seconds for o in self.outcomes)
        if not self.failed:
            return f"PASS: {len(self.outcomes)} parts in {seconds:.0f} s on {self.where}"
        named = "; ".join(f"{o.name} ({o.problems[0]})" for o in self.failed)
        return f"FAIL: {len(self.failed)} of {len(self.outcomes)} parts on {self.where}: {named}"


def choose(world_size: int, only: str | None) -> tuple[Part, ...]:
    """The parts whose name matches a glob.

    Raises:
        ValueError: there are none.
    """
    parts = parts_for(world_size)
    chosen = tuple(p for p in parts if only is None or fnmatch.fnmatchcase(p.name, only))
    if not chosen:
        names = ", ".join(repr(p.name) for p in parts)
        raise ValueError(f"--only {only!r} matches none of {names}")
    return chosen


def run(only: str | None = None) -> Report:
    """Run the parts; every rank of an initialised world calls this."""
    transport = DeepSpeedTransport("selftest")
    chosen = choose(transport.world_size, only)
    outcomes = []
    talks = transport.rank == 0
    with tqdm(total=len(chosen), unit="part", disable=None if talks else True) as bar:
        for part in chosen:
            bar.set_description(part.name)
            outcomes.append(_outcome(part, transport))
            bar.update()
            if talks:
                bar.write(outcomes[-1].line(), file=sys.stdout)
    device = get_accelerator().device_name()
    where = (
        f"{transport.world_size} rank(s) of {device}, deepspeed {deepspeed.__version__}, "
        f"torch {torch.__version__}"
    )
    return Report(outcomes=tuple(outcomes), where=where)


def _outcome(part: Part, transport: Transport) -> Outcome:
    started = time.perf_counter()
    text, problem = "", None
    try:
        text = part.run(transport)
    except ComparisonError as failed:
        problem = str(failed)
    except Exception as error:  # whatever goes wrong in a library below
        # Other ranks may be in a collective until it times out; the cause is shown before.
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}"
    told: Sequence[str | None] = transport.all_gather_object(problem)
    problems = dict.fromkeys(p for p in told if p is not None)
    return Outcome(
        name=part.name,
        problems=tuple(problems),
        text=text,
        seconds=time.perf_counter() - started,
    )
