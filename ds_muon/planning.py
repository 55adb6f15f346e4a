# SPDX-License-Identifier: Apache-2.0
"""Planning: a plan from a layout and the configuration, the same for a run and for its preview.

Owns: how configuration and recipe become the integers that plan/ works with.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from ds_muon.config import DMuonConfig
from ds_muon.ortho.chunks import staging_bytes
from ds_muon.ortho.memory import iterate_bytes
from ds_muon.ortho.recipes import OrthoSpec
from ds_muon.plan.costs import CostModel
from ds_muon.plan.layout import Layout
from ds_muon.plan.memory import Workspace, buffer_sets
from ds_muon.plan.plan import Plan, build_plan
from ds_muon.plan.replicas import plan_rows

MIB = 2**20


def plan_layout(
    layout: Layout, config: DMuonConfig, spec: OrthoSpec, *, storage: torch.dtype
) -> Plan:
    """Plan one layout.

    Args:
        storage: dtype of the iterates; fp32 where a device emulates the compute dtype.

    Raises:
        ValueError: the table of `owner_costs` cannot be used.
    """
    model = _cost_model(config, spec, storage)
    largest = max((m.numel for m in layout.matrices), default=0)
    workspace = Workspace(
        cap_bytes=config.workspace_mb * MIB,
        exchange=config.exchange,
        sets=buffer_sets(config.max_inflight_buckets),
        wire_bytes=spec.wire_dtype.itemsize,
        update_bytes=spec.update_dtype.itemsize,
        staging_bytes=staging_bytes(largest),
    )
    return build_plan(layout, model, owner_scope=config.owner_scope, workspace=workspace)


def plan_run(
    layouts: Sequence[Layout],
    config: DMuonConfig,
    spec: OrthoSpec,
    *,
    storage: torch.dtype,
    replicas: int,
) -> tuple[tuple[Plan, ...], ...]:
    """Plan every layout of a step for every replica (HSDP; one without); see `plan_layout`."""

    def plan(layout: Layout) -> Plan:
        return plan_layout(layout, config, spec, storage=storage)

    if replicas == 1:
        return tuple((plan(layout),) for layout in layouts)
    model = _cost_model(config, spec, storage)
    return plan_rows(layouts, [model.costs(x.matrices) for x in layouts], replicas, plan)


def _cost_model(config: DMuonConfig, spec: OrthoSpec, storage: torch.dtype) -> CostModel:
    return CostModel(
        steps=len(spec.triples),
        gram_from=spec.gram_from,
        gram_restarts=len(spec.gram_restarts),
        iterate_bytes=functools.partial(iterate_bytes, spec=spec, storage=storage),
        measured=None if config.owner_costs is None else read_owner_costs(config.owner_costs),
    )


def read_owner_costs(path: str) -> dict[tuple[int, int], float]:
    """Read a measured cost table, as scripts/bench_newton_schulz.py --save writes it.

    Returns:
        (short, long side) -> seconds of one orthogonalisation.

    Raises:
        ValueError: names the file and what is wrong with it.
    """
    rule = (
        'owner_costs must name a JSON file {"seconds": [[short side, long side, seconds], ...]}, '
        "as scripts/bench_newton_schulz.py --save writes it"
    )
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))["seconds"]
        table = {(n, m): float(seconds) for n, m, seconds in rows}
    except OSError as error:
        raise ValueError(f"{rule}; {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{rule}; {path} is not text in UTF-8") from None
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{rule}; {path} is not that: {error!r}") from None
    wrong = [[*shape, s] for shape, s in table.items() if not _usable(shape, s)]
    if wrong or not table:
        raise ValueError(f"{rule}; {path} has an unusable entry: {wrong[0] if wrong else 'none'}")
    if len(table) < len(rows):
        raise ValueError(f"{rule}; {path} has a shape twice")
    return table


def _usable(shape: tuple[object, object], seconds: float) -> bool:
    """Whole sides up to 2^31, the short one first, and a time between 1 ns and a day."""
    n, m = shape
    sides = isinstance(n, int) and isinstance(m, int) and 0 < n <= m < 2**31
    return sides and 1e-9 <= seconds <= 86400
