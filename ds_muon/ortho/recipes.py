# SPDX-License-Identifier: Apache-2.0
"""Recipes: published sets of choices, and the one resolved record that the math runs on.

Owns: the recipe table and how a configuration overrides it.
Never does: touch a tensor.
Read next: newton_schulz.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ds_muon.config import DMuonConfig
from ds_muon.ortho.coefficients import Triple, coefficient_set
from ds_muon.ortho.instructions import multiplies

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
# Without symmetric kernels the Gram form needs fewer flops from this long/short side ratio on.
GRAM_PAYS_FROM = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A published set of choices.

    Attributes:
        normalise_in: "fp32" divides by the norm before the cast to the compute dtype, so the
            scale of the input never matters; "compute" casts first, as some originals do.
        guard: how `eps` keeps a zero matrix from dividing by zero: added, or a lower clamp.
        divisor: X is divided by it after normalisation.
        gram_restarts: overrides the coefficient table where the original did.
        native_products: always the device's own products in the compute dtype (bit parity with
            an original), never fp32 products rounded to it.
    """

    coefficients: str
    steps: int
    nesterov: bool
    lr_scale: str
    ns_method: Literal["auto", "standard", "gram"] = "auto"
    ns_dtype: str = "bf16"
    normalise_in: Literal["fp32", "compute"] = "fp32"
    guard: Literal["add", "clamp"] = "clamp"
    eps: float = 1e-30
    divisor: float = 1.0
    gram_restarts: tuple[int, ...] | None = None
    native_products: bool = False


RECIPES: dict[str, Recipe] = {
    # Moonlight, https://arxiv.org/abs/2502.16982
    "moonlight": Recipe(coefficients="jordan", steps=5, nesterov=True, lr_scale="match_rms_adamw"),
    # https://kellerjordan.github.io/posts/muon/
    "keller": Recipe(coefficients="jordan", steps=5, nesterov=True, lr_scale="original"),
    # torch.optim.Muon, bit for bit
    "torch": Recipe(
        coefficients="jordan",
        steps=5,
        nesterov=True,
        lr_scale="original",
        ns_method="standard",
        normalise_in="compute",
        eps=1e-7,
        native_products=True,
    ),
    # DeepSpeed's built-in update (0.19.8), without its clipping of the orthogonalised matrix
    "deepspeed": Recipe(
        coefficients="jordan",
        steps=5,
        nesterov=True,
        lr_scale="original",
        ns_method="gram",
        ns_dtype="fp16",
        guard="add",
        eps=1e-7,
        gram_restarts=(2,),
    ),
    # https://github.com/microsoft/dion
    "dion": Recipe(
        coefficients="polar_express_kj",
        steps=5,
        nesterov=False,
        lr_scale="unit_rms_norm",
        guard="add",
        eps=1e-8,
        divisor=1.02,
    ),
    # Megatron-core / NVIDIA Emerging-Optimizers
    "megatron": Recipe(coefficients="you", steps=5, nesterov=False, lr_scale="spectral", eps=1e-15),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OrthoSpec:
    """Everything the orthogonalisation of one matrix depends on besides the matrix.

    Attributes:
        triples: (a, b, c) per step.
        gram_from: long/short side ratio from which the Gram form is used; None: never.
        gram_restarts: steps before which the Gram form recomputes X X^T.
        compute_dtype: dtype of the iterates.
        update_dtype: dtype of the update that travels back.
        wire_dtype: dtype every momentum piece is rounded to, moved or not.
    """

    triples: tuple[Triple, ...]
    gram_from: float | None
    gram_restarts: tuple[int, ...]
    compute_dtype: torch.dtype
    update_dtype: torch.dtype
    wire_dtype: torch.dtype
    normalise_in: str
    guard: str
    eps: float
    divisor: float
    nesterov: bool
    lr_scale: str
    native_products: bool

    def uses_gram(self, rows: int, cols: int) -> bool:
        """Whether a (rows, cols) matrix is iterated in the Gram form."""
        ratio = max(rows, cols) / min(rows, cols)
        return self.gram_from is not None and ratio > 1.0 and ratio >= self.gram_from


def resolve(config: DMuonConfig, device: torch.device | None = None) -> OrthoSpec:
    """Combine the recipe with the keys that override it.

    Args:
        device: where it runs. One without instructions for the recipe's dtype computes in fp32,
            unless the configuration names a dtype; what travels keeps the recipe's. None: one that
            has them.

    Raises:
        ValueError: unknown set, a schedule of another length, or an unsafe Gram pair.
    """
    recipe = RECIPES[config.recipe]
    name = config.ns_coefficients or recipe.coefficients
    own_set = name == recipe.coefficients
    coefficients = coefficient_set(name)
    default_steps = recipe.steps if own_set or coefficients.repeats else len(coefficients.triples)
    steps = config.ns_steps or default_steps
    method = config.ns_method or recipe.ns_method
    dtype = config.ns_dtype or _default_dtype(recipe, method)
    computed = dtype
    if config.ns_dtype is None and not recipe.native_products and device is not None:
        computed = dtype if multiplies(DTYPES[dtype], device) else "fp32"
    restarts = coefficients.gram_restarts.get(steps)
    if own_set and recipe.gram_restarts is not None:
        restarts = recipe.gram_restarts
    elif (computed, dtype) == ("fp32", "bf16"):
        restarts = coefficients.standin_restarts.get(steps, restarts)
    triples = coefficients.schedule(steps, name=name)
    if recipe.normalise_in == "compute" and dtype == "fp16":
        raise ValueError(
            f"recipe {config.recipe!r} casts before it normalises, and fp16 has no range for that; "
            "use ns_dtype 'bf16' or 'fp32', or another recipe"
        )
    if method == "gram":
        _require_safe_gram(name, steps, computed, restarts)
    gram_safe = restarts is not None and computed != "bf16"
    gram_from = {"standard": None, "gram": 1.0, "auto": GRAM_PAYS_FROM if gram_safe else None}
    wire = config.wire_dtype or ("fp32" if dtype == "fp32" else "bf16")
    return OrthoSpec(
        triples=triples,
        gram_from=gram_from[method],
        gram_restarts=restarts or (),
        compute_dtype=DTYPES[computed],
        update_dtype=DTYPES[dtype],
        wire_dtype=DTYPES[wire],
        normalise_in=recipe.normalise_in,
        guard=recipe.guard,
        eps=recipe.eps,
        divisor=recipe.divisor if own_set else 1.0,
        nesterov=recipe.nesterov if config.nesterov is None else config.nesterov,
        lr_scale=config.lr_scale or recipe.lr_scale,
        native_products=recipe.native_products,
    )


def _default_dtype(recipe: Recipe, method: str) -> str:
    """fp16 for a Gram form that was asked for, as DeepSpeed's `ns_method: gram` runs it."""
    if method == "gram" and recipe.ns_dtype == "bf16":
        return "fp16"
    if method == "standard" and recipe.ns_dtype == "fp16":
        return "bf16"
    return recipe.ns_dtype


def _require_safe_gram(name: str, steps: int, dtype: str, restarts: tuple[int, ...] | None) -> None:
    if dtype == "bf16":
        raise ValueError(
            "ns_method 'gram' with ns_dtype 'bf16' is refused: bf16 rounding of the Gram matrix "
            "grows to gains of 2 to 3; use ns_dtype 'fp16' or 'fp32', or ns_method 'standard'"
        )
    if restarts is None:
        raise ValueError(
            f"ns_method 'gram' with ns_coefficients {name!r} and ns_steps {steps} is refused: no "
            "restart keeps it stable; use ns_method 'standard' or another set, such as 'jordan'"
        )
