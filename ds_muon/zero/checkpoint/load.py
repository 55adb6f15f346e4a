# SPDX-License-Identifier: Apache-2.0
"""Load: take a checkpoint of another world size, stage, replica count or optimizer.

Owns: the choice between DeepSpeed's own load and ours, made alike on all ranks before anything is
changed; and what is derived from master weights once they are filled.
Never does: send a parameter; every rank maps the files and copies the ranges that it holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor

from ds_muon.checkpoint import universal
from ds_muon.checkpoint.pieces import MASTER, MOMENTUM, STATES, Shard
from ds_muon.checkpoint.restore import (
    Destination,
    plan_copies,
    run_copies,
    some,
    weights_shard,
    without,
)
from ds_muon.comm.agreement import require_agreement
from ds_muon.comm.transport import Transport
from ds_muon.log import say
from ds_muon.optimizer import MatrixOwnerOptimizer
from ds_muon.zero.checkpoint.contents import (
    CLIENT_KEY,
    SavedWeights,
    entry_of,
    read_tag,
    require_same_save,
    scaler_of,
)
from ds_muon.zero.checkpoint.files import (
    SavedTag,
    find,
    find_universal,
    open_model,
    open_optimizer,
    other_tags,
)
from ds_muon.zero.checkpoint.fill import (
    Source,
    fill_settings,
    fill_weights,
    fit_scheduler,
    require_scheduler,
)
from ds_muon.zero.checkpoint.rest import Rest, wraps_otherwise
from ds_muon.zero.seams import override, private
from ds_muon.zero.wrapping import replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller wants of a checkpoint.

    Attributes:
        states: more than weights.
        strict: names of the state dict have to be the same.
        is_custom: the caller brings a function that fills the module.
    """

    states: bool
    scheduler: bool
    strict: bool
    is_custom: bool


class CheckpointLoader:
    """Hooks one engine's loads.

    Args:
        leaves: in the numbering of the base optimizer's state dict.
        world: transport over all ranks.
    """

    def __init__(
        self,
        engine: Any,
        optimizer: MatrixOwnerOptimizer,
        leaves: Sequence[Tensor],
        world: Transport,
    ) -> None:
        self._engine, self._optimizer, self._leaves = engine, optimizer, tuple(leaves)
        self._world = world
        self._is_filled = False
        self._load = engine.load_checkpoint
        self._load_model = private(engine, "_load_checkpoint")
        self._load_zero = private(engine, "_load_zero_checkpoint")
        private(engine, "_get_all_ckpt_names")
        engine.load_checkpoint = self.load_checkpoint
        override(engine, "_load_checkpoint", self._load_checkpoint)
        override(engine, "_load_zero_checkpoint", self._load_zero_checkpoint)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, Any]:
        """See DeepSpeedEngine."""
        wrapper = self._engine.optimizer
        if wrapper is self._optimizer or isinstance(wrapper, FP16_UnfusedOptimizer):
            # After a universal checkpoint DeepSpeed calls what only ZeRO has.
            derived = {"update_lp_params": lambda: None}
        else:
            # DeepSpeed would round masters that have been filled.
            restore = private(wrapper, "_restore_from_bit16_weights")
            derived = {
                "_restore_from_bit16_weights": lambda: None if self._is_filled else restore()
            }
        try:
            with replaced(wrapper, **derived):
                path, client_state = self._load(*args, **kwargs)
        finally:
            self._is_filled = False
        if client_state is not None:
            client_state.pop(CLIENT_KEY, None)
        return path, client_state

    def _load_checkpoint(
        self,
        load_dir: str,
        tag: str,
        load_optimizer_states: bool = True,
        load_module_only: bool = False,
        **kwargs: Any,
    ) -> tuple[str | None, Any]:
        states = load_optimizer_states and not load_module_only
        request = Request(
            states=states,
            scheduler=kwargs.get("load_lr_scheduler_states", True) and not load_module_only,
            strict=kwargs.get("load_module_strict", True),
            is_custom=kwargs.get("custom_load_fn") is not None,
        )
        destinations = self._destinations(states)
        source, copies = self._prepare(Path(load_dir) / str(tag), destinations, request)
        if source is None:
            kwargs.update(
                load_optimizer_states=load_optimizer_states, load_module_only=load_module_only
            )
            return self._load_model(load_dir, tag, **kwargs)
        stage = int(self._engine.zero_optimization_stage())
        with replaced(
            self._engine,
            _get_all_ckpt_names=lambda *args, **kwargs: [str(source.tag.model_files[0])],
            load_module_state_dict=lambda *args, **kwargs: None,
        ):
            # Parameters are filled below, and so is what DeepSpeed would give a base optimizer.
            path, client_state = self._load_model(
                load_dir,
                tag,
                load_optimizer_states=stage > 0,
                load_module_only=load_module_only,
                **kwargs,
            )
        run_copies(copies)
        self._spread(destinations)
        self._rest().fill(source.weights, self._world.rank)
        fit_scheduler(self._engine.lr_scheduler, len(self._optimizer.param_groups))
        if states:
            fill_settings(self._engine, self._optimizer, source)
        fill_weights(self._engine.optimizer, self._optimizer)
        self._is_filled = True
        client_state.pop("optimizer", None)
        return path, client_state

    def _load_zero_checkpoint(self, load_dir: str, tag: str, **kwargs: Any) -> bool:
        return True if self._is_filled else self._load_zero(load_dir, tag, **kwargs)

    def _prepare(
        self, folder: Path, destinations: Sequence[Destination], request: Request
    ) -> tuple[Source | None, list[tuple[Tensor, Tensor]]]:
        """Find and check everything, and agree with all ranks; nothing is changed.

        Returns:
            None where this very run saved it, so that DeepSpeed's own load fits; else the source,
            and the copies that fill this rank's leaves.

        Raises:
            ValueError, RuntimeError: on all ranks, if one cannot read or use the checkpoint.
        """
        with self._on_all_ranks(folder):
            tag, difference = self._inspect(folder)
            if request.scheduler:
                saved = open_model(tag.model_files[0])["lr_scheduler"]
                require_scheduler(self._engine.lr_scheduler, saved)
            if not difference and not request.states:
                # Here DeepSpeed's own load takes `latest`, or nothing, or leaves masters behind.
                difference = "the weights alone are wanted"
        difference = next(filter(None, self._world.all_gather_object(difference)), "")
        if not difference:
            return None, []
        with self._on_all_ranks(folder):
            if request.is_custom:
                raise ValueError(
                    f"it is not of this run's shape ({difference}), so its weights are taken by "
                    "parameter name and custom_load_fn cannot be applied; leave it out"
                )
            source, rest = self._open(tag, states=request.states), self._rest()
            rest.require_fit(source.weights, strict=request.strict)
            left = [] if request.states else rest.missing(source.weights)
            copies = plan_copies(
                [without(d, left) for d in destinations],
                [*source.shards, weights_shard(destinations, source.shards, source.weights)],
            )
        for text, names in (
            ("it has no", rest.missing(source.weights)),
            ("this run has no", rest.unexpected(source.weights)),
        ):
            difference += f"; {text} {some(names)}" if names else ""
        say(f"{folder} is taken by parameter name: {difference}", rank=self._world.rank)
        return source, copies

    @contextlib.contextmanager
    def _on_all_ranks(self, folder: Path) -> Iterator[None]:
        """Let a problem of one rank end the load on all, before anything is changed."""
        problem: Exception | None = None
        try:
            yield
        except ValueError as error:
            tags = other_tags(folder)
            more = f"; other tags there: {', '.join(tags)}" if tags else ""
            problem = ValueError(f"DMuon cannot load {folder}: {error}{more}")
        except Exception as error:  # shown to every rank, then raised
            problem = error
        require_agreement(self._world, {}, problem=problem, doing="load the checkpoint")

    def _inspect(self, folder: Path) -> tuple[SavedTag, str]:
        """Check a tag, each rank its share of the files; say how it differs from this run."""
        if self._engine.load_universal_checkpoint():
            return find_universal(folder), "it is a universal checkpoint"
        tag = find(folder)
        model = open_model(tag.model_files[0])
        world, header = self._world, self._optimizer.binding.header
        for path in tag.optimizer_files[world.rank :: world.world_size]:
            require_same_save(path, open_optimizer(path), model)
        for path in tag.model_files[world.rank :: world.world_size]:
            open_model(path)
        if wraps_otherwise(self._engine.module, model["module"]):
            return tag, "its module is wrapped otherwise, by torch.compile or not"
        if not tag.optimizer_files:
            return tag, header.difference(entry_of(model), self._leaves) or ""
        own = tag.optimizer_files[min(header.rank, len(tag.optimizer_files) - 1)]
        is_bf16 = own.name.startswith("bf16_")
        if is_bf16 is not self._engine.bfloat16_enabled():
            return tag, "it was saved in another precision"
        return tag, header.difference(entry_of(open_optimizer(own)), self._leaves) or ""

    def _open(self, tag: SavedTag, *, states: bool) -> Source:
        model = open_model(tag.model_files[0])
        shards: Sequence[Shard]
        if self._engine.load_universal_checkpoint():
            wanted = {s.name: s.shape for leaf in self._leaves for s in self._slices(leaf)}
            wanted.update(self._rest().shapes)
            shard, scaler = universal.read(tag.folder, wanted, open_optimizer)
            shards = (shard,)
        else:
            shards, scaler = read_tag(tag, model, states=states), scaler_of(tag, model)
        weights = SavedWeights(tag, model, shards)
        return Source(tag=tag, shards=shards, weights=weights, scaler=scaler)

    def _rest(self) -> Rest:
        groups = self._optimizer.preparation.groups
        return Rest(self._engine.module, [p for group in groups for p in group.parameters])

    def _slices(self, leaf: Tensor) -> Any:
        return self._optimizer.binding.header.slices.get(id(leaf), ())

    def _destinations(self, states: bool) -> list[Destination]:
        """Every leaf of this rank, with room for whole momentum where replicas share it."""
        binding, found = self._optimizer.binding, []
        for leaf in self._leaves:
            held = {MASTER: leaf.detach()}
            state = self._optimizer.state[leaf] if states else {}
            held.update({key: state[key] for key in STATES if key in state})
            if states and binding.spread_of(leaf) is not None:
                held[MOMENTUM] = torch.zeros(leaf.numel(), dtype=binding.spread_of(leaf).dtype)
            step = state.get("step")
            found.append(Destination(slices=self._slices(leaf), states=held, step=step))
        return found

    def _spread(self, destinations: Sequence[Destination]) -> None:
        """Keep this replica's part of whole momentum."""
        binding = self._optimizer.binding
        number = {id(leaf): index for index, (leaf, *_) in enumerate(binding.leaf_sets)}
        for leaf, destination in zip(self._leaves, destinations, strict=True):
            if binding.spread is not None and MOMENTUM in destination.states:
                binding.spread.cut(number[id(leaf)], destination.states[MOMENTUM])
