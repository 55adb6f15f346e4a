# SPDX-License-Identifier: Apache-2.0
"""Config file: the parts of a ds_config.json that a preview reads, checked by name.

DeepSpeed validates the rest of the file when a run starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from ds_muon.config import (
    FILLED_BY_TRAINER,
    DMuonConfig,
    own_reduction,
    parse,
    require_stage,
)
from ds_muon.plan.predict import ZeroSettings


class _Optimizer(BaseModel):
    type: str
    params: dict[str, Any] | None = None


class _Precision(BaseModel):
    enabled: bool | Literal["auto"] = False


class _Offload(BaseModel):
    device: Literal["none", "cpu", "nvme"] = "none"
    ratio: float = 1.0
    super_offload: bool = False


class _Zero(BaseModel):
    stage: int = Field(0, ge=0, le=3)
    sub_group_size: float | Literal["auto"] = Field(1e9)
    round_robin_gradients: bool = False
    reduce_scatter: bool = True
    contiguous_gradients: bool = True
    parameter_alignment: Any = None
    offload_optimizer: _Offload | None = None
    offload_param: _Offload | None = None

    def offloads(self, which: str) -> _Offload:
        """The section of `offload_optimizer` or `offload_param`, `which` being the last word."""
        return getattr(self, f"offload_{which}") or _Offload()


class _DataTypes(BaseModel):
    grad_accum_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What a rank keeps on the host.

    Attributes:
        optimizer: master weights, their gradients and optimizer state.
        parameters: ZeRO-3's shards of the weights.
    """

    optimizer: bool = False
    parameters: bool = False


class ConfigFile(BaseModel):
    """What is read of ds_config.json; other keys are DeepSpeed's."""

    optimizer: _Optimizer
    zero_optimization: _Zero = _Zero()
    bf16: _Precision = _Precision()
    fp16: _Precision = _Precision()
    data_types: _DataTypes = _DataTypes()

    @property
    def params(self) -> DMuonConfig:
        """The parsed `optimizer.params`; what a Trainer fills stands at its default."""
        given = (self.optimizer.params or {}).items()
        filled = self.filled_by_trainer
        return parse({key: value for key, value in given if key not in filled})

    @property
    def filled_by_trainer(self) -> tuple[str, ...]:
        """Keys of `optimizer.params` that wait for a Trainer's arguments."""
        given = self.optimizer.params or {}
        return tuple(key for key in FILLED_BY_TRAINER if given.get(key) == "auto")

    @property
    def low_precision(self) -> bool:
        """Whether weights are 16 bit; "auto" counts as bf16, which trainers choose."""
        return bool(self.bf16.enabled or self.fp16.enabled)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an accumulated gradient's element."""
        kind = self.data_types.grad_accum_dtype
        return {None: 2 if self.low_precision else 4, "fp32": 4}.get(kind, 2)

    @property
    def offload(self) -> Offload:
        """What stands on the host."""
        zero = self.zero_optimization
        return Offload(
            optimizer=zero.offloads("optimizer").device == "cpu" and zero.stage > 0,
            parameters=zero.offloads("param").device == "cpu" and zero.stage == 3,
        )

    @property
    def makes_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed replaces ZeRO-1's optimizer by its BF16_Optimizer."""
        bf16 = bool(self.bf16.enabled) and self.gradient_bytes == 4
        return bf16 and self.zero_optimization.stage == 1 and not self.offload.optimizer

    @property
    def own_reduction(self) -> str | None:
        """Why DeepSpeed itself reduces the gradients of ZeRO-1/2, if it does."""
        zero = self.zero_optimization
        return own_reduction(
            self.params,
            reduce_scatter=zero.reduce_scatter,
            contiguous_gradients=zero.contiguous_gradients or self.offload.optimizer,
            bf16_optimizer=self.makes_bf16_optimizer,
        )

    @property
    def zero_settings(self) -> ZeroSettings:
        """What decides the layout."""
        zero = self.zero_optimization
        aligned = 16 // (2 if self.low_precision else 4) if zero.parameter_alignment else 1
        return ZeroSettings(
            stage=zero.stage,
            round_robin_gradients=zero.round_robin_gradients,
            parameter_alignment=aligned,
            # 0, as in published files, closes a sub-group after every parameter, as 1 does.
            sub_group_size=10**9
            if zero.sub_group_size == "auto"
            else max(1, int(zero.sub_group_size)),
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a ds_config.json as it is.

    Raises:
        ValueError: names the file and why it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no JSON file: it is not text in UTF-8") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def read_config(source: Path | dict[str, Any]) -> ConfigFile:
    """Read a ds_config.json, or an object of the same form.

    Raises:
        ValueError: names the file's key, the rule and the value.
    """
    content = read_json(source) if isinstance(source, Path) else source
    given = {key: value for key, value in content.items() if value is not None}
    try:
        found = ConfigFile.model_validate(given)
    except ValidationError as error:
        raise ValueError("\n".join(_lines(error, given))) from None
    _require_usable(found)
    return found


def _lines(error: ValidationError, given: dict[str, Any]) -> Iterator[str]:
    """One line per key; its value may break the rules of several types at once."""
    rules: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    absent: set[str] = set()
    for item in error.errors():
        missing = item["type"] == "missing"
        path = ".".join(_keys(item["loc"], given, missing=missing))
        absent |= {path} if missing else set()
        object_wanted = item["type"] in ("model_type", "model_attributes_type", "dict_type")
        rule = "must be an object" if object_wanted else item["msg"]
        rules.setdefault(path, []).append(rule)
        values[path] = item["input"]
    for path, told in rules.items():
        got = "" if path in absent else f", got {json.dumps(values[path], default=str)}"
        yield f"{path}: {' or '.join(told)}{got}"


def _keys(loc: tuple[int | str, ...], given: Any, *, missing: bool) -> Iterator[str]:
    """The keys of the file in a place that pydantic names, without the types that it tried."""
    for part in loc:
        if not isinstance(given, dict) or (part not in given and not missing):
            return
        yield str(part)
        given = given.get(part)


def _require_usable(found: ConfigFile) -> None:
    kind, zero = found.optimizer.type, found.zero_optimization
    if kind.lower() != "dmuon":
        raise ValueError(f'optimizer.type is {kind!r}, not "DMuon"')
    if zero.sub_group_size != "auto" and not zero.sub_group_size >= 0:
        raise ValueError(
            f"zero_optimization.sub_group_size must not be negative, got {zero.sub_group_size:g}"
        )
    if found.bf16.enabled is True and found.fp16.enabled is True:
        raise ValueError(
            "bf16.enabled and fp16.enabled are both true, and training has one precision; set one "
            "of them to false"
        )
    _require_usable_offload(found)
    require_stage(found.params, zero.stage, bf16_optimizer=found.makes_bf16_optimizer)


def _require_usable_offload(found: ConfigFile) -> None:
    zero, params, offload = found.zero_optimization, found.params, found.offload
    for which in ("optimizer", "param"):
        if zero.offloads(which).device == "nvme":
            raise ValueError(
                f"zero_optimization.offload_{which}.device is 'nvme', which DMuon does not "
                "support; set it to cpu"
            )
    section = zero.offloads("optimizer")
    if offload.optimizer and (section.ratio != 1.0 or section.super_offload):
        raise ValueError(
            "zero_optimization.offload_optimizer.ratio must be 1.0 and super_offload false: DMuon "
            "supports neither partial offload nor SuperOffload"
        )
    if params.hsdp is not None and (offload.optimizer or offload.parameters):
        raise ValueError(
            "optimizer.params.hsdp does not go with zero_optimization.offload_optimizer or "
            "offload_param; remove one of them"
        )
    if params.param_source == "owner_broadcast" and offload.parameters:
        raise ValueError(
            "optimizer.params.param_source = owner_broadcast keeps matrices on the device, where "
            "zero_optimization.offload_param wants none; leave it at shards"
        )
