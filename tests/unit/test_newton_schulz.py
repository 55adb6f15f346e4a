# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_muon.config import parse
from ds_muon.ortho import recipes
from ds_muon.ortho.backends import Backend
from ds_muon.ortho.coefficients import COEFFICIENTS
from ds_muon.ortho.newton_schulz import orthogonalize
from ds_muon.ortho.recipes import DTYPES, RECIPES, resolve
from ds_muon.ortho.update import advance_momentum, apply_update, lr_factor, write_direction

SHAPES = [(24, 24), (24, 25), (24, 60), (60, 24), (2, 40), (40, 2)]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_svd(
    matrix: Tensor, triples: tuple[tuple[float, float, float], ...], divisor: float
) -> Tensor:
    """The same polynomials on the singular values, in float64."""
    m = matrix.double()
    u, s, vh = torch.linalg.svd(m / m.norm() / divisor, full_matrices=False)
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_fp32_agrees_with_the_svd(name: str, shape: tuple[int, int]) -> None:
    spec = resolve(parse({"ns_coefficients": name, "ns_dtype": "fp32", "ns_method": "standard"}))
    matrix = gaussian(*shape)
    expected = by_svd(matrix, spec.triples, spec.divisor)
    found = orthogonalize(matrix, spec).double()
    # fp32 rounding, lifted by a slope at zero of up to 8e4 (deepseek_v4) on these spectra.
    assert (found - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [n for n, s in COEFFICIENTS.items() if s.gram_restarts])
def test_the_gram_form_is_the_same_polynomial(name: str, shape: tuple[int, int]) -> None:
    for steps in COEFFICIENTS[name].gram_restarts:
        params = {"ns_coefficients": name, "ns_steps": steps, "ns_dtype": "fp32"}
        spec = resolve(parse({**params, "ns_method": "gram"}))
        assert spec.uses_gram(*shape) is (shape[0] != shape[1])
        matrix = gaussian(*shape)
        expected = by_svd(matrix, spec.triples, spec.divisor)
        found = orthogonalize(matrix, spec).double()
        assert (found - expected).norm() < 5e-3 * expected.norm()


# Gain of each (set, steps) for singular values in [1e-2, 1] of the normalised input, float64.
BANDS = {
    ("jordan", 5): (0.682, 1.134),
    ("you", 5): (0.978, 1.032),
    ("polar_express", 5): (0.846, 1.124),
    ("polar_express_kj", 5): (0.859, 1.141),
    ("polar_express_101", 5): (0.870, 1.124),
    ("polar_express_101", 8): (1.000, 1.000),
    ("cans", 5): (0.884, 1.120),
    ("qwen_express", 5): (0.860, 1.113),
    ("deepseek_v4", 10): (1.000, 1.001),
    ("jordan_polish", 7): (1.000, 1.000),
    ("cubic5", 5): (0.774, 1.300),
}
# Rounding of the table's last digit; for bf16 and fp16 also of the iterates of the last steps,
# whose units are 2^-8 and 2^-11: three products each round once in either direction.
SLACK = {"fp32": 1e-3, "fp16": 1e-3 + 6 * 2**-11, "bf16": 1e-3 + 6 * 2**-8}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("name", "steps"), BANDS)
def test_singular_values_land_in_the_band_of_the_set(name: str, steps: int, dtype: str) -> None:
    params = {"ns_coefficients": name, "ns_steps": steps, "ns_dtype": dtype}
    spec = resolve(parse({**params, "ns_method": "standard"}))
    u, _ = torch.linalg.qr(gaussian(48, 48))
    v, _ = torch.linalg.qr(gaussian(96, 96, seed=1))
    # Within the band's premise: after normalisation the spectrum runs from 0.01 to 0.25.
    matrix = u @ torch.diag(torch.linspace(0.05, 1.0, 48)) @ v[:48]
    values = torch.linalg.svdvals(orthogonalize(matrix, spec).float())
    low, high = BANDS[name, steps]
    assert values.min() > low - SLACK[dtype]
    assert values.max() < high + SLACK[dtype]


# "torch" reproduces an original that casts and guards before it normalises.
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "torch"])
@pytest.mark.parametrize("scale", [1e-36, 1e-25, 1e-12, 1e-8, 1.0, 1e8, 1e15, 1e20, 1e36])
def test_the_scale_of_the_input_does_not_matter(recipe: str, scale: float) -> None:
    spec = resolve(parse({"recipe": recipe, "ns_dtype": "fp32"}))
    matrix = gaussian(24, 40)
    base = orthogonalize(matrix, spec)
    assert torch.allclose(orthogonalize(matrix * scale, spec), base, rtol=0, atol=1e-5)


def test_momentum_that_decays_to_nothing_stays_finite() -> None:
    """A matrix whose gradient is zero for good: momentum runs through fp32's whole range."""
    spec = resolve(parse({}))
    leaf, buffer = torch.zeros(24 * 40), gaussian(24 * 40)
    grad, out = torch.zeros_like(buffer), torch.empty(24 * 40, dtype=spec.wire_dtype)
    for _ in range(2100):
        advance_momentum(buffer, grad, momentum=0.95)
        write_direction(out, buffer, grad, momentum=0.95, nesterov=True, rounded_to=spec.wire_dtype)
        update = orthogonalize(out.view(24, 40), spec).reshape(-1)
        apply_update(leaf, update, lr=1e-3, weight_decay=0.1, scale=1.0)
        assert float(update.float().norm()) < 1.2 * 24**0.5
    assert torch.isfinite(leaf).all()
    assert not update.any(), "the momentum never underflowed, the test shows nothing"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_in_zero_out_and_zero_rows(recipe: str, dtype: str) -> None:
    dtype = "bf16" if recipe == "torch" and dtype == "fp16" else dtype
    spec = resolve(parse({"recipe": recipe, "ns_dtype": dtype, "ns_method": "auto"}))
    assert torch.equal(orthogonalize(torch.zeros(8, 12), spec).float(), torch.zeros(8, 12))
    matrix = gaussian(8, 12)
    matrix[3] = 0
    found = orthogonalize(matrix, spec)
    assert torch.isfinite(found).all()
    assert torch.equal(found[3].float(), torch.zeros(12))
    assert found.dtype == spec.update_dtype


@pytest.mark.parametrize("params", [{}, {"ns_dtype": "fp32"}, {"ns_method": "gram"}])
def test_a_batch_is_its_matrices(params: dict) -> None:
    spec = resolve(parse(params))
    batch = gaussian(3, 16, 40)
    together = orthogonalize(batch, spec)
    for one, found in zip(batch, together, strict=True):
        assert torch.allclose(orthogonalize(one, spec).float(), found.float(), atol=2e-2)
    assert together.shape == batch.shape


def test_the_input_is_not_modified_and_other_ranks_are_refused() -> None:
    spec = resolve(parse({"ns_dtype": "fp32"}))
    matrix = gaussian(8, 8)
    copy = matrix.clone()
    orthogonalize(matrix, spec)
    assert torch.equal(matrix, copy)
    with pytest.raises(ValueError, match=r"\(2, 2, 2, 2\)"):
        orthogonalize(torch.zeros(2, 2, 2, 2), spec)


def test_emulated_products_round_like_native_ones() -> None:
    """The bf16 path of a CPU without bf16 instructions against torch's own bf16 products."""
    matrix = gaussian(24, 40)
    native = orthogonalize(matrix, resolve(parse({"recipe": "torch"}))).float()
    ours = orthogonalize(matrix, resolve(parse({"lr_scale": "original"}))).float()
    exact = orthogonalize(matrix, resolve(parse({"ns_dtype": "fp32"})))
    # Both are bf16: they differ from fp32 by a few percent, and not more from each other.
    assert (native - exact).norm() < 5e-2 * exact.norm()
    assert (ours - exact).norm() < 5e-2 * exact.norm()
    assert torch.equal(ours, ours.bfloat16().float())


def without_instructions() -> Any:
    """A CPU that multiplies fp32 only."""
    return mock.patch.object(
        recipes, "multiplies", lambda dtype, device: dtype == torch.float32 or device.type != "cpu"
    )


@pytest.mark.parametrize(
    ("params", "compute", "update", "gram", "restarts"),
    [
        ({}, "fp32", "bf16", True, ()),
        ({"ns_steps": 4}, "fp32", "bf16", False, None),
        ({"ns_coefficients": "you"}, "fp32", "bf16", True, (2,)),
        ({"ns_method": "gram"}, "fp32", "fp16", True, (3,)),
        ({"recipe": "deepspeed"}, "fp32", "fp16", True, (2,)),
        ({"recipe": "torch"}, "bf16", "bf16", False, None),
        ({"ns_dtype": "bf16"}, "bf16", "bf16", False, None),
        ({"ns_dtype": "fp32"}, "fp32", "fp32", True, (3,)),
    ],
)
def test_fp32_stands_in_where_a_cpu_lacks_the_recipes_products(
    params: dict, compute: str, update: str, gram: bool, restarts: tuple[int, ...] | None
) -> None:
    with without_instructions():
        found = resolve(parse(params), torch.device("cpu"))
        elsewhere = resolve(parse(params), torch.device("cuda"))
    assert (found.compute_dtype, found.update_dtype) == (DTYPES[compute], DTYPES[update])
    assert found.uses_gram(10, 40) is gram
    assert restarts is None or found.gram_restarts == restarts
    assert elsewhere == resolve(parse(params))
    assert elsewhere.compute_dtype == elsewhere.update_dtype == found.update_dtype
    assert elsewhere.wire_dtype == found.wire_dtype


def test_an_update_that_stays_is_rounded_like_one_that_travels() -> None:
    with without_instructions():
        spec = resolve(parse({}), torch.device("cpu"))
    backend = Backend(spec, torch.device("cpu"))
    for shape in ((24, 24), (60, 24)):
        x, matrix, scratch = backend.new_memory(shape)
        matrix.copy_(gaussian(*shape))
        update = backend.ready(x, matrix, scratch)()
        assert update.dtype == torch.float32
        assert torch.equal(update, update.bfloat16().float())


SPECTRA = {
    "gaussian": lambda k: 1 / k**0.1,
    "1/k": lambda k: 1 / k,
    "1/k^2": lambda k: 1 / k**2,
    "1/k^4": lambda k: 1 / k**4,
    "exponential": lambda k: torch.exp(-k / 8),
    "rank 8": lambda k: (k <= 8) + 1e-9,
    "rank 1 and noise": lambda k: torch.where(k == 1, 1.0, 1e-4),
}


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (192, 288)])
@pytest.mark.parametrize("kind", SPECTRA)
def test_fp32_without_restarts_is_far_closer_than_the_bf16_it_stands_in_for(
    kind: str, shape: tuple[int, int]
) -> None:
    n, m = shape
    u, _ = torch.linalg.qr(gaussian(n, n).double())
    v, _ = torch.linalg.qr(gaussian(m, n, seed=1).double())
    k = torch.arange(1, n + 1)
    matrix = (u @ torch.diag(SPECTRA[kind](k).double()) @ v.mT).float()
    with without_instructions():
        spec = resolve(parse({}), torch.device("cpu"))
    expected = by_svd(matrix, spec.triples, spec.divisor)
    in_fp32 = replace(spec, update_dtype=torch.float32)
    gap = (orthogonalize(matrix, in_fp32).double() - expected).norm()
    bf16_gap = (orthogonalize(matrix, resolve(parse({}))).double() - expected).norm()
    assert gap < 0.1 * bf16_gap
    rounded = orthogonalize(matrix, spec)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, orthogonalize(matrix, in_fp32).bfloat16())


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"ns_coefficients": "aol"}, "aol"),
        ({"ns_coefficients": "jordann"}, "valid sets"),
        ({"ns_coefficients": "you", "ns_steps": 4}, "schedule"),
        ({"ns_method": "gram", "ns_dtype": "bf16"}, "bf16"),
        ({"ns_method": "gram", "ns_coefficients": "cans"}, "no restart"),
        ({"ns_method": "gram", "ns_coefficients": "qwen_express"}, "no restart"),
        ({"ns_method": "gram", "ns_steps": 6}, "no restart"),
        ({"recipe": "torch", "ns_dtype": "fp16"}, "casts before"),
    ],
)
def test_unsafe_pairs_are_refused(params: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve(parse(params))


def test_auto_takes_the_gram_form_only_where_it_is_safe_and_pays() -> None:
    assert not resolve(parse({})).uses_gram(10, 100)
    for dtype in ("fp16", "fp32"):
        spec = resolve(parse({"ns_dtype": dtype}))
        assert spec.uses_gram(10, 15)
        assert not spec.uses_gram(10, 14)
        assert not resolve(parse({"ns_dtype": dtype, "ns_coefficients": "cans"})).uses_gram(1, 9)


def test_dtypes_follow_the_contract() -> None:
    for params, compute, wire in (
        ({}, torch.bfloat16, torch.bfloat16),
        ({"ns_dtype": "fp16"}, torch.float16, torch.bfloat16),
        ({"ns_dtype": "fp32"}, torch.float32, torch.float32),
        ({"ns_method": "gram"}, torch.float16, torch.bfloat16),
        ({"recipe": "deepspeed"}, torch.float16, torch.bfloat16),
        ({"recipe": "deepspeed", "ns_method": "standard"}, torch.bfloat16, torch.bfloat16),
        ({"wire_dtype": "fp32"}, torch.bfloat16, torch.float32),
    ):
        spec = resolve(parse(params))
        assert (spec.compute_dtype, spec.wire_dtype) == (compute, wire), params


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_and_direction(dtype: torch.dtype, nesterov: bool) -> None:
    buffer, grad = gaussian(9).to(dtype), gaussian(9, seed=1)
    expected = 0.9 * buffer.float() + 0.1 * grad
    advance_momentum(buffer, grad, momentum=0.9)
    assert buffer.dtype == dtype
    assert torch.allclose(buffer.float(), expected, atol=1e-6 if dtype == torch.float32 else 1e-2)
    out = torch.empty(9, dtype=torch.bfloat16)
    write_direction(out, buffer, grad, momentum=0.9, nesterov=nesterov, rounded_to=out.dtype)
    wanted = 0.9 * buffer.float() + 0.1 * grad if nesterov else buffer.float()
    assert torch.equal(out, wanted.bfloat16()) or torch.allclose(out.float(), wanted, rtol=2**-7)


def test_the_step_is_decoupled_decay_then_update() -> None:
    leaf, update = gaussian(5), gaussian(5, seed=1)
    expected = leaf * (1 - 0.1 * 0.5) - 0.1 * 2.0 * update
    apply_update(leaf, update, lr=0.1, weight_decay=0.5, scale=2.0)
    assert torch.allclose(leaf, expected)


def test_lr_factors() -> None:
    assert lr_factor("match_rms_adamw", 16, 4) == pytest.approx(0.8)
    assert lr_factor("match_rms_adamw", 4, 16) == pytest.approx(0.8)
    assert (lr_factor("original", 16, 4), lr_factor("original", 4, 16)) == (2.0, 1.0)
    assert (lr_factor("spectral", 16, 4), lr_factor("unit_rms_norm", 4, 16)) == (4.0, 0.5)
    with pytest.raises(ValueError, match="unknown"):
        lr_factor("other", 1, 1)
