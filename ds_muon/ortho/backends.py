# SPDX-License-Identifier: Apache-2.0
"""Backends: implementations of one orthogonalisation, of which a run uses one on all ranks.

Owns: how each is made, and the comparison with eager that it has to pass before it is used.
All of them iterate in the memory that the plan counted. What they take beside it:
- eager, kernels: the temporaries of an elementwise pass, which the plan counts too;
- compile: partial sums; the normalisation is one pass over the matrix without temporaries;
- graph: once more what eager takes, in a pool of its own, for as long as the graphs live.
Never does: choose by speed, since ranks would choose differently.
Read next: newton_schulz.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ds_muon.ortho.arithmetic import Arithmetic, arithmetic_for
from ds_muon.ortho.kernels import kernel_products
from ds_muon.ortho.memory import iterate_bytes, iterate_views
from ds_muon.ortho.newton_schulz import NewtonSchulz, products_for
from ds_muon.ortho.normalise import normalise, normalise_at_once
from ds_muon.ortho.recipes import OrthoSpec

Run = Callable[[], Tensor]
Shape = tuple[int, int]
Capture = Callable[[Run], Callable[[], None]]


def tolerance(dtype: torch.dtype) -> float:
    """Share of an update's norm by which another order of summation may move it.

    fp32: one rounding, times the slope of the polynomials at zero. Lower dtypes: the roundings of
    three products in each of about five steps, in either direction.
    """
    return 1e-3 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps


class Backend:
    """Eager: torch's operators, one after the other.

    Attributes:
        name: its value of `ns_backend`.
        exact: it gives the bits of eager.
    """

    name = "eager"
    exact = True

    def __init__(self, spec: OrthoSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.storage = arithmetic_for(spec, device).storage
        self._products = products_for(spec, device)
        self._ready: dict[tuple[int, Shape], Run] = {}

    def normalise(self, x: Tensor, matrix: Tensor, arithmetic: Arithmetic) -> None:
        """x <- matrix over its norm; see normalise.py."""
        normalise(x, matrix, self.spec, arithmetic)

    def build(self, x: Tensor, matrix: Tensor, scratch: Tensor) -> Run:
        """Return what orthogonalises the contents of `matrix`; see NewtonSchulz."""
        return NewtonSchulz(
            x, matrix, self.spec, scratch, products=self._products, normalise=self.normalise
        )

    def ready(self, x: Tensor, matrix: Tensor, scratch: Tensor) -> Run:
        """`build`, kept for memory that is used again until `forget`."""
        key = x.data_ptr(), (x.shape[0], x.shape[1])
        if key not in self._ready:
            self._ready[key] = self.build(x, matrix, scratch)
        return self._ready[key]

    def forget(self) -> None:
        """Let go of the memory that was prepared."""
        self._ready.clear()

    @torch.no_grad()
    def orthogonalize(self, matrix: Tensor) -> Tensor:
        """Orthogonalise one (rows, cols) matrix in new memory, as the steps do in theirs.

        Returns:
            (rows, cols) in the dtype of updates.
        """
        x, into, scratch = self.new_memory((matrix.shape[0], matrix.shape[1]))
        into.copy_(matrix)
        return self.build(x, into, scratch)().to(self.spec.update_dtype)

    def new_memory(self, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
        """Allocate what `ready` takes, laid out as in the steps; see iterate_views."""
        nbytes = iterate_bytes(*shape, self.spec, self.storage)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return iterate_views(memory, *shape, self.spec, self.storage)


class CompiledBackend(Backend):
    """The normalisation compiled, one kernel per pass and shape; products stay the library's."""

    name = "compile"
    exact = False

    def __init__(self, spec: OrthoSpec, device: torch.device) -> None:
        if spec.normalise_in != "fp32":
            raise ValueError(
                'optimizer.params.ns_backend = "compile" fuses a normalisation in fp32, and the '
                'recipe "torch" has another for bit parity; use "eager" or another recipe'
            )
        super().__init__(spec, device)
        self._compiled = torch.compile(normalise_at_once, dynamic=False, fullgraph=True)

    def normalise(self, x: Tensor, matrix: Tensor, arithmetic: Arithmetic) -> None:
        """x <- matrix over its norm."""
        self._compiled(x, matrix, self.spec.eps, self.spec.guard, self.spec.divisor)
        arithmetic.round_(x)


class KernelsBackend(Backend):
    """Symmetric products by the kernels of a package."""

    name = "kernels"
    exact = False

    def __init__(self, spec: OrthoSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._products = kernel_products(spec.compute_dtype, device)


class GraphBackend(Backend):
    """Eager's launches recorded once per shape, in the memory of the steps, and then replayed.

    Args:
        new_capture: makes what records the launches of a function and returns what repeats them;
            one for all graphs that live together. None: CUDA's.
    """

    name = "graph"

    def __init__(
        self,
        spec: OrthoSpec,
        device: torch.device,
        new_capture: Callable[[], Capture] | None = None,
    ) -> None:
        if new_capture is None and device.type != "cuda":
            raise ValueError(
                f'optimizer.params.ns_backend = "graph" records CUDA graphs, and this is {device}; '
                'use "eager"'
            )
        super().__init__(spec, device)
        self._new_capture = new_capture or CudaCapture
        self._capture: Capture | None = None

    def forget(self) -> None:
        """Let go of the graphs, their memory and their pool."""
        super().forget()
        self._capture = None

    def ready(self, x: Tensor, matrix: Tensor, scratch: Tensor) -> Run:
        """Like eager the first time, which warms up; recorded then, since recording runs nothing.

        So what is in the memory stays, and a step may record in its middle.
        """
        key = x.data_ptr(), (x.shape[0], x.shape[1])
        if key in self._ready:
            return self._ready[key]
        run = self.build(x, matrix, scratch)

        def first() -> Tensor:
            result = run()
            self._capture = self._capture or self._new_capture()
            again = self._capture(run)

            def replay() -> Tensor:
                again()
                return result

            self._ready[key] = replay
            return result

        return first


class CudaCapture:
    """CUDA graphs whose temporaries share one pool; they are replayed one at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Callable[[], None]:
        """Record `run`; it must have run before."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a communication library's, go on calling CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay


BACKENDS: dict[str, type[Backend]] = {
    b.name: b for b in (Backend, CompiledBackend, GraphBackend, KernelsBackend)
}


def choose_backend(
    name: str,
    spec: OrthoSpec,
    device: torch.device,
    shapes: Iterable[Shape],
    *,
    keeps_memory: bool,
) -> Backend:
    """Make the backend that a configuration asks for, and compare it with eager.

    "auto" is eager: the others have to be asked for until they were measured on the device at hand.

    Args:
        name: a value of `ns_backend`.
        shapes: of all matrices.
        keeps_memory: steps find their working memory where it was.

    Raises:
        ValueError: the device or the installation cannot run it, or its updates are not eager's.
    """
    if name == "graph" and not keeps_memory:
        raise ValueError(
            'optimizer.params.ns_backend = "graph" replays in the memory that it was recorded in, '
            'and preallocate_workspace is false; set it to true, or use "eager"'
        )
    backend = BACKENDS["eager" if name == "auto" else name](spec, device)
    if backend.name != Backend.name:
        for shape in sorted(set(shapes)):
            require_same_updates(backend, shape)
    return backend


@torch.no_grad()
def require_same_updates(backend: Backend, shape: Shape) -> None:
    """Compare a backend with eager on a random matrix of a shape, in memory of their own.

    Raises:
        ValueError: they differ by more than rounding, or by a bit where bits must be equal.
    """
    spec, device = backend.spec, backend.device
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(spec.wire_dtype)
    expected = Backend(spec, device).orthogonalize(start.to(device)).float()
    x, matrix, scratch = backend.new_memory(shape)
    found = []
    for _ in range(2):
        matrix.copy_(start)
        found.append(backend.ready(x, matrix, scratch)().float().clone())
    backend.forget()
    gap = float((found[0] - expected).norm() / expected.norm())
    allowed = 0.0 if backend.exact else tolerance(spec.update_dtype)
    repeats = torch.equal(found[0], found[1])
    if not (repeats and gap <= allowed):
        what = (
            f"differs from eager by {gap:.2g} of the update's norm, more than {allowed:.2g}"
            if repeats
            else "gives other bits when it runs again"
        )
        raise ValueError(
            f'optimizer.params.ns_backend = "{backend.name}" {what}, for a {shape[0]} x {shape[1]} '
            f'matrix in {spec.compute_dtype} on {device}; use "eager"'
        )


def orthogonalize_into(x: Tensor, matrix: Tensor, backend: Backend, scratch: Tensor) -> Tensor:
    """Orthogonalise the contents of `matrix` in given memory; see NewtonSchulz."""
    return backend.ready(x, matrix, scratch)()
