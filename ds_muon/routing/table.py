# SPDX-License-Identifier: Apache-2.0
"""Table: every trainable parameter's route, and the order of the rules that decide it.

The order: what the module is (embedding, output head, convolution), the shape, the name, then the
user's word (use_muon tags, include, adamw_above_mb, exclude; the later wins).
Never does: build parameter groups.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ds_muon.config import DMuonConfig
from ds_muon.plan.layout import Placement
from ds_muon.routing.matrices import Logical, first_match, logical_matrices
from ds_muon.routing.rules import ruled_out_by
from ds_muon.routing.sites import Site, sites_of

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
        ValueError: a pattern matches nothing, or asks for what cannot be a matrix, or
            `per_head_muon` finds no head.
    """
    sites = list(sites_of(model))
    trainable = {s.name: s for s in sites if s.parameter.requires_grad}
    _require_patterns_match(config, trainable)
    found = {name: logical_matrices(site, config) for name, site in trainable.items()}
    routes = {}
    for name, site in trainable.items():
        own = getattr(site.parameter, "use_muon", None)
        routes[name] = _route(site, found[name], config, (tags or {}).get(id(site.parameter), own))
    if config.per_head_muon and not any(
        logical.per_head and routes[name].is_muon for name, logical in found.items()
    ):
        raise ValueError(
            "optimizer.params.per_head_muon is true and no attention projection has heads that the "
            "model's config confirms; cut by hand with split (docs/routing.md), or remove the key"
        )
    frozen = [s for s in sites if not s.parameter.requires_grad and len(s.shape) >= 2]
    return RoutingTable(routes=routes, num_frozen_matrices=len(frozen))


def _route(site: Site, logical: Logical, config: DMuonConfig, tag: bool | None) -> Route:
    name, shape, placements = site.name, site.shape, logical.placements
    reason = ruled_out_by(site) if placements else None
    forced = first_match(name, config.include)
    if forced is not None and not placements:
        raise ValueError(f"include {forced!r} matches {name} of shape {shape}: {logical.why_not}")
    if tag is True and forced is None:
        forced = "use_muon = True" if placements else None
    _require_split_is_used(site, logical.why_not or (None if forced else reason), config)
    if forced is not None:
        reason = None
    elif tag is False and placements:
        reason = "tagged use_muon = False"
    size_mib = torch.Size(shape).numel() * 4 / _MIB
    if placements and config.adamw_above_mb is not None and size_mib > config.adamw_above_mb:
        reason = f"larger than adamw_above_mb = {config.adamw_above_mb:g}"
    excluded = first_match(name, config.exclude)
    if excluded is not None and placements:
        reason = f"exclude {excluded!r}"
    if not placements:
        return Route(name=name, shape=shape, placements=(), reason=logical.why_not)
    if reason is not None:
        return Route(name=name, shape=shape, placements=(), reason=reason, ruled_out=True)
    kind = logical.kind if forced is None else f"included by {forced}"
    return Route(name=name, shape=shape, placements=placements, reason=kind)


def _require_split_is_used(site: Site, why_not: str | None, config: DMuonConfig) -> None:
    """Refuse to cut what a rule keeps from Muon; `none` asks for nothing that it has not."""
    glob = first_match(site.name, config.split)
    if glob is None or why_not is None or "none" in config.split[glob]:
        return
    raise ValueError(
        f"optimizer.params.split[{glob!r}] = {json.dumps(config.split[glob])} matches {site.name} "
        f"of shape {site.shape}, which AdamW trains ({why_not}); narrow the glob, or name the "
        "parameter in include where it is a matrix"
    )


def _require_patterns_match(config: DMuonConfig, trainable: Mapping[str, Site]) -> None:
    for key in ("include", "exclude", "split"):
        for glob in getattr(config, key):
            if not any(fnmatch.fnmatchcase(name, glob) for name in trainable):
                near = difflib.get_close_matches(glob, trainable, n=1, cutoff=0.3)
                hint = f"; the nearest name is {near[0]!r}" if near else ""
                raise ValueError(
                    f"optimizer.params.{key}: {glob!r} matches no trainable parameter{hint}"
                )
    used = {first_match(name, config.split) for name in trainable}
    for glob in config.split:
        if glob not in used:
            raise ValueError(
                f"optimizer.params.split: the first glob that matches a parameter cuts it, and all "
                f"that {glob!r} matches is taken by globs before it; put it before them"
            )
