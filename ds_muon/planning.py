# SPDX-License-Identifier: Apache-2.0
"""Planning: a plan from a layout and the configuration, the same for a run and for its preview.

Owns: how configuration and recipe become the integers that plan/ works with.
"""

from __future__ import annotations

from ds_muon.config import DMuonConfig
from ds_muon.ortho.recipes import OrthoSpec
from ds_muon.plan.buckets import Workspace, buffer_sets
from ds_muon.plan.costs import CostModel
from ds_muon.plan.layout import Layout
from ds_muon.plan.plan import Plan, build_plan

MIB = 2**20


def plan_layout(
    layout: Layout, config: DMuonConfig, spec: OrthoSpec, *, iterate_bytes: int
) -> Plan:
    """Plan one layout.

    Args:
        iterate_bytes: per element of an iterate; a device that emulates a dtype keeps fp32.
    """
    model = CostModel(
        steps=len(spec.triples),
        gram_from=spec.gram_from,
        gram_restarts=len(spec.gram_restarts),
        wire_bytes=spec.wire_dtype.itemsize,
        compute_bytes=iterate_bytes,
    )
    workspace = Workspace(
        cap_bytes=config.workspace_mb * MIB,
        exchange=config.exchange,
        sets=buffer_sets(config.max_inflight_buckets),
        update_bytes=spec.compute_dtype.itemsize,
    )
    return build_plan(layout, model, owner_scope=config.owner_scope, workspace=workspace)
