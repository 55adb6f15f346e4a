# SPDX-License-Identifier: Apache-2.0
"""Parameter groups: matrices, AdamW with decay, AdamW without, times the user's own groups.

Owns: the split, made before ZeRO flattens anything, and which setting wins: the configuration,
then muon_lr / adam_lr, then what the user's group says.
Never does: decide a route (routing/), or know of ZeRO.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_muon.config import DMuonConfig
from ds_muon.optimizer import ADAMW, MUON
from ds_muon.routing import Route, RoutingTable


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedGroup:
    """One parameter group before DeepSpeed wraps it.

    Attributes:
        options: everything of torch's group but the parameters.
        parameters, routes: in the same order.
    """

    kind: str
    options: Mapping[str, Any]
    parameters: tuple[nn.Parameter, ...]
    routes: tuple[Route, ...]

    def as_param_group(self) -> dict[str, Any]:
        """Return the group as torch.optim wants it."""
        return {**self.options, "params": list(self.parameters)}


Incoming = list[tuple[dict[str, Any], list[nn.Parameter]]]
# What a caller's group may set; any other key of the configuration would be ignored there.
_GROUP_KEYS = frozenset({"lr", "weight_decay", "betas", "eps", "momentum"})


def incoming_groups(model_parameters: Iterable[Any]) -> Incoming:
    """Return the caller's groups, each with its settings; loose parameters form one without any.

    Raises:
        ValueError: a group sets a key that it cannot.
    """
    loose: list[nn.Parameter] = []
    groups: Incoming = []
    for item in model_parameters:
        if isinstance(item, Mapping):
            settings = {key: value for key, value in item.items() if key != "params"}
            _require_group_keys(settings)
            members = item["params"]
            single = isinstance(members, nn.Parameter)
            groups.append((settings, [members] if single else list(members)))
        else:
            loose.append(item[1] if isinstance(item, tuple) else item)
    return [({}, loose), *groups] if loose else groups


def group_tags(incoming: Incoming) -> dict[int, bool]:
    """id(parameter) -> `use_muon`, of groups that set it."""
    return {
        id(p): bool(settings["use_muon"])
        for settings, parameters in incoming
        if "use_muon" in settings
        for p in parameters
    }


def _require_group_keys(settings: Mapping[str, Any]) -> None:
    reserved = {"kind", "lr_ratio", *DMuonConfig.model_fields} - _GROUP_KEYS
    for key in settings:
        if key in reserved:
            raise ValueError(
                f"DMuon: a parameter group sets {key!r}, which belongs in optimizer.params; it "
                f"may set {', '.join(sorted(_GROUP_KEYS))}, name and use_muon"
            )


def build_groups(
    incoming: Incoming,
    names: Mapping[int, str],
    table: RoutingTable,
    config: DMuonConfig,
) -> tuple[RoutedGroup, ...]:
    """Split the caller's parameters or groups.

    Args:
        incoming: of `incoming_groups`.
        names: id(parameter) -> cleaned name, of the model's parameters.

    Raises:
        ValueError: a parameter is not the model's, or two groups have one name.
    """
    groups: list[RoutedGroup] = []
    for index, (given, parameters) in enumerate(incoming):
        routed = [(p, table.routes[_name_of(p, names)]) for p in parameters if p.requires_grad]
        prefix = f"{given.get('name', f'group{index}')}." if given else ""
        parts = {
            (MUON, "muon"): [(p, r) for p, r in routed if r.is_muon],
            (ADAMW, "adamw"): [
                (p, r) for p, r in routed if not r.is_muon and not _undecayed(r, given, config)
            ],
            (ADAMW, "adamw_no_decay"): [
                (p, r) for p, r in routed if not r.is_muon and _undecayed(r, given, config)
            ],
        }
        for (kind, label), members in parts.items():
            if members:
                options = _options(kind, label == "adamw_no_decay", given, config)
                options["name"] = prefix + label
                groups.append(
                    RoutedGroup(
                        kind=kind,
                        options=options,
                        parameters=tuple(p for p, _ in members),
                        routes=tuple(r for _, r in members),
                    )
                )
    names_given = [group.options["name"] for group in groups]
    if len(set(names_given)) < len(names_given):
        twice = next(name for name in names_given if names_given.count(name) > 1)
        raise ValueError(
            f"DMuon: two parameter groups are named {twice.rsplit('.', 1)[0]!r}; checkpoints find "
            "groups by name, so give each its own, or none"
        )
    return tuple(groups)


def _name_of(parameter: nn.Parameter, names: Mapping[int, str]) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise ValueError(
            f"DMuon: a parameter of shape {tuple(parameter.shape)} in model_parameters is not a "
            "parameter of the model given to deepspeed.initialize"
        )
    return name


def _undecayed(route: Route, given: Mapping[str, Any], config: DMuonConfig) -> bool:
    if "weight_decay" in given or config.no_decay == "none":
        return False
    if config.no_decay == "auto":
        return len(route.shape) <= 1
    return any(fnmatch.fnmatchcase(route.name, glob) for glob in config.no_decay)


def _options(
    kind: str, undecayed: bool, given: Mapping[str, Any], config: DMuonConfig
) -> dict[str, Any]:
    own_lr = config.muon_lr if kind == MUON else config.adam_lr
    own_decay = config.adam_weight_decay if kind == ADAMW else None
    options: dict[str, Any] = {
        "kind": kind,
        "lr": config.lr,
        "lr_ratio": 1.0 if own_lr is None else own_lr / config.lr,
        "weight_decay": config.weight_decay if own_decay is None else own_decay,
    }
    if undecayed:
        options["weight_decay"] = 0.0
    if "lr" in given:
        options["lr_ratio"] = 1.0
    return {**options, **{key: value for key, value in given.items() if key != "use_muon"}}
