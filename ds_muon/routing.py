# SPDX-License-Identifier: Apache-2.0
"""Routing: which parameter is a matrix for Muon, which is AdamW's, and why.

Owns: the rules, in this order: what the module is (embedding, output head, convolution), the
shape, the name, then the user's word (use_muon tags, include, exclude; exclude wins).
Never does: import DeepSpeed (zero.Init's `ds_shape` is read where a parameter carries it) or build
parameter groups.
"""

from __future__ import annotations

import difflib
import fnmatch
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ds_muon.config import DMuonConfig
from ds_muon.plan.layout import Matrix, Placement

HEAD_NAMES = frozenset(
    {"lm_head", "embed_out", "output_projection", "unembed", "head", "score", "classifier"}
)
_ROUTER_NAMES = frozenset({"gate", "router", "wg"})
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What happens to one trainable parameter.

    Attributes:
        name: without torch.compile's `_orig_mod.`.
        shape: the layer's shape, also where zero.Init left an empty tensor.
        placements: its logical matrices, with offsets in the parameter; empty: AdamW.
        reason: the rule that decided.
        ruled_out: matrix-shaped, and a rule (not its shape) sent it to AdamW.
    """

    name: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    reason: str
    ruled_out: bool = False

    @property
    def is_muon(self) -> bool:
        """Whether the parameter is trained as matrices."""
        return bool(self.placements)

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """Every trainable parameter's route by name, and how many matrices are frozen."""

    routes: dict[str, Route]
    num_frozen_matrices: int

    def report(self) -> str:
        """Say counts and elements per reason, for the log of rank 0."""
        lines = []
        for label, wanted in (("Muon", True), ("AdamW", False)):
            routes = [r for r in self.routes.values() if r.is_muon is wanted]
            total = sum(r.numel for r in routes)
            matrices = sum(len(r.placements) for r in routes)
            extra = f", {matrices} matrices" if wanted else ""
            lines.append(f"{label}: {len(routes)} parameters{extra}, {total:,} elements")
            by_reason: Counter[str] = Counter()
            elements: Counter[str] = Counter()
            for route in routes:
                by_reason[route.reason] += 1
                elements[route.reason] += route.numel
            lines.extend(
                f"  {count:4d} x {reason}: {elements[reason]:,} elements"
                for reason, count in by_reason.most_common()
            )
        return "\n".join(lines)

    def require_matrices(self) -> str | None:
        """Return a warning where rules left nothing to Muon, None where it has work.

        Raises:
            ValueError: the model has no matrix at all, or nothing that trains.
        """
        if any(r.is_muon for r in self.routes.values()):
            return None
        if not self.routes:
            raise ValueError("DMuon: no parameter of the model requires a gradient")
        ruled_out = [r for r in self.routes.values() if r.ruled_out]
        if not ruled_out and not self.num_frozen_matrices:
            raise ValueError(
                f"DMuon: none of the {len(self.routes)} trainable parameters is a matrix, so there "
                'is nothing for Muon to train; use "type": "AdamW"'
            )
        reasons = Counter(r.reason for r in ruled_out)
        if self.num_frozen_matrices:
            reasons["frozen (requires_grad is false)"] = self.num_frozen_matrices
        told = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        return (
            "NO matrix is trained with Muon: every one was ruled out, so this run is plain "
            f"AdamW. Ruled out: {told}"
        )


def route_parameters(
    model: nn.Module, config: DMuonConfig, tags: Mapping[int, bool] | None = None
) -> RoutingTable:
    """Decide for every trainable parameter of `model`.

    Args:
        tags: id(parameter) -> `use_muon` of the caller's parameter group, over the parameter's own.

    Raises:
        ValueError: a pattern matches nothing, or asks for what cannot be a matrix.
    """
    named = {clean_name(name): p for name, p in model.named_parameters()}
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    _require_patterns_match(config, trainable)
    owners = _owner_modules(model)
    heads = _output_heads(model)
    routes = {}
    for name, param in trainable.items():
        tag = (tags or {}).get(id(param), getattr(param, "use_muon", None))
        routes[name] = _route(name, param, owners.get(id(param), []), heads, config, tag)
    frozen = [p for p in named.values() if not p.requires_grad and len(layer_shape(p)) >= 2]
    return RoutingTable(routes=routes, num_frozen_matrices=len(frozen))


def clean_name(name: str) -> str:
    """Strip torch.compile's wrapper from a parameter's name."""
    return name.replace("_orig_mod.", "")


def layer_shape(param: torch.Tensor) -> tuple[int, ...]:
    """The layer's shape: zero.Init keeps it aside and leaves `param.shape == (0,)`."""
    return tuple(getattr(param, "ds_shape", param.shape))


def _owner_modules(model: nn.Module) -> dict[int, list[nn.Module]]:
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), []).append(module)
    return owners


def _output_heads(model: nn.Module) -> set[int]:
    """Ids of parameters of whatever any submodule names as its output head."""
    heads: set[int] = set()
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        if getter is None:
            continue
        try:
            head = getter()
        except (NotImplementedError, AttributeError):
            continue
        if isinstance(head, nn.Module):
            heads.update(id(p) for p in head.parameters())
    return heads


def _route(
    name: str,
    param: nn.Parameter,
    owners: list[nn.Module],
    heads: set[int],
    config: DMuonConfig,
    tag: bool | None,
) -> Route:
    shape = layer_shape(param)
    placements, why_not = _matrices(name, shape, owners, config)
    reason = _ruled_out_by(name, param, shape, owners, heads) if placements else None
    forced = _first_match(name, config.include)
    if forced is not None and not placements:
        raise ValueError(f"include {forced!r} matches {name} of shape {shape}: {why_not}")
    if tag is True and forced is None:
        forced = "use_muon = True" if placements else None
    if forced is not None:
        reason = None
    elif tag is False and placements:
        reason = "tagged use_muon = False"
    size_mib = torch.Size(shape).numel() * 4 / _MIB
    if placements and config.adamw_above_mb is not None and size_mib > config.adamw_above_mb:
        reason = f"larger than adamw_above_mb = {config.adamw_above_mb:g}"
    excluded = _first_match(name, config.exclude)
    if excluded is not None and placements:
        reason = f"exclude {excluded!r}"
    if not placements:
        return Route(name=name, shape=shape, placements=(), reason=why_not)
    if reason is not None:
        return Route(name=name, shape=shape, placements=(), reason=reason, ruled_out=True)
    kind = _kind(shape, owners) if forced is None else f"included by {forced}"
    return Route(name=name, shape=shape, placements=placements, reason=kind)


def _ruled_out_by(
    name: str,
    param: nn.Parameter,
    shape: tuple[int, ...],
    owners: list[nn.Module],
    heads: set[int],
) -> str | None:
    """The rule that keeps a matrix-shaped parameter from Muon, if any: modules, then names."""
    if any(isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) for owner in owners):
        return "embedding" if len(owners) == 1 else "embedding tied to another module"
    if id(param) in heads:
        return "output head"
    parts = name.split(".")
    leaf, module = parts[-1], parts[-2] if len(parts) > 1 else ""
    if any(part.startswith(("lora_", "modules_to_save")) for part in parts):
        return "LoRA factor"
    if module in HEAD_NAMES or leaf in HEAD_NAMES:
        return "output head by name"
    if any("embed" in part.lower() for part in (leaf, module)) or {"wte", "wpe"} & {leaf, module}:
        return "embedding by name"
    if (module in _ROUTER_NAMES or leaf in _ROUTER_NAMES) and shape[0] < shape[-1]:
        return "router"
    if leaf == "A_log":
        return "state-space decay (A_log)"
    return None


def _kind(shape: tuple[int, ...], owners: list[nn.Module]) -> str:
    if any(isinstance(owner, _CONVOLUTIONS) for owner in owners):
        return "convolution, flattened to (out, in * kernel)"
    return "matrix" if len(shape) == 2 else f"{len(shape)}-D, one matrix per leading index"


def _matrices(
    name: str, shape: tuple[int, ...], owners: list[nn.Module], config: DMuonConfig
) -> tuple[tuple[Placement, ...], str]:
    """Return the parameter's logical matrices, or none and the reason."""
    if len(shape) < 2:
        return (), f"{len(shape)}-D"
    convolution = next((m for m in owners if isinstance(m, _CONVOLUTIONS)), None)
    if convolution is not None:
        if convolution.groups > 1:
            return (), "depthwise or grouped convolution"
        shape = (shape[0], torch.Size(shape[1:]).numel())
    elif any(isinstance(m, ParametrizationList) for m in owners):
        return (), "part of a parametrized weight"
    elif len(shape) == 3 and shape[0] == 1:
        return (), "a table with a leading dimension of 1"
    if len(shape) > 3:
        return (), f"{len(shape)}-D outside a convolution"
    stack, rows, cols = (1, *shape) if len(shape) == 2 else shape
    if min(rows, cols) < 2:
        return (), f"a side of {min(rows, cols)}"
    blocks = _row_blocks(name, rows, config)
    transposed = any(_is_transposed_linear(m) for m in owners)
    if transposed and len(blocks) > 1:
        raise ValueError(f"split of {name}: its outputs are columns (Conv1D), not rows")
    placements = []
    for index in range(stack):
        start = index * rows * cols
        for first, count in blocks:
            suffix = f"[{index}]" if stack > 1 else ""
            suffix += f"[rows {first}:{first + count}]" if len(blocks) > 1 else ""
            matrix = Matrix(name=name + suffix, rows=count, cols=cols, transposed=transposed)
            placements.append(Placement(matrix=matrix, offset=start + first * cols))
    return tuple(placements), ""


def _row_blocks(name: str, rows: int, config: DMuonConfig) -> list[tuple[int, int]]:
    """(first row, rows) of the matrices that `split` cuts a parameter into."""
    glob = _first_match(name, config.split)
    if glob is None or "experts" in config.split[glob]:
        return [(0, rows)]
    kind, value = next(iter(config.split[glob].items()))
    counts = list(value) if kind == "rows" else [rows // value] * value
    if sum(counts) != rows or min(counts) < 2:
        raise ValueError(
            f"split[{glob!r}] = {{{kind!r}: {value}}} does not cut the {rows} rows of {name} into "
            "blocks of at least 2 rows"
        )
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return list(zip(starts, counts, strict=True))


def _is_transposed_linear(module: nn.Module) -> bool:
    """Whether the module keeps its weight as (in, out): transformers' Conv1D, ConvTranspose."""
    if isinstance(module, _TRANSPOSED):
        return True
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return conv1d is not None and isinstance(module, conv1d)


def _first_match(name: str, globs: Iterable[str]) -> str | None:
    return next((glob for glob in globs if fnmatch.fnmatchcase(name, glob)), None)


def _require_patterns_match(config: DMuonConfig, trainable: dict[str, nn.Parameter]) -> None:
    for key in ("include", "exclude", "split"):
        for glob in getattr(config, key):
            if not any(fnmatch.fnmatchcase(name, glob) for name in trainable):
                near = difflib.get_close_matches(glob, trainable, n=1, cutoff=0.3)
                hint = f"; the nearest name is {near[0]!r}" if near else ""
                raise ValueError(
                    f"optimizer.params.{key}: {glob!r} matches no trainable parameter{hint}"
                )
