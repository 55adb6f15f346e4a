# SPDX-License-Identifier: Apache-2.0
"""Acceptance: whether a run would start with a ds_config.json, as far as the file alone says.

Owns: the one answer of `ds_muon check`, `plan` and `doctor`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_muon.ortho.recipes import OrthoSpec, resolve
from ds_muon.planning import read_owner_costs
from ds_muon.preview.config_file import ConfigFile, read_config, read_json

if TYPE_CHECKING:
    from ds_muon.zero.inspection import Foreseen


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """A ds_config.json whose keys of DMuon are valid.

    Attributes:
        foreseen: what DeepSpeed and the refusals say of it; None where DeepSpeed is not importable.
        problems: why a run would not start, in words.
        unchecked: why `foreseen` is None.
    """

    read: ConfigFile
    spec: OrthoSpec
    foreseen: Foreseen | None
    problems: tuple[str, ...]
    unchecked: str = ""


def examine(path: Path) -> Examined:
    """Read a ds_config.json and ask what a start would say of it.

    Raises:
        ValueError: the file or DMuon's keys are not valid; one line per problem.
    """
    content = read_json(path)
    read = read_config(content)
    spec = resolve(read.params)
    if read.params.owner_costs is not None:
        read_owner_costs(read.params.owner_costs)
    foreseen, unchecked = _foresee(content)
    problems: list[str] = []
    if foreseen is not None:
        problems += [] if foreseen.error is None else [f"DeepSpeed refuses it: {foreseen.error}"]
        problems += [f"DMuon does not support {text}" for text in foreseen.refusals]
    return Examined(
        read=read, spec=spec, foreseen=foreseen, problems=tuple(problems), unchecked=unchecked
    )


def require_accepted(path: Path) -> Examined:
    """Examine a ds_config.json that a run has to start with.

    Raises:
        ValueError: it would not; one line per problem.
    """
    found = examine(path)
    if found.problems:
        raise ValueError("\n".join(found.problems))
    if found.unchecked:
        print(f"ds_muon: {found.unchecked}", file=sys.stderr)
    return found


def _foresee(content: Mapping[str, Any]) -> tuple[Foreseen | None, str]:
    # DeepSpeed logs to what stdout is when it is imported; a command's result has that to itself.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            from ds_muon.zero.inspection import foresee
        except Exception as error:  # a broken installation raises whatever it likes
            return None, (
                f"DeepSpeed cannot be imported here ({type(error).__name__}: {error}), so regimes "
                "that a start refuses are not looked for"
            )
        return foresee(content), ""
