# SPDX-License-Identifier: Apache-2.0
"""Config file: the parts of a ds_config.json that a preview reads, checked by name.

DeepSpeed validates the rest of the file when a run starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from ds_muon.config import DMuonConfig, parse, require_stage
from ds_muon.plan.predict import ZeroSettings


class _Optimizer(BaseModel):
    type: str
    params: dict[str, Any] | None = None


class _Precision(BaseModel):
    enabled: bool | Literal["auto"] = False


class _Offload(BaseModel):
    device: str = "cpu"


class _Zero(BaseModel):
    stage: int = Field(0, ge=0, le=3)
    sub_group_size: float | Literal["auto"] = Field(1e9)
    round_robin_gradients: bool = False
    parameter_alignment: Any = None
    offload_optimizer: _Offload | None = None
    offload_param: _Offload | None = None


class _DataTypes(BaseModel):
    grad_accum_dtype: str | None = None


class ConfigFile(BaseModel):
    """What is read of ds_config.json; other keys are DeepSpeed's."""

    optimizer: _Optimizer
    zero_optimization: _Zero = _Zero()
    bf16: _Precision = _Precision()
    fp16: _Precision = _Precision()
    data_types: _DataTypes = _DataTypes()

    @property
    def params(self) -> DMuonConfig:
        """The parsed `optimizer.params`."""
        return parse(self.optimizer.params)

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
    def makes_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed replaces ZeRO-1's optimizer by its BF16_Optimizer."""
        bf16 = bool(self.bf16.enabled) and self.gradient_bytes == 4
        return bf16 and self.zero_optimization.stage == 1

    @property
    def zero_settings(self) -> ZeroSettings:
        """What decides the layout."""
        zero = self.zero_optimization
        aligned = 16 // (2 if self.low_precision else 4) if zero.parameter_alignment else 1
        return ZeroSettings(
            stage=zero.stage,
            round_robin_gradients=zero.round_robin_gradients,
            parameter_alignment=aligned,
            sub_group_size=10**9 if zero.sub_group_size == "auto" else int(zero.sub_group_size),
        )


def read_config(source: Path | dict[str, Any]) -> ConfigFile:
    """Read a ds_config.json, or an object of the same form.

    Raises:
        ValueError: names the file's key, the rule and the value.
    """
    if isinstance(source, Path):
        try:
            content = json.loads(source.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{source} is not JSON: {error}") from None
    else:
        content = source
    if not isinstance(content, dict):
        raise ValueError(f"{source} must hold a JSON object, not {content!r}")
    given = {key: value for key, value in content.items() if value is not None}
    try:
        found = ConfigFile.model_validate(given)
    except ValidationError as error:
        raise ValueError("\n".join(_one_line(item) for item in error.errors())) from None
    _require_usable(found)
    return found


def _one_line(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"])
    return f"{path}: {item['msg']}, got {item['input']!r}"


def _require_usable(found: ConfigFile) -> None:
    kind, zero = found.optimizer.type, found.zero_optimization
    if kind.lower() != "dmuon":
        raise ValueError(f'optimizer.type is {kind!r}, not "DMuon"')
    if zero.sub_group_size != "auto" and not zero.sub_group_size >= 1:
        raise ValueError(
            f"zero_optimization.sub_group_size must be at least 1, got {zero.sub_group_size:g}"
        )
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(zero, name)
        if offload is not None and offload.device != "none":
            raise ValueError(
                f"zero_optimization.{name}.device is {offload.device!r}, which DMuon does not "
                "support; remove it"
            )
    require_stage(found.params, zero.stage, bf16_optimizer=found.makes_bf16_optimizer)
