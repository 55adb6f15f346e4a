# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_muon.config import parse
from ds_muon.ortho import backends, products
from ds_muon.ortho.backends import (
    Backend,
    Capture,
    CompiledBackend,
    GraphBackend,
    choose_backend,
    require_same_updates,
    tolerance,
)
from ds_muon.ortho.kernels import KernelProducts
from ds_muon.ortho.newton_schulz import orthogonalize
from ds_muon.ortho.products import PanelProducts, Products
from ds_muon.ortho.recipes import OrthoSpec, resolve
from tests.harness.memory import peak_allocated

CPU = torch.device("cpu")
SHAPES = [(24, 24), (24, 60), (60, 24)]


def spec_of(**params: Any) -> OrthoSpec:
    return resolve(parse(params))


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [8, 16, 50])
def test_symmetric_products_in_panels(rows: int) -> None:
    x, c = gaussian(rows, 70), gaussian(rows, rows, seed=1)
    c = c + c.mT
    square = x @ x.mT
    counted = list[int]()

    def counting(real: Any) -> Any:
        def call(*args: Tensor, **kwargs: Any) -> Tensor:
            counted.append(args[-2].shape[0] * args[-1].numel())
            return real(*args, **kwargs)

        return call

    with (
        mock.patch.multiple(products, PANEL_ROWS=8, LEAST_WORK=0),
        mock.patch.object(torch, "mm", counting(torch.mm)),
        mock.patch.object(torch, "addmm", counting(torch.addmm)),
    ):
        products._panels.cache_clear()
        out = PanelProducts().symmetric_mm(x, x.mT, out=torch.empty(rows, rows))
        more = PanelProducts().symmetric_addmm(
            c, square, square, beta=0.5, alpha=0.1, out=torch.empty(rows, rows)
        )
    products._panels.cache_clear()
    assert torch.allclose(out, square, atol=1e-4)
    assert torch.allclose(more, 0.5 * c + 0.1 * square @ square, rtol=1e-4, atol=1e-2)
    off = ~torch.block_diag(*[torch.ones(8, 8)] * 7)[:rows, :rows].bool()
    assert rows == 50 or torch.equal(out * off, out.mT * off), "what lies above is a copy"
    share = sum(counted) / (rows * rows * (70 + rows))
    assert share == 1.0 if rows == 8 else 0.5 < share < 0.8


@pytest.mark.parametrize(
    ("shape", "calls"), [((128, 2048), 1), ((256, 256), 1), ((256, 512), 2), ((512, 512), 4)]
)
def test_a_product_is_cut_where_that_saves_time(shape: tuple[int, int], calls: int) -> None:
    with mock.patch.object(torch, "mm", wraps=torch.mm) as mm:
        PanelProducts().symmetric_mm(
            torch.zeros(shape), torch.zeros(shape).mT, out=torch.zeros(shape[0], shape[0])
        )
    assert mm.call_count == calls


@pytest.mark.parametrize("params", [{"ns_dtype": "fp32"}, {}, {"ns_dtype": "fp16"}])
@pytest.mark.parametrize("method", ["standard", "auto"])
def test_panels_change_the_last_bits_only(params: dict[str, Any], method: str) -> None:
    spec = spec_of(**params, ns_method=method)
    with mock.patch.multiple(products, PANEL_ROWS=8, LEAST_WORK=0):
        products._panels.cache_clear()
        found = [orthogonalize(gaussian(*s), spec, products=PanelProducts()) for s in SHAPES]
    products._panels.cache_clear()
    for shape, update in zip(SHAPES, found, strict=True):
        plain = orthogonalize(gaussian(*shape), spec, products=Products()).float()
        gap = (update.float() - plain).norm() / plain.norm()
        assert gap <= tolerance(spec.compute_dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [4, 5])
def test_the_torch_recipe_keeps_its_bits(shape: tuple[int, int], steps: int) -> None:
    """Products in the orientation of the original, which both buffers take after a step."""
    from torch.optim._muon import _zeropower_via_newtonschulz as original

    expected = original(gaussian(*shape), (3.4445, -4.7750, 2.0315), steps, 1e-7)
    found = orthogonalize(gaussian(*shape), spec_of(recipe="torch", ns_steps=steps))
    assert torch.equal(found, expected)


def captured(count: list[int]) -> Callable[[], Capture]:
    """Stand in for CUDA's recording: what it returns runs the same operators in the same memory."""

    def capture(run: Callable[[], Tensor]) -> Callable[[], None]:
        count.append(1)
        return lambda: None if run() is None else None

    return lambda: capture


@pytest.mark.parametrize("shape", SHAPES)
def test_a_graph_is_recorded_once_and_replayed_in_the_same_memory(shape: tuple[int, int]) -> None:
    spec, count = spec_of(ns_dtype="fp32"), list[int]()
    backend = GraphBackend(spec, CPU, captured(count))
    x, matrix, scratch = backend.new_memory(shape)
    for seed in range(3):
        matrix.copy_(gaussian(*shape, seed=seed))
        found = backend.ready(x, matrix, scratch)()
        assert torch.equal(found, Backend(spec, CPU).orthogonalize(gaussian(*shape, seed=seed)))
    assert len(count) == 1
    require_same_updates(backend, shape)


def test_a_backend_that_is_wrong_is_refused() -> None:
    spec = spec_of(ns_dtype="fp32")
    # A recording that misses its launches leaves the second result what it was, or half of it.
    stale = GraphBackend(spec, CPU, lambda: lambda run: lambda: None)
    with pytest.raises(ValueError, match=r'"graph" gives other bits.* 60 x 24 .*use "eager"'):
        require_same_updates(stale, (60, 24))

    class Near(Backend):
        name, exact, factor = "near", False, 1.0 + 1e-7

        def build(self, x: Tensor, matrix: Tensor, scratch: Tensor) -> Any:
            run = super().build(x, matrix, scratch)
            return lambda: run().mul_(self.factor)

    require_same_updates(Near(spec, CPU), (24, 60))
    Near.factor = 1.01
    with pytest.raises(ValueError, match="differs from eager by 0.01"):
        require_same_updates(Near(spec, CPU), (24, 60))
    Near.factor, Near.exact = 1.0 + 1e-6, True
    with pytest.raises(ValueError, match="differs from eager"):
        require_same_updates(Near(spec, CPU), (24, 60))


def test_kernels_form_the_symmetric_products_that_fit() -> None:
    calls: list[tuple[int, ...]] = []

    def gemm(a: Tensor, b: Tensor, *, out: Tensor, **rest: Any) -> None:
        calls.append(tuple(a.shape))
        if rest:
            torch.addmm(rest.pop("C"), a, b, out=out, **rest)
        else:
            torch.mm(a, b, out=out)

    spec = spec_of(ns_dtype="fp32", ns_method="standard")
    for shape in ((256, 264), (256, 260), (64, 64)):
        matrix = gaussian(*shape)
        found = orthogonalize(matrix, spec, products=KernelProducts(gemm))
        assert torch.equal(found, orthogonalize(matrix, spec, products=Products()))
    # X X^T of the first shape, and G G of the first two.
    assert calls.count((256, 264)) == 5
    assert calls.count((256, 256)) == 10
    assert len(calls) == 15


def test_what_a_device_cannot_run_is_refused_by_its_key() -> None:
    shapes = [(24, 24)]

    def choose(name: str, *, keeps_memory: bool = True, **params: Any) -> Backend:
        return choose_backend(name, spec_of(**params), CPU, shapes, keeps_memory=keeps_memory)

    assert type(choose("auto")) is type(choose("eager")) is Backend
    for name, words in (("graph", "CUDA graphs"), ("kernels", "NVIDIA GPU")):
        with pytest.raises(ValueError, match=f'ns_backend = "{name}".*{words}.*use "eager"'):
            choose(name)
    with pytest.raises(ValueError, match="preallocate_workspace"):
        choose("graph", keeps_memory=False)
    with pytest.raises(ValueError, match="torch"):
        choose("compile", recipe="torch")
    assert set(backends.BACKENDS) == {"eager", "compile", "graph", "kernels"}


def test_the_compiled_normalisation_needs_no_memory_of_a_matrix() -> None:
    backend = choose_backend("compile", spec_of(), CPU, [(48, 640)], keeps_memory=True)
    assert isinstance(backend, CompiledBackend)
    x, matrix, scratch = backend.new_memory((48, 640))
    matrix.copy_(gaussian(48, 640))
    backend.ready(x, matrix, scratch)()
    compiled = peak_allocated(lambda: backend._compiled(x, matrix, 1e-30, "clamp", 1.0))
    assert compiled < 4096 < matrix.numel() * 4
    for scale in (0.0, 1e-36, 1e36):
        found = backend.orthogonalize(scale * gaussian(48, 640))
        assert torch.isfinite(found.float()).all()
        assert bool(found.any()) is (scale > 0)
