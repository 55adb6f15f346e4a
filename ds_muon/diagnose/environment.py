# SPDX-License-Identifier: Apache-2.0
"""Environment: judge a machine's facts.

Owns: which versions ds_muon was tested with beside DeepSpeed's, and which it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds_muon.diagnose.findings import Finding
from ds_muon.diagnose.machine import Machine

_GIB = 2**30
# A compilation takes a minute or two; a lock of this age, in seconds, has nobody behind it.
STALE_AFTER = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A package.

    Attributes:
        at_least: below it, nothing works; setup.cfg says the same.
        tested: the version that the tests ran with.
        needed: by what; empty: by everything.
    """

    at_least: str = ""
    tested: str = ""
    needed: str = ""


REQUIREMENTS = {
    "python": Requirement(at_least="3.10", tested="3.11"),
    "torch": Requirement(tested="2.13"),
    "deepspeed": Requirement(at_least="0.19.0"),
    "pydantic": Requirement(at_least="2", tested="2.14"),
    "transformers": Requirement(tested="5.24", needed="models of Hugging Face"),
    "accelerate": Requirement(tested="1.15", needed="the Hugging Face Trainer"),
}


def judge(machine: Machine) -> list[Finding]:
    """Say what is right, wrong, slow or surprising about a machine."""
    found: list[Finding] = []
    for of_topic in (_versions, _seams, _registration, _devices, _products, _threads, _building):
        found.extend(of_topic(machine))
    return found


def _ok(topic: str, text: str) -> Finding:
    return Finding(topic=topic, level="ok", text=text)


def _hint(topic: str, text: str) -> Finding:
    return Finding(topic=topic, level="hint", text=text)


def _problem(topic: str, text: str) -> Finding:
    return Finding(topic=topic, level="problem", text=text)


def _versions(machine: Machine) -> Iterator[Finding]:
    for package, requirement in REQUIREMENTS.items():
        version = machine.versions.get(package)
        if version is None:
            if requirement.needed:
                yield _ok("versions", f"{package} is not installed; {requirement.needed} needs it")
            else:
                yield _problem("versions", f"{package} is not installed: pip install {package}")
            continue
        first, last = requirement.tested, requirement.tested
        if package == "deepspeed" and machine.deepspeed_tested:
            first, last = machine.deepspeed_tested[0], machine.deepspeed_tested[-1]
        tested = first if first == last else f"{first} to {last}"
        if requirement.at_least and _numbers(version) < _numbers(requirement.at_least):
            yield _problem(
                "versions", f"{package} {version} is too old; at least {requirement.at_least}"
            )
        elif first and not _within(version, first, last):
            yield _hint("versions", f"{package} {version}; tested with {tested}")
        else:
            yield _ok(
                "versions", f"{package} {version}" + (f" (tested: {tested})" if first else "")
            )


def _within(version: str, first: str, last: str) -> bool:
    """Compare as many numbers as the bounds have."""
    low, high = _numbers(first), _numbers(last)
    return low <= _numbers(version)[: len(low)] and _numbers(version)[: len(high)] <= high


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int(p) for p in parts if p.isdigit())


def _seams(machine: Machine) -> Iterator[Finding]:
    if machine.deepspeed_error:
        yield _problem(
            "deepspeed", f"what ds_muon needs of it cannot be imported: {machine.deepspeed_error}"
        )
    for text in machine.missing_seams:
        yield _problem(
            "deepspeed",
            f"this version lacks {text}; install one of {', '.join(machine.deepspeed_tested)}",
        )
    if not machine.deepspeed_error and not machine.missing_seams:
        yield _ok("deepspeed", "its classes have every private attribute that ds_muon reads")


def _registration(machine: Machine) -> Iterator[Finding]:
    if machine.unresolved:
        yield _problem("registration", f"torch.optim.DMuon: {machine.unresolved}")
    elif machine.registers:
        yield _ok("registration", "`import torch` alone lets DeepSpeed find DMuon")
    elif machine.autoload == "0":
        yield _hint(
            "registration",
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading ds_muon: `import ds_muon` in "
            "the training script, before deepspeed.initialize",
        )
    else:
        yield _hint(
            "registration",
            "`import torch` does not load ds_muon, which is not installed as a package: `pip "
            "install` it, or `import ds_muon` in the training script",
        )


def _devices(machine: Machine) -> Iterator[Finding]:
    size = f", {machine.device_bytes / _GIB:.1f} GiB" if machine.device_bytes else ""
    count = machine.devices
    if machine.accelerator == "cpu":
        yield _ok("devices", f"cpu: {machine.cpu or 'unknown'}, {machine.cores} cores{size}")
    elif count:
        yield _ok("devices", f"{count} x {machine.accelerator}{size} each")
    else:
        yield _problem("devices", f"DeepSpeed chose {machine.accelerator} and finds no device")
    if machine.launcher is not None:
        yield _ok("devices", f"launcher: {machine.launcher}")
    else:
        yield _problem(
            "devices", "the `deepspeed` launcher is not beside this Python nor on the PATH"
        )


def _products(machine: Machine) -> Iterator[Finding]:
    """Only a CPU can lack them; ortho/instructions.py decides alike."""
    if machine.accelerator != "cpu":
        return
    known = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
    has = [flag for flag in known if flag in machine.cpu_flags]
    flags = f" (of {', '.join(known)} it has {', '.join(has) or 'none'})"
    kinds = {"bf16": machine.bf16_products, "fp16": machine.fp16_products}
    lacking = [name for name, native in kinds.items() if not native]
    for name, native in kinds.items():
        if native:
            yield _ok("products", f"this CPU multiplies {name} matrices by instructions")
    if lacking:
        either = " or ".join(lacking)
        yield _hint(
            "products",
            f"this CPU has no {either} products{flags}: recipes in {either} compute in fp32 here "
            f"unless ns_dtype is set; forward and backward in {either} are slow",
        )


def _threads(machine: Machine) -> Iterator[Finding]:
    given, cores = machine.omp_threads, machine.cores
    if given is None:
        if machine.accelerator == "cpu" and cores > 1:
            yield _hint(
                "threads",
                f"OMP_NUM_THREADS is not set: every rank on this machine uses all {cores} cores; "
                "set it to cores / ranks",
            )
        return
    if not given.isdigit() or int(given) < 1:
        yield _problem("threads", f"OMP_NUM_THREADS={given} is not a number of threads")
    elif int(given) > cores:
        yield _hint("threads", f"OMP_NUM_THREADS={given} is more than the {cores} cores here")
    else:
        yield _ok("threads", f"OMP_NUM_THREADS={given} of {cores} cores")


def _building(machine: Machine) -> Iterator[Finding]:
    for lock in machine.locks:
        if lock.age > STALE_AFTER:
            yield _problem(
                "building",
                f"{lock.path} is {lock.age / 60:.0f} minutes old: a compilation was interrupted, "
                "and every start waits for it; delete it",
            )
        else:
            yield _hint(
                "building",
                f"{lock.path} is {lock.age:.0f} s old: an operator is being compiled, or a "
                "compilation was interrupted",
            )
    tools = {"a C++ compiler": machine.compiler, "ninja": machine.ninja}
    absent = [name for name, path in tools.items() if path is None]
    if not absent:
        yield _ok("building", f"{machine.compiler} and ninja can compile DeepSpeed's operators")
        return
    text = f"{' and '.join(absent)} not found, with which DeepSpeed compiles operators"
    if machine.accelerator == "cpu":
        yield _problem("building", f"{text} at the first start on a CPU")
    else:
        yield _hint("building", f"{text}; DMuon itself needs none of them")
