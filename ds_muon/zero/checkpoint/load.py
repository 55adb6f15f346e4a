# SPDX-License-Identifier: Apache-2.0
"""Load: take a checkpoint of another world size, stage, replica count or optimizer.

Owns: the choice between DeepSpeed's own load and ours, made alike on all ranks before anything is
changed; and what is derived from master weights once they are filled.
Never does: send a parameter; every rank maps the files and copies the ranges that it holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from ds_muon.checkpoint import universal
from ds_muon.checkpoint.pieces import MASTER, MOMENTUM, STATES, Shard
from ds_muon.checkpoint.restore import Destination, plan_copies, run_copies
from ds_muon.comm.agreement import require_agreement
from ds_muon.comm.transport import Transport
from ds_muon.log import say
from ds_muon.optimizer import MatrixOwnerOptimizer
from ds_muon.routing import clean_name
from ds_muon.zero.checkpoint.contents import (
    CLIENT_KEY,
    entry_of,
    read_tag,
    require_same_save,
    scaler_of,
    unoptimized_values,
)
from ds_muon.zero.checkpoint.files import (
    SavedTag,
    find,
    find_universal,
    open_model,
    open_optimizer,
    other_tags,
)
from ds_muon.zero.seams import override, private
from ds_muon.zero.wrapping import replaced

_SCALER_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint that this run takes by parameter name.

    Attributes:
        model: rank 0's model file.
        scaler: loss scale and the like.
    """

    tag: SavedTag
    model: Mapping[str, Any]
    shards: Sequence[Shard]
    scaler: Mapping[str, Any]


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
        destinations = self._destinations(states)
        source, copies = self._prepare(Path(load_dir) / str(tag), destinations, kwargs)
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
        self._fill_rest(source, states=states)
        self._is_filled = True
        client_state.pop("optimizer", None)
        return path, client_state

    def _load_zero_checkpoint(self, load_dir: str, tag: str, **kwargs: Any) -> bool:
        return True if self._is_filled else self._load_zero(load_dir, tag, **kwargs)

    def _prepare(
        self, folder: Path, destinations: Sequence[Destination], options: Mapping[str, Any]
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
            if options.get("load_lr_scheduler_states", True):
                self._require_scheduler(open_model(tag.model_files[0])["lr_scheduler"])
            if not difference and not any(len(d.states) > 1 for d in destinations):
                # Here DeepSpeed's own load takes `latest`, or nothing, or leaves masters behind.
                difference = "the weights alone are wanted"
        difference = next(filter(None, self._world.all_gather_object(difference)), "")
        if not difference:
            return None, []
        with self._on_all_ranks(folder):
            if options.get("custom_load_fn") is not None:
                raise ValueError(
                    f"it is not of this run's shape ({difference}), so its weights are taken by "
                    "parameter name and custom_load_fn cannot be applied; leave it out"
                )
            source = self._open(tag)
            copies = plan_copies(destinations, source.shards)
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
        if not tag.optimizer_files:
            return tag, header.difference(entry_of(model), self._leaves) or ""
        own = tag.optimizer_files[min(header.rank, len(tag.optimizer_files) - 1)]
        is_bf16 = own.name.startswith("bf16_")
        if is_bf16 is not self._engine.bfloat16_enabled():
            return tag, "it was saved in another precision"
        return tag, header.difference(entry_of(open_optimizer(own)), self._leaves) or ""

    def _open(self, tag: SavedTag) -> Source:
        model = open_model(tag.model_files[0])
        if self._engine.load_universal_checkpoint():
            wanted = {s.name: s.shape for leaf in self._leaves for s in self._slices(leaf)}
            shard, scaler = universal.read(tag.folder, wanted, open_optimizer)
            return Source(tag=tag, model=model, shards=[shard], scaler=scaler)
        return Source(tag=tag, model=model, shards=read_tag(tag, model), scaler=scaler_of(tag))

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

    def _fill_rest(self, source: Source, *, states: bool) -> None:
        """Buffers, frozen parameters, settings of groups, loss scale, and what masters imply."""
        self._load_unoptimized(source)
        self._fit_scheduler()
        if states:
            self._take_settings(source)
        wrapper = self._engine.optimizer
        if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
            # Loading its own masters, ZeRO-3 copies them to the weights' partitions.
            own = {key: getattr(wrapper, key) for key in _SCALER_KEYS}
            own[FP32_FLAT_GROUPS] = private(wrapper, "fp32_partitioned_groups_flat")
            world_size = self._optimizer.binding.header.world_size
            wrapper.load_state_dict([own] * world_size, load_optimizer_states=False)
        elif isinstance(wrapper, FP16_UnfusedOptimizer):
            for weights, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
                torch._foreach_copy_([w.data for w in weights], [m.data for m in masters])
        elif wrapper is not self._optimizer:
            wrapper.update_lp_params()

    def _load_unoptimized(self, source: Source) -> None:
        module = self._engine.module
        saved = {clean_name(n): v for n, v in source.model["module"].items()}
        own = {clean_name(name): name for name, _ in module.named_buffers()}
        buffers = {name: saved[clean] for clean, name in own.items() if clean in saved}
        module.load_state_dict(buffers, strict=False)
        frozen = {clean_name(n): p for n, p in module.named_parameters() if not p.requires_grad}
        for name, value in unoptimized_values(source.tag, source.model, source.shards, frozen):
            parameter = frozen[name]
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if self._world.rank == 0 or not hasattr(parameter, "ds_id"):
                    parameter.data.copy_(value)

    def _require_scheduler(self, saved: Mapping[str, Any] | None) -> None:
        scheduler = self._engine.lr_scheduler
        own = {} if scheduler is None else scheduler.state_dict()
        missing = sorted(set(own) - set(saved or {}))
        if missing:
            kind = type(scheduler).__name__
            raise ValueError(
                f"its learning rate scheduler is of another kind than this run's {kind}: it has no "
                f"{', '.join(missing)}; use the scheduler that saved, or load with "
                "load_lr_scheduler_states=False, which starts this one anew"
            )

    def _fit_scheduler(self) -> None:
        """Give a scheduler that another optimizer's groups had this run's number of groups."""
        scheduler, count = self._engine.lr_scheduler, len(self._optimizer.param_groups)
        for name in ("base_lrs", "_last_lr"):
            saved = vars(scheduler).get(name) if scheduler is not None else None
            if isinstance(saved, list) and len(saved) != count and len(set(saved)) == 1:
                vars(scheduler)[name] = saved[:1] * count

    def _take_settings(self, source: Source) -> None:
        optimizer = self._optimizer
        for shard in source.shards:
            optimizer.take_settings(shard.settings)
            if shard.shared_lr is not None and self._engine.lr_scheduler is not None:
                # A scheduler goes on from there; without one this run's own lr stands.
                for group in optimizer.param_groups:
                    group["lr"] = shard.shared_lr
        wrapper = self._engine.optimizer
        scaler = source.scaler.get("loss_scaler")
        if isinstance(scaler, DynamicLossScaler) and isinstance(
            getattr(wrapper, "loss_scaler", None), DynamicLossScaler
        ):
            for key in _SCALER_KEYS:
                setattr(wrapper, key, source.scaler[key])
