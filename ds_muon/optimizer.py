# SPDX-License-Identifier: Apache-2.0
"""The base optimizer that DeepSpeed is handed: matrices by the step engine, the rest by AdamW.

Owns: parameter groups, optimizer state, step and state_dict, in torch.optim's own terms.
Never does: know which ZeRO stage it is in. zero/ builds it, lets DeepSpeed wrap it, then binds it
to the leaves that DeepSpeed made; a step before that changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ds_muon.checkpoint.header import CheckpointHeader, require_readable
from ds_muon.checkpoint.pieces import EXP_AVG, EXP_AVG_SQ, MOMENTUM
from ds_muon.config import DMuonConfig
from ds_muon.run.clip import QkClip
from ds_muon.run.metrics import Recorder, StepStats
from ds_muon.run.momentum import SpreadMomentum
from ds_muon.run.step import LeafStep, StepEngine
from ds_muon.run.verify import Verifier
from ds_muon.run.watch import Observer, StepWatch

MUON, ADAMW = "muon", "adamw"
MOMENTUM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# DeepSpeed's wrappers and schedulers write these into every group; the others are ours alone.
_LOADED_KEYS = ("lr", "initial_lr", "lr_ratio", "weight_decay", "betas", "eps", "momentum", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What DeepSpeed made of the parameter groups.

    Attributes:
        engine: runs the matrix half.
        leaf_sets: leaves of MUON groups that are stepped together; `leaf_sets[i]` is the engine's
            plan i.
        adamw_leaves: leaves of ADAMW groups.
        header: what a checkpoint says about these leaves.
        spread: momentum, where replicas share it (HSDP); one leaf per leaf set then. None: each
            leaf's stands in its state.
        clip: scales attention projections after each leaf's step (MuonClip).
        recorder, verifier: observe the steps, where the configuration asks for it.
        observers: observe them before those two.
    """

    engine: StepEngine
    leaf_sets: tuple[tuple[Tensor, ...], ...]
    adamw_leaves: tuple[Tensor, ...]
    header: CheckpointHeader
    spread: SpreadMomentum | None = None
    clip: QkClip | None = None
    recorder: Recorder | None = None
    verifier: Verifier | None = None
    observers: tuple[Observer, ...] = ()

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """All leaves of an optimizer step."""
        return (*chain.from_iterable(self.leaf_sets), *self.adamw_leaves)

    def spread_of(self, leaf: Tensor) -> Tensor | None:
        """This replica's momentum of a MUON leaf, where replicas share it."""
        if self.spread is None or all(leaves[0] is not leaf for leaves in self.leaf_sets):
            return None
        [index] = [i for i, leaves in enumerate(self.leaf_sets) if leaves[0] is leaf]
        return self.spread.buffers[index]


class MatrixOwnerOptimizer(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest; public as `ds_muon.DMuon` and `torch.optim.DMuon`.

    DeepSpeed's ZeRO-1/2 runs its own Muon inside any optimizer whose class name contains "muon"
    once a parameter carries `use_muon`; hence this name.

    Each group's step length is `group["lr"] * group["lr_ratio"]`: `lr` is the shared learning rate
    that schedulers write and loggers read, `lr_ratio` keeps muon_lr : adam_lr whatever they write.
    A leaf without a gradient counts as having a zero one, as it does in ZeRO's flat partitions.

    Args:
        groups: parameter groups, each with `kind` MUON or ADAMW, `lr_ratio` and its options.
        config: the parsed `optimizer.params`.

    Attributes:
        save_name: names the save under way, in what it writes.

    Raises:
        TypeError: constructed with bare parameters instead of through ds_config.json.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        config: DMuonConfig | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(config, DMuonConfig) or options:
            raise TypeError(
                'DMuon is built by DeepSpeed from ds_config.json: {"optimizer": {"type": "DMuon", '
                '"params": {...}}}; it cannot be constructed from bare parameters'
            )
        defaults = {
            "lr": config.lr,
            "lr_ratio": 1.0,
            "weight_decay": config.weight_decay,
            "betas": config.betas,
            "eps": config.eps,
            "momentum": config.momentum,
        }
        super().__init__([dict(group) for group in groups], defaults)
        self.config = config
        self.save_name: str | None = None
        self._binding: Binding | None = None
        self._adam = _inner_adam(config, torch.device("cpu"))

    @property
    def binding(self) -> Binding | None:
        """What the optimizer is bound to, or None while DeepSpeed is still wrapping it."""
        return self._binding

    @torch.no_grad()
    def bind(self, binding: Binding) -> None:
        """Attach the leaves and create the state of each, so that nothing is created in a step."""
        dtype = MOMENTUM_DTYPES[self.config.momentum_dtype]
        for leaf in chain.from_iterable(binding.leaf_sets):
            spread = binding.spread is not None
            self.state[leaf] = {} if spread else {MOMENTUM: torch.zeros_like(leaf, dtype=dtype)}
        for leaf in binding.adamw_leaves[:1]:
            self._adam = _inner_adam(self.config, leaf.device)
        for leaf in binding.adamw_leaves:
            step_device = leaf.device if self._adam.defaults["fused"] else torch.device("cpu")
            self.state[leaf] = {
                "step": torch.zeros((), dtype=torch.float32, device=step_device),
                EXP_AVG: torch.zeros_like(leaf),
                EXP_AVG_SQ: torch.zeros_like(leaf),
            }
        self._binding = binding
        own = [o for o in (binding.clip, binding.recorder, binding.verifier) if o is not None]
        self._watch = StepWatch(binding.leaves, [*binding.observers, *own])

    @property
    def last_stats(self) -> StepStats | None:
        """The latest record of `metrics`, or None."""
        recorder = self._binding.recorder if self._binding is not None else None
        return recorder.last if recorder is not None else None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the leaves that stand in `param_groups` now; ZeRO narrows them per call.

        Raises:
            ValueError: a closure was given.
        """
        if closure is not None:
            raise ValueError("DMuon does not take a closure: gradients are reduced before the step")
        if self._binding is None:
            return
        leaves = [*self._leaves()]
        with self._watch.stepping(leaves):
            self._step(self._binding)
            if self._binding.clip is not None:
                self._binding.clip.apply(leaves)

    def _step(self, binding: Binding) -> None:
        recorder = binding.recorder
        recording = recorder if recorder is not None and recorder.active else None
        steps: dict[int, LeafStep] = {}
        for group in self.param_groups:
            if group["kind"] == ADAMW:
                self._step_adam(group, recording)
            else:
                steps.update(
                    (id(leaf), self._leaf_step(leaf, group, binding)) for leaf in group["params"]
                )
        run = binding.engine.run if binding.verifier is None else binding.verifier.run
        for index, leaves in enumerate(binding.leaf_sets):
            if steps and id(leaves[0]) in steps:
                run(index, [steps[id(leaf)] for leaf in leaves])
        if recording is not None:
            for leaf in steps.values():
                recording.gradient(MUON, leaf.grad)

    def _leaf_step(self, leaf: Tensor, group: Mapping[str, Any], binding: Binding) -> LeafStep:
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        spread = binding.spread_of(leaf)
        momentum = self.state[leaf][MOMENTUM] if spread is None else spread
        return LeafStep(
            weights=leaf.detach().view(-1),
            momentum=momentum.view(-1),
            grad=grad.reshape(-1).float(),
            lr=group["lr"] * group["lr_ratio"],
            weight_decay=group["weight_decay"],
            mu=group["momentum"],
        )

    def _step_adam(self, group: Mapping[str, Any], recorder: Recorder | None) -> None:
        inner = self._adam
        for leaf in group["params"]:
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
        options = {key: group[key] for key in ("params", "weight_decay", "betas", "eps")}
        options["lr"] = group["lr"] * group["lr_ratio"]
        inner.param_groups = [{**inner.defaults, **options}]
        # The state is this optimizer's own; whoever replaces it replaces it here too.
        inner.state = self.state
        inner.step()
        if recorder is not None and self._binding is not None:
            slices = self._binding.header.slices
            for leaf in group["params"]:
                recorder.gradient(ADAMW, leaf.grad)
                used = sum(piece.numel for piece in slices[id(leaf)])
                recorder.moments(self.state[leaf], options, used)

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Hold all momentum in the state for a while, on replica 0's CPU; a collective."""
        spread = self._binding.spread if self._binding is not None else None
        whole = spread.full() if spread is not None else None
        held = [] if whole is None else [leaves[0] for leaves in self._binding.leaf_sets]
        for leaf, momentum in zip(held, whole or (), strict=True):
            self.state[leaf][MOMENTUM] = momentum
        try:
            yield
        finally:
            for leaf in held:
                del self.state[leaf][MOMENTUM]

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with a versioned `ds_muon` entry once bound.

        Raises:
            RuntimeError: replicas share the momentum, and nobody brought it together.
        """
        spread = self._binding.leaf_sets if self._binding and self._binding.spread else ()
        if any(MOMENTUM not in self.state[leaves[0]] for leaves in spread):
            raise RuntimeError(
                "DMuon: with hsdp every replica keeps the momentum of its own matrices; "
                "engine.save_checkpoint, called on all ranks, brings it together and writes it"
            )
        state = super().state_dict()
        if self._binding is not None:
            leaves = list(self._leaves())
            state["ds_muon"] = self._binding.header.as_entry(leaves, save=self.save_name)
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore state in place and in its own dtype, and each group's options.

        Raises:
            ValueError: the state is another optimizer's, or of another world, stage or model.
        """
        if self._binding is None:
            raise ValueError("DMuon: load a checkpoint after deepspeed.initialize, not before")
        leaves = list(self._leaves())
        entry = state_dict.get("ds_muon")
        require_readable(entry)
        difference = self._binding.header.difference(entry, leaves)
        if difference is not None:
            raise ValueError(
                f"DMuon: this state dict is not this run's: {difference}; engine.load_checkpoint "
                "reads what other world sizes, stages and optimizers saved"
            )
        self.take_settings({group["name"]: group for group in state_dict["param_groups"]})
        for index, leaf in enumerate(leaves):
            for key, value in self.state[leaf].items():
                value.copy_(state_dict["state"][index][key])
        if self._binding.spread is not None:
            number = {id(leaf): index for index, leaf in enumerate(leaves)}
            for index, (leaf,) in enumerate(self._binding.leaf_sets):
                saved = state_dict["state"][number[id(leaf)]][MOMENTUM]
                self._binding.spread.cut(index, saved.view(-1))
        if self._binding.verifier is not None:
            self._binding.verifier.forget()

    def take_settings(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Take what each group had in a checkpoint, by the group's name."""
        for group in self.param_groups:
            found = saved.get(group["name"], {})
            group.update({key: found[key] for key in _LOADED_KEYS if key in found})

    def _leaves(self) -> Iterator[Tensor]:
        """Leaves in the numbering of torch's state dict."""
        return chain.from_iterable(group["params"] for group in self.param_groups)


def _inner_adam(config: DMuonConfig, device: torch.device) -> torch.optim.Optimizer:
    """The AdamW half: torch's own, with the fewest launches that a device of leaves offers.

    That is the fused one, or else foreach; a recipe that promises torch's default bits has those.
    """
    family = torch.optim.AdamW if config.adam_w_mode else torch.optim.Adam
    options = {"betas": config.betas, "eps": config.eps}
    if config.recipe == "torch":
        return family([torch.zeros(1)], **options)
    # torch says in a step only that a device has no fused kernel.
    probe = torch.zeros(1, device=device)
    probe.grad = torch.zeros_like(probe)
    try:
        family([probe], fused=True).step()
    except RuntimeError:
        return family([probe], foreach=True, **options)
    return family([probe], fused=True, **options)
