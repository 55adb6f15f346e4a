# SPDX-License-Identifier: Apache-2.0
"""Attach: bind the base optimizer to the leaves that DeepSpeed made of it.

Owns: reading, planning and binding after DeepSpeed's own wrapping; it ends in an agreement of all
ranks, as prepare.py does before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_muon.comm.agreement import require_agreement
from ds_muon.comm.strategies import warm_up
from ds_muon.optimizer import MUON, Binding, MatrixOwnerOptimizer
from ds_muon.ortho.arithmetic import arithmetic_for
from ds_muon.plan.plan import Plan
from ds_muon.planning import plan_run
from ds_muon.run.step import StepEngine
from ds_muon.zero import corrections
from ds_muon.zero.checkpoint.header import header_of
from ds_muon.zero.checkpoint.load import CheckpointLoader
from ds_muon.zero.checkpoint.save import save_whole
from ds_muon.zero.clip import clip_for
from ds_muon.zero.hsdp.replication import Replication, SettledSteps
from ds_muon.zero.leaves import Leaf, LeafSet, clear_padding, read_leaf_sets
from ds_muon.zero.observe import recorder_for, verifier_for
from ds_muon.zero.offload import crossing_for
from ds_muon.zero.parameters.hidden_gather import HiddenGather
from ds_muon.zero.parameters.lifetime import set_lifetime
from ds_muon.zero.parameters.owner_source import OwnerSource
from ds_muon.zero.prepare import Preparation
from ds_muon.zero.reduction import reduce_to_keepers
from ds_muon.zero.report import say_plan
from ds_muon.zero.seams import private, require_instances


def bind_optimizer(engine: Any, optimizer: MatrixOwnerOptimizer) -> None:
    """Read the leaves that DeepSpeed made, plan, agree with all ranks, and bind.

    Raises:
        RuntimeError: a layout that is not what it should be, on this rank or another.
    """
    prepared: Preparation = optimizer.preparation
    config, mesh, problem = prepared.config, prepared.mesh, None
    sets: tuple[LeafSet, ...] = ()
    rows: tuple[tuple[Plan, ...], ...] = ()
    try:
        require_instances(*_wrapping(engine))
        sets = read_leaf_sets(engine, prepared.groups, prepared.row)
        rows = _plan(sets, prepared)
    except Exception as error:  # shown to every rank, then raised
        problem = error
    digests = {str(i): "".join(p.digest() for p in row) for i, row in enumerate(rows)}
    facts = {f"plan of leaf set {i}": digest for i, digest in digests.items()}
    require_agreement(prepared.transport, {"plans": str(len(rows)), **facts}, problem=problem)
    for leaf in (leaf for s in sets for leaf in s.leaves):
        clear_padding(leaf)
    plans = [row[0 if mesh is None else mesh.replica] for row in rows]
    device = torch.device(get_accelerator().current_device_name())
    communicator = _communicator_bytes(plans, prepared, device)
    replication = None
    if mesh is not None and config.hsdp is not None:
        replication = Replication(
            engine, mesh, config, config.hsdp, prepared.spec, sets, rows, device=device
        )
    step_engine = StepEngine(
        prepared.row,
        prepared.backend,
        plans,
        inflight=config.max_inflight_buckets,
        keep_buffers=config.preallocate_workspace,
        crossing=crossing_for(engine, device),
        publisher=None if replication is None else replication.publisher,
    )
    optimizer.bind(_binding(engine, prepared, sets, step_engine, replication))
    corrections.correct_wrapper(engine)
    reduce_to_keepers(engine, config, prepared.transport)
    if config.param_source == "owner_broadcast" and prepared.row.world_size > 1:
        OwnerSource(
            engine, prepared.row_transport("parameters"), prepared.matrices(), _owners(rows)
        )
    if replication is not None:
        # After what fetches, since updates are settled before it.
        replication.install(optimizer, prepared.transport, prepared.matrices())
    _schedule_parameters(engine, prepared, replication)
    save_whole(engine, optimizer, prepared.transport)
    # ZeRO-3 lends its leaves to the groups for the time of a call only; sub-groups are in order.
    leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
    flat = leaves or [tensor for s in sets for tensor in s.tensors]
    CheckpointLoader(engine, optimizer, flat, prepared.transport)
    say_plan(plans, step_engine, prepared, communicator=communicator)


def _wrapping(engine: Any) -> tuple[Any, ...]:
    """The objects that DeepSpeed made while it wrapped the optimizer."""
    wrapper = engine.optimizer
    if int(engine.zero_optimization_stage()) < 3:
        return (wrapper,)
    offload = private(wrapper, "parameter_offload")
    return wrapper, offload, *engine.module.parameters()


def _communicator_bytes(plans: Sequence[Plan], prepared: Preparation, device: torch.device) -> int:
    """Make the exchange's connections, and return the memory that they take."""
    free = _free_bytes(device)
    for exchange in sorted({plan.exchange for plan in plans}):
        warm_up(exchange, prepared.row, device)
    return free - _free_bytes(device)


def _free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody has, where it can say; communication libraries take theirs
    without torch's allocator knowing."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _binding(
    engine: Any,
    prepared: Preparation,
    sets: Sequence[LeafSet],
    step_engine: StepEngine,
    replication: Replication | None,
) -> Binding:
    config = prepared.config
    masters = {_contents(leaf): leaf.tensor for s in sets for leaf in s.leaves}
    settling: tuple[SettledSteps, ...] = ()
    gathers_in_step = int(engine.zero_optimization_stage()) < 3 and not prepared.hides_gather
    if replication is not None and (gathers_in_step or config.verify_every):
        settling = (SettledSteps(replication.publisher),)
    header = header_of(engine, prepared, sets)
    recorder = recorder_for(engine, step_engine, prepared.transport, config)
    publisher = None if replication is None else replication.publisher
    return Binding(
        engine=step_engine,
        leaf_sets=tuple(s.tensors for s in sets if s.kind == MUON),
        adamw_leaves=tuple(t for s in sets if s.kind != MUON for t in s.tensors),
        header=header,
        spread=None if replication is None else replication.spread,
        clip=clip_for(engine, prepared, header, publisher, recorder),
        recorder=recorder,
        verifier=verifier_for(
            engine, step_engine, prepared.transport, config, prepared.spec, masters
        ),
        observers=settling,
    )


def _contents(leaf: Leaf) -> str:
    """Name a leaf by the parameters in it on this rank."""
    names = list(dict.fromkeys(piece.name for piece in leaf.slices)) or ["padding only"]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} (a leaf of {leaf.tensor.numel():,} elements)"


def _plan(sets: Sequence[LeafSet], prepared: Preparation) -> tuple[tuple[Plan, ...], ...]:
    """Plan the leaf sets for every replica; there is one without HSDP."""
    layouts = [s.layout for s in sets if s.layout is not None]
    device = torch.device(get_accelerator().current_device_name())
    return plan_run(
        layouts,
        prepared.config,
        prepared.spec,
        storage=arithmetic_for(prepared.spec, device).storage,
        replicas=1 if prepared.mesh is None else prepared.mesh.replicas,
    )


def _owners(rows: Sequence[Sequence[Plan]]) -> dict[str, int]:
    """Matrix name -> its owner's place in a row, whichever row it is in."""
    return {
        matrix.name: owner
        for of_set in rows
        for plan in of_set
        for matrix, owner in zip(plan.layout.matrices, plan.owners, strict=True)
    }


def _schedule_parameters(
    engine: Any, prepared: Preparation, replication: Replication | None
) -> None:
    """Give parameters the lifetimes and the gather that the configuration asks for."""
    config = prepared.config
    if config.reshard_after_forward is not None:
        matrices = [parameter for parameter, _ in prepared.matrices()]
        set_lifetime(engine.optimizer, matrices, reshard=config.reshard_after_forward)
    if prepared.hides_gather:
        HiddenGather(engine, prepared.row_transport("parameters"), replication)
