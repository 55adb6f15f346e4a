# SPDX-License-Identifier: Apache-2.0
"""The configuration contract: what may stand in ds_config.json under `optimizer.params`.

Owns: names, types, defaults, units and the error texts of every key.
Never does: resolve a recipe (ortho/recipes.py), look at a model or at DeepSpeed.
Read next: ortho/recipes.py.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

RecipeName = Literal["moonlight", "keller", "torch", "deepspeed", "dion", "megatron"]
DtypeName = Literal["bf16", "fp16", "fp32"]
LrScaleName = Literal["match_rms_adamw", "original", "spectral", "unit_rms_norm"]
NsMethod = Literal["auto", "standard", "gram"]
NonNegative = Field(ge=0.0)
# Keys in which a Trainer puts its own arguments where ds_config.json says "auto".
FILLED_BY_TRAINER = ("lr", "betas", "eps", "weight_decay")


# What other optimizers and trainers keep beside lr, and where ds_config.json has it.
_ELSEWHERE = {
    "max_grad_norm": "gradient_clipping",
    "gradient_clipping": "gradient_clipping",
    "clip_grad": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    "warmup_num_steps": "scheduler.params.warmup_num_steps",
    "total_num_steps": "scheduler.params.total_num_steps",
}


class _Keys(BaseModel):
    """An object of ds_config.json whose keys are all known."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python, and pydantic with it, takes true for 1."""
        kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
        values = value if isinstance(value, (list, tuple)) else (value,)
        if {int, float} & kinds and bool not in kinds and any(type(v) is bool for v in values):
            raise ValueError("must be a number")
        return value


class HsdpConfig(_Keys):
    """Replicate x shard groups on ZeRO."""

    shard_size: int = Field(
        ge=1, strict=True, description="consecutive ranks that ZeRO partitions over"
    )
    publish: Literal["async", "sync"] = Field(
        "async", description="updates reach other replicas under the next forward, or in the step"
    )


class QkClipConfig(_Keys):
    """MuonClip on attention logits."""

    tau: float = Field(100.0, gt=0.0, description="logit above which a head is scaled")


class MetricsConfig(_Keys):
    """What a step took, per bucket and over all ranks."""

    every: int = Field(0, ge=0, description="optimizer steps between records; 0 = never")
    monitor: bool = Field(True, description="write to DeepSpeed's monitor, as it is configured")
    buckets: bool = Field(False, description="log a line per bucket on rank 0")


class DMuonConfig(_Keys):
    """`optimizer.params` of `"type": "DMuon"`, validated and frozen."""

    model_config = ConfigDict(protected_namespaces=(), allow_inf_nan=False)

    lr: float = Field(
        1e-3, ge=0.0, description="learning rate of both halves, RMS of an AdamW-like update"
    )
    weight_decay: float = Field(0.1, ge=0.0, description="decoupled decay of both halves, per lr")
    muon_lr: float | None = Field(
        None,
        ge=0.0,
        description="learning rate of the matrices, kept as a ratio to lr whatever a scheduler "
        "writes; logs show the shared lr",
    )
    adam_lr: float | None = Field(
        None, ge=0.0, description="learning rate of the AdamW half, likewise a ratio to lr"
    )
    adam_weight_decay: float | None = Field(None, ge=0.0, description="decay of the AdamW half")
    momentum: float = Field(0.95, ge=0.0, lt=1.0, description="momentum of the matrices (mu)")
    momentum_dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype of momentum_buffer")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW moment decay rates")
    eps: float = Field(1e-8, ge=0.0, description="AdamW denominator guard")
    adam_w_mode: bool = Field(True, description="true: AdamW; false: Adam with L2 decay")
    no_decay: Literal["auto", "none"] | tuple[str, ...] = Field(
        "auto", description='AdamW parameters without decay: "auto" = 1-D, globs, or "none"'
    )
    recipe: RecipeName = Field("moonlight", description="published set of choices for the matrices")
    nesterov: bool | None = Field(None, description="null = the recipe's")
    lr_scale: LrScaleName | None = Field(
        None, description="factor on lr by matrix shape; null = the recipe's"
    )
    ns_coefficients: str | None = Field(None, description="coefficient set; null = the recipe's")
    ns_steps: int | None = Field(
        None, ge=1, le=20, description="Newton-Schulz steps; null = the recipe's"
    )
    ns_method: NsMethod | None = Field(
        None, description="standard, gram, or auto (gram where it is safe and pays)"
    )
    ns_dtype: DtypeName | None = Field(
        None,
        description="compute dtype; null = the recipe's, or fp32 on a CPU without its instructions",
    )
    wire_dtype: Literal["bf16", "fp32"] | None = Field(
        None, description="dtype every momentum piece is rounded to; null = by ns_dtype"
    )
    ns_backend: Literal["auto", "eager", "compile", "graph", "kernels"] = Field(
        "auto",
        description="implementation of the iteration, compared with eager at start; auto = eager",
    )
    exchange: Literal["auto", "all_to_all", "all_gather", "broadcast", "p2p"] = Field(
        "auto", description="how pieces travel to their owner and back"
    )
    owner_scope: Literal["balance", "straddlers"] = Field(
        "balance", description="any rank may own a matrix, or only ranks that hold a piece"
    )
    owner_costs: str | None = Field(
        None, description="path of a cost table from scripts/bench_newton_schulz.py --save"
    )
    workspace_mb: int = Field(512, ge=1, description="cap on exchange and NS buffers, MiB per rank")
    max_inflight_buckets: int = Field(
        1, ge=1, le=2, description="2: exchange of the next bucket under Newton-Schulz of this one"
    )
    preallocate_workspace: bool = Field(True, description="keep the working memory between steps")
    reshard_after_forward: bool | None = Field(
        None,
        description="ZeRO-3 only: true frees matrices after each forward and backward (Z3), "
        "false keeps them until the step (Z2); null = ZeRO's own",
    )
    param_source: Literal["shards", "owner_broadcast"] = Field(
        "shards",
        description="ZeRO-3 only: gather matrices from shards, or packed from their owners",
    )
    hide_param_gather: bool = Field(
        False, description="ZeRO-1/2 only: run the parameter gather under the next forward"
    )
    reduce_scatter_v: bool = Field(
        True,
        description="ZeRO-1/2: one reduce_scatter per bucket of gradients (gloo: messages) to the "
        "ranks that keep them; false = DeepSpeed's own reduction",
    )
    hsdp: HsdpConfig | None = Field(
        None, description='ZeRO-1/2/3 over rows of ranks that are replicas: {"shard_size": 8}'
    )
    include: tuple[str, ...] = Field((), description="globs: parameters to train with Muon")
    exclude: tuple[str, ...] = Field((), description="globs: parameters to train with AdamW; wins")
    split: dict[str, Any] = Field(
        {},
        description="glob -> how to cut a parameter into matrices, instead of what is recognised: "
        '{"rows": [..]} or {"cols": [..]}, blocks as stored; {"heads": n}, equal blocks of '
        'outputs; {"interleaved": [..]}, outputs in turn; {"none": true}, whole; '
        '{"experts": true}, whole per leading index',
    )
    adamw_above_mb: float | None = Field(
        None, gt=0.0, description="matrices above this size (fp32 MiB) go to AdamW"
    )
    qk_clip: QkClipConfig | None = Field(
        None, description='MuonClip: {"tau": 100} bounds attention logits after every step'
    )
    verify_every: int = Field(0, ge=0, description="steps between self-checks; 0 = never")
    metrics: MetricsConfig = Field(
        MetricsConfig(), description='{"every": k}: times, memory, balance and norms, every k steps'
    )
    amsgrad: Literal[False] = Field(False, description="DeepSpeed AdamW's key; false only")
    bias_correction: Literal[True] = Field(True, description="DeepSpeed AdamW's key; true only")
    per_head_muon: bool = Field(
        False, description="the built-in's key: queries, keys and values one matrix per head"
    )
    torch_adam: bool = Field(
        True, description="the built-in's key; the AdamW half is torch's either way"
    )
    fp32_optimizer_states: bool | None = Field(
        None, description="the built-in's key; AdamW moments are fp32 either way"
    )

    @model_validator(mode="after")
    def _check(self) -> DMuonConfig:
        for beta in self.betas:
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"betas must each lie in [0, 1), got {list(self.betas)}")
        overrides = [k for k in ("muon_lr", "adam_lr") if getattr(self, k) is not None]
        if overrides and self.lr == 0.0:
            raise ValueError(
                f"{overrides[0]} is kept as a ratio to lr so that schedulers preserve it, "
                "which lr = 0.0 does not allow; set lr to the larger of the two"
            )
        for glob, rule in self.split.items():
            _check_split(glob, rule)
        return self


def require_stage(config: DMuonConfig, stage: int, *, bf16_optimizer: bool) -> None:
    """Refuse keys that mean nothing at a ZeRO stage.

    Args:
        bf16_optimizer: DeepSpeed replaces ZeRO-1's optimizer by its BF16_Optimizer.

    Raises:
        ValueError: names the key, the rule, the stage and the remedy.
    """
    if config.reshard_after_forward is not None and stage != 3:
        raise ValueError(
            f"optimizer.params.reshard_after_forward = {_as_json(config.reshard_after_forward)} "
            f"says when ZeRO-3 frees matrices, and zero_optimization.stage is {stage}; remove the "
            "key or use stage 3"
        )
    if config.param_source != "shards" and stage != 3:
        raise ValueError(
            f"optimizer.params.param_source = {_as_json(config.param_source)} says where ZeRO-3 "
            f"takes gathered matrices from, and zero_optimization.stage is {stage}; remove the key "
            "or use stage 3"
        )
    if config.hsdp is not None and stage not in (1, 2, 3):
        raise ValueError(
            "optimizer.params.hsdp replicates what ZeRO shards, and zero_optimization.stage is "
            f"{stage}; remove the key or use stage 1, 2 or 3"
        )
    for key, asked in (
        ("hsdp", config.hsdp is not None),
        ("hide_param_gather", config.hide_param_gather),
    ):
        if asked and bf16_optimizer:
            raise ValueError(
                f"optimizer.params.{key} needs ZeRO's own optimizer, and ZeRO-1 with bf16 and "
                "data_types.grad_accum_dtype = fp32 makes a BF16_Optimizer; remove the key, or "
                "data_types.grad_accum_dtype, or use stage 2"
            )
    if config.hide_param_gather and stage not in (1, 2):
        raise ValueError(
            "optimizer.params.hide_param_gather hides the gather at the end of ZeRO-1 and ZeRO-2 "
            f"steps, and zero_optimization.stage is {stage}; remove the key or use stage 1 or 2"
        )


def own_reduction(
    config: DMuonConfig, *, reduce_scatter: bool, contiguous_gradients: bool, bf16_optimizer: bool
) -> str | None:
    """Say why DeepSpeed reduces ZeRO-1/2's gradients itself; offload has contiguous ones always."""
    reasons = {
        "optimizer.params.reduce_scatter_v is false": not config.reduce_scatter_v,
        "BF16_Optimizer has a reduction of its own": bf16_optimizer,
        "zero_optimization.reduce_scatter is false": not reduce_scatter,
        "zero_optimization.contiguous_gradients is false": not contiguous_gradients,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _as_json(value: Any) -> str:
    return json.dumps(value.model_dump() if isinstance(value, BaseModel) else value, default=str)


def parse(params: Mapping[str, Any] | None) -> DMuonConfig:
    """Validate `optimizer.params`.

    Args:
        params: the JSON object; a null value takes its key's default, 0.0 and false are values.

    Raises:
        ValueError: names the key, the rule, the value and the remedy.
    """
    given = {key: value for key, value in dict(params or {}).items() if value is not None}
    known = list(DMuonConfig.model_fields)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(known)}"
            if key in _ELSEWHERE:
                hint = f"ds_config.json has it as {_ELSEWHERE[key]}, outside optimizer.params"
            raise ValueError(f"optimizer.params.{key} is not a key of DMuon; {hint}")
        if given[key] == "auto" and not _takes_auto(key):
            raise ValueError(
                f'optimizer.params.{key} is "auto" and nothing has filled it in (the HF Trainer '
                f"fills {', '.join(FILLED_BY_TRAINER)} only); write a value"
            )
    try:
        return DMuonConfig.model_validate(given)
    except ValidationError as error:
        raise ValueError("\n".join(_one_line(item, given) for item in error.errors())) from None


def _takes_auto(key: str) -> bool:
    return "auto" in _literals(DMuonConfig.model_fields[key].annotation)


def _kinds(annotation: Any) -> set[Any]:
    """Every type that an annotation is made of."""
    return {annotation}.union(*map(_kinds, get_args(annotation)))


def _literals(annotation: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    for arg in get_args(annotation):
        found.extend(_literals(arg) if get_args(arg) else [arg])
    return tuple(found)


def _one_line(item: Any, given: Mapping[str, Any]) -> str:
    where = [part for part in item["loc"] if part in given or isinstance(part, int)]
    message = item["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
    if not where:
        return f"optimizer.params: {message}"
    annotation = DMuonConfig.model_fields[where[0]].annotation
    known = list(_nested_fields(annotation))
    if item["type"] in ("model_type", "model_attributes_type"):
        keys = ", ".join(known)
        return f"optimizer.params.{where[0]} must be an object of {keys}; got {item['input']!r}"
    if known and len(item["loc"]) > 1:
        where.append(item["loc"][1])
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(where[1]), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(known)}"
            return f"optimizer.params.{where[0]}.{where[1]} is not a key of {where[0]}; {hint}"
    names = [c for c in _literals(annotation) if isinstance(c, str)]
    hint = ""
    if isinstance(item["input"], str) and names:
        near = difflib.get_close_matches(item["input"], names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
    path = ".".join(map(str, where))
    return f"optimizer.params.{path}: {message}, got {item['input']!r}{hint}"


def _nested_fields(annotation: Any) -> tuple[str, ...]:
    """Keys of an annotation that is an object of its own, or may be one."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return tuple(candidate.model_fields)
    return ()


_SPLIT_LISTS, _SPLIT_FLAGS = ("rows", "cols", "interleaved"), ("none", "experts")


def _check_split(glob: str, rule: Any) -> None:
    known = (*_SPLIT_LISTS, "heads", *_SPLIT_FLAGS)
    given = list(rule) if isinstance(rule, dict) else []
    if len(given) != 1 or given[0] not in known:
        unknown = next((key for key in given if key not in known), "")
        near = difflib.get_close_matches(unknown, known, n=1)
        raise ValueError(
            f'split[{glob!r}] must be one of {{"rows": [..]}}, {{"cols": [..]}}, {{"heads": n}}, '
            '{"interleaved": [..]}, {"none": true}, {"experts": true}, got '
            + _as_json(rule)
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    [(kind, value)] = rule.items()
    if kind in _SPLIT_LISTS:
        fits = isinstance(value, (list, tuple)) and value and all(map(_is_count, value))
        wanted = "a list of positive whole numbers"
    elif kind == "heads":
        fits, wanted = _is_count(value), "a positive whole number"
    else:
        fits, wanted = value is True, "true"
    if not fits:
        raise ValueError(f"split[{glob!r}].{kind} must be {wanted}, got {value!r}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0
