# SPDX-License-Identifier: Apache-2.0
"""Report: say at start, in a few words, what the matrix half will do per step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ds_muon.log import say
from ds_muon.plan.plan import Plan
from ds_muon.planning import MIB
from ds_muon.run.step import StepEngine
from ds_muon.zero.prepare import Preparation


def say_plan(
    plans: Sequence[Plan], step_engine: StepEngine, prepared: Preparation, *, communicator: int
) -> None:
    """Log the plan of this rank's replica, and buckets that exceed the workspace.

    Args:
        communicator: bytes of the device that the exchange's connections took.
    """
    rank = prepared.transport.rank
    said = _describe(plans, step_engine, prepared, communicator)
    if step_engine.crosses:
        said += "; master weights, momentum and AdamW (torch's) are on the host"
    say(said, rank=rank)
    for plan in plans:
        warning = plan.oversize_warning(prepared.config.workspace_mb)
        if warning:
            say(warning, rank=rank, level=logging.WARNING)


def _describe(
    plans: Sequence[Plan], engine: StepEngine, prepared: Preparation, communicator: int
) -> str:
    world_size, mesh, config = prepared.row.world_size, prepared.mesh, prepared.config
    matrices = sum(len(p.layout.matrices) for p in plans)
    loads = [sum(flops) for flops in zip(*(p.owner_flops() for p in plans), strict=True)]
    received = [sum(numels) for numels in zip(*(p.received_numel() for p in plans), strict=True)]
    balance = max(loads) * world_size / sum(loads) if sum(loads) else 1.0
    chosen = ", ".join(sorted({p.exchange for p in plans})) or "nothing"
    why = "least predicted bytes and calls" if config.exchange == "auto" else "as asked"
    where = ""
    if mesh is not None and config.hsdp is not None:
        where = (
            f"hsdp: {mesh.replicas} replicas of {mesh.shard_size} ranks, publish "
            f"{config.hsdp.publish}; replica {mesh.replica} owns "
        )
    return (
        f"plan: {where}{matrices} matrices in {sum(len(p.routes) for p in plans)} buckets, "
        f"exchange by {chosen} ({why}), busiest owner {balance:.2f} x the mean; per step a rank "
        f"receives {sum(received) / world_size:,.0f} elements on average, "
        f"{max(received, default=0):,} at most; exchange and iteration hold "
        f"{engine.arena.nbytes / MIB:.1f} MiB here"
        + (f", the communicator {communicator / MIB:.0f} MiB" if communicator else "")
        + _describe_parameters(prepared)
    )


def _describe_parameters(prepared: Preparation) -> str:
    config = prepared.config
    said = []
    if config.reshard_after_forward is not None:
        until = "each use (Z3)" if config.reshard_after_forward else "the step (Z2)"
        said.append(f"matrices stay gathered until {until}")
    if config.param_source == "owner_broadcast" and prepared.row.world_size > 1:
        said.append("matrices come from their owners")
    if prepared.hides_gather:
        said.append("the parameter gather runs under the next forward")
    return "".join(f"; {text}" for text in said)
