# SPDX-License-Identifier: Apache-2.0
"""Check on one GPU what tests on CPUs cannot show: a table with verdicts, and an exit code.

python -m scripts.gpu_check             under 6 minutes on one GPU
python -m scripts.gpu_check --reduced   what a CPU can show, the default where there is no GPU

Verdicts: ok, FAILED, "seen" for what is measured without a limit, and "not here" for what needs
another device or package; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ds_muon.config import parse
from ds_muon.ortho.backends import BACKENDS, Backend, require_same_updates, tolerance
from ds_muon.ortho.chunks import staging_bytes
from ds_muon.ortho.memory import iterate_bytes
from ds_muon.ortho.newton_schulz import orthogonalize
from ds_muon.ortho.recipes import OrthoSpec, resolve
from ds_muon.plan.layout import Matrix, Placement, flat_partition_layout
from ds_muon.planning import plan_layout
from ds_muon.run.step import LeafStep, StepEngine
from ds_muon.run.streams import StreamOrder
from scripts.bench_newton_schulz import Clock, Shape, Turns, batch_bits, cost_model, gemms, ours
from tests.harness.memory import peak_allocated

DTYPES = ("bf16", "fp16", "fp32")
# Attention and MLP matrices of models of 7B, 8B and 70B parameters.
MODEL_SHAPES = [(4096, 4096), (4096, 11008), (14336, 4096), (8192, 8192), (8192, 28672)]
SMALL_SHAPES = [(256, 256), (256, 512), (512, 256)]
GEMM_SHARE = 0.7
# Scalars: norms and step sizes.
SCALAR_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Row:
    """What was checked, what was found, what is allowed, and the verdict."""

    check: str
    found: str
    allowed: str
    verdict: str


def judged(check: str, found: float, limit: float, *, least: bool = False) -> Row:
    """A row with a limit: at most, or `least` at least."""
    fine = found >= limit if least else found <= limit
    sign = ">=" if least else "<="
    return Row(check, f"{found:.3g}", f"{sign} {limit:.3g}", "ok" if fine else "FAILED")


def not_here(check: str, why: str) -> Row:
    return Row(check, why, "-", "not here")


def spec_of(dtype: str, method: str) -> OrthoSpec:
    return resolve(parse({"ns_dtype": dtype, "ns_method": method}))


def oracle(matrix: Tensor, spec: OrthoSpec) -> Tensor:
    """The standard iteration in float64."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.double().mT if tall else matrix.double()
    x = x / x.norm() / spec.divisor
    for a, b, c in spec.triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def correctness(device: torch.device, shapes: list[Shape]) -> Iterator[Row]:
    """Every dtype and form against float64."""
    for shape in shapes:
        matrix = torch.randn(shape, device=device)
        for dtype in DTYPES:
            for method in ("standard", "gram"):
                if method == "gram" and (dtype == "bf16" or shape[0] == shape[1]):
                    continue
                spec = spec_of(dtype, method)
                expected = oracle(matrix, spec)
                gap = (orthogonalize(matrix, spec).double() - expected).norm() / expected.norm()
                name = f"{shape[0]} x {shape[1]} {dtype} {method}, error against float64"
                yield judged(name, float(gap), tolerance(spec.compute_dtype))


def throughput(device: torch.device, shapes: list[Shape]) -> Iterator[Row]:
    """Flops per second against a GEMM's in the same run."""
    spec = spec_of("bf16", "standard")
    storage = Backend(spec, device).storage
    for shape in shapes:
        flops = cost_model(spec).flops(*shape)
        runs = {"ours": ours(shape, spec, device), **gemms(shape, storage, device)}
        found = Turns(Clock(device, "wall"), float("inf")).medians(runs, flops, 1.0)
        one = 2 * min(shape) ** 2 * max(shape)
        ceiling = max(one / found["mm"], 4 * one / found["baddbmm"])
        rate = flops / found["ours"]
        name = f"{shape[0]} x {shape[1]} bf16, {1e3 * found['ours']:.2f} ms, {rate / 1e12:.3g}"
        name += f" of {ceiling / 1e12:.3g} Tflop/s"
        row = judged(name, rate / ceiling, GEMM_SHARE, least=True)
        # A CPU that others use gives no verdict.
        yield row if device.type != "cpu" else Row(row.check, row.found, row.allowed, "seen")


def memory(device: torch.device, shapes: list[Shape]) -> Iterator[Row]:
    """Bytes of an orthogonalisation beyond the memory that the plan gave it."""
    for shape in shapes:
        spec = spec_of("bf16", "standard")
        run = ours(shape, spec, device)
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            run()
            torch.cuda.synchronize()
            extra = torch.cuda.max_memory_allocated() - held
        else:
            extra = peak_allocated(run)
        planned = staging_bytes(shape[0] * shape[1])
        iterate = iterate_bytes(*shape, spec, Backend(spec, device).storage)
        name = f"{shape[0]} x {shape[1]} bf16, bytes beside the planned {iterate / 2**20:.1f} MiB"
        yield judged(name, extra, planned + SCALAR_BYTES)


def streams(device: torch.device) -> Iterator[Row]:
    """StreamOrder: a stream reads what another one has finished writing."""
    if device.type != "cuda":
        yield not_here("order of two streams", "needs a GPU")
        yield not_here("host copies under Newton-Schulz", "needs a GPU")
        return
    for name, ordered in (("order of two streams", True), ("the same without order", False)):
        order, side, late = StreamOrder(device), torch.cuda.Stream(device), 0
        for value in range(20):
            buffer = torch.full((2**20,), -1.0, device=device)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(5_000_000)
                buffer.fill_(value)
                launched = order.current()
            if ordered:
                order.follow(launched, buffer)
            late += bool((buffer.clone() != value).any())
            torch.cuda.synchronize()
        if ordered:
            yield judged(f"{name}, reads that came too early", late, 0)
        else:
            yield judged(f"{name}, so that the check can fail", late, 1, least=True)
    yield _overlap(device)


def _overlap(device: torch.device) -> Row:
    """A copy from the host and Newton-Schulz at once, against one after the other."""
    spec, side = spec_of("bf16", "standard"), torch.cuda.Stream(device)
    run = ours((4096, 4096), spec, device)
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)

    def copy() -> None:
        with torch.cuda.stream(side):
            there.copy_(host, non_blocking=True)

    clock = Clock(device, "wall")
    run(), copy()
    alone = clock.seconds(lambda: [run() for _ in range(8)]), clock.seconds(copy)
    both = clock.seconds(lambda: (copy(), [run() for _ in range(8)]))
    return judged("host copy under Newton-Schulz, time over the sum", both / sum(alone), 0.95)


class Alone:
    """A transport of one rank, which has nobody to talk to."""

    rank, world_size = 0, 1


def steps(device: torch.device, shapes: list[Shape]) -> Iterator[Row]:
    """Steps of one rank: the bits are those of any workspace, depth and lifetime of the memory."""
    found = []
    for params in (
        {"workspace_mb": 512},
        {"workspace_mb": 1, "max_inflight_buckets": 2},
        {"workspace_mb": 1, "preallocate_workspace": False},
    ):
        config = parse(params)
        backend = Backend(resolve(config), device)
        offsets = [sum(r * c for r, c in shapes[:i]) for i in range(len(shapes) + 1)]
        layout = flat_partition_layout(
            [
                Placement(matrix=Matrix(name=f"m{i}", rows=r, cols=c), offset=offsets[i])
                for i, (r, c) in enumerate(shapes)
            ],
            partition_numel=offsets[-1],
            world_size=1,
        )
        plan = plan_layout(layout, config, backend.spec, storage=backend.storage)
        engine = StepEngine(
            Alone(),
            backend,
            [plan],
            inflight=config.max_inflight_buckets,
            keep_buffers=config.preallocate_workspace,
        )
        torch.manual_seed(0)
        weights, momentum, grad = (torch.randn(offsets[-1]).to(device) for _ in range(3))
        leaf = LeafStep(
            weights=weights, momentum=momentum, grad=grad, lr=0.1, weight_decay=0.1, mu=0.9
        )
        for _ in range(3):
            engine.run(0, [leaf])
        found.append(weights)
    differing = sum(int((w != found[0]).sum()) for w in found[1:])
    yield judged("three steps under other workspaces, elements that differ", differing, 0)


def batches(device: torch.device, shapes: list[Shape]) -> Iterator[Row]:
    """Whether a matrix's bits depend on its batch."""
    for shape in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            same = batch_bits(shape, 8, device, dtype)
            bits = "equal" if same else "differ"
            name = f"{shape[0]} x {shape[1]} {str(dtype)[6:]}, bits in batches of 1, 2, 3, 8"
            yield Row(name, bits, "-", "seen")


def backends(device: torch.device, shapes: list[Shape], *, reduced: bool) -> Iterator[Row]:
    """Every backend against eager, and its time."""
    spec = spec_of("bf16", "standard")
    for name, kind in list(BACKENDS.items())[1:]:
        check = f'ns_backend "{name}"'
        if reduced and name == "compile":
            yield not_here(check, "compiles for too long; run without --reduced")
            continue
        try:
            backend = kind(spec, device)
        except ValueError as error:
            yield not_here(check, str(error))
            continue
        for shape in shapes:
            sized = f"{check}, {shape[0]} x {shape[1]}, against eager"
            try:
                require_same_updates(backend, shape)
            except Exception as error:  # one backend's failure is a row, not the end of the table
                yield Row(sized, repr(error), "-", "FAILED")
                continue
            ratio = _speed(backend, shape, device)
            yield Row(sized, f"same; eager's time / its time {ratio:.2f}", "-", "ok")


def _speed(backend: Backend, shape: Shape, device: torch.device) -> float:
    spec = backend.spec
    runs = {"eager": ours(shape, spec, device), "its": ours(shape, spec, device, backend)}
    found = Turns(Clock(device, "wall"), float("inf")).medians(runs, 1.0, 0.5)
    return found["eager"] / found["its"]


def checks(device: torch.device, *, reduced: bool) -> Iterator[tuple[str, Callable]]:
    large = SMALL_SHAPES if reduced else MODEL_SHAPES
    medium = [(64, 64), (64, 200), (200, 64)] if reduced else [(1024, 1024), (2048, 4096)]
    yield "Newton-Schulz", lambda: correctness(device, medium)
    yield "throughput", lambda: throughput(device, large)
    yield "memory", lambda: memory(device, large)
    yield "streams", lambda: streams(device)
    yield "steps", lambda: steps(device, SMALL_SHAPES)
    yield "batches", lambda: batches(device, [(64, 64), (128, 512)])
    yield "backends", lambda: backends(device, medium[:2], reduced=reduced)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reduced", action="store_true", help="the default without a GPU")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reduced = args.reduced or device.type == "cpu"
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    started = time.perf_counter()
    rows: list[tuple[str, Row]] = []
    for part, run in checks(device, reduced=reduced):
        try:
            rows += [(part, row) for row in run()]
        except Exception as error:  # the rest of the table is worth having
            rows.append((part, Row("the check itself", repr(error), "-", "FAILED")))
    seconds = time.perf_counter() - started
    form = ", reduced" if reduced else ""
    table = Table(
        "part",
        "check",
        "found",
        "allowed",
        "verdict",
        title=f"{name}, torch {torch.__version__}{form}, {seconds:.0f} s",
    )
    for part, row in rows:
        table.add_row(part, row.check, row.found, row.allowed, row.verdict)
    Console(width=160).print(table)
    verdicts = [row.verdict for _, row in rows]
    counts = {v: verdicts.count(v) for v in ("ok", "seen", "not here", "FAILED")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
