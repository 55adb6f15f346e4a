# SPDX-License-Identifier: Apache-2.0
"""Machine: facts about this environment that decide whether and how fast DMuon runs.

Never does: judge them (environment.py), so that each judgement can be tested with made-up facts.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("torch", "deepspeed", "pydantic", "transformers", "accelerate")
# In a process of its own: this one has imported ds_muon, which registers it.
_IS_REGISTERED = "import torch; print(hasattr(torch.optim, '_ds_muon_registered'))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A lock file in torch's folder of compiled extensions; age in seconds."""

    path: str
    age: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This environment.

    Attributes:
        versions: package -> its version, None where it is not installed; with "python".
        deepspeed_error: why DeepSpeed, or what ds_muon needs of it, cannot be imported.
        deepspeed_tested: first to last tested version.
        missing_seams: private attributes that this DeepSpeed lacks, in words.
        accelerator, devices, device_bytes: as DeepSpeed's accelerator says.
        cpu: the processor's name.
        cpu_flags: its instruction sets, in cpuinfo's words.
        bf16_products, fp16_products: whether torch multiplies such matrices by instructions.
        cores: that this process may use.
        omp_threads: OMP_NUM_THREADS, as it is set.
        launcher, compiler, ninja: paths, None where there is none.
        autoload: TORCH_DEVICE_BACKEND_AUTOLOAD, as it is set.
        registers: whether `import torch` alone registers DMuon.
        unresolved: why torch.optim.DMuon cannot be looked up; empty: it can.
    """

    versions: Mapping[str, str | None]
    deepspeed_error: str | None = None
    deepspeed_tested: tuple[str, ...] = ()
    missing_seams: tuple[str, ...] = ()
    accelerator: str = "cpu"
    devices: int = 1
    device_bytes: int = 0
    cpu: str = ""
    cpu_flags: frozenset[str] = field(default_factory=frozenset)
    bf16_products: bool = True
    fp16_products: bool = True
    cores: int = 1
    omp_threads: str | None = None
    launcher: str | None = None
    compiler: str | None = None
    ninja: str | None = None
    autoload: str | None = None
    registers: bool = True
    unresolved: str = ""
    locks: tuple[Lock, ...] = ()


def probe_machine() -> Machine:
    """Read the facts; takes some seconds, since it imports DeepSpeed."""
    import torch

    from ds_muon.ortho.instructions import multiplies

    cpu, flags = _cpu()
    return Machine(
        versions={"python": platform.python_version(), **{p: _version(p) for p in PACKAGES}},
        cpu=cpu,
        cpu_flags=flags,
        bf16_products=multiplies(torch.bfloat16, torch.device("cpu")),
        fp16_products=multiplies(torch.float16, torch.device("cpu")),
        cores=len(os.sched_getaffinity(0)),
        omp_threads=os.environ.get("OMP_NUM_THREADS"),
        launcher=_beside_python("deepspeed"),
        compiler=next(filter(None, map(shutil.which, _compilers())), None),
        ninja=_beside_python("ninja"),
        autoload=os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD"),
        registers=_registers(),
        unresolved=_unresolved(),
        locks=find_locks(extensions_folder(), now=time.time()),
        **_deepspeed(),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> tuple[str, frozenset[str]]:
    try:
        import cpuinfo
    except ImportError:
        return platform.processor(), frozenset()
    found = cpuinfo.get_cpu_info()
    return found.get("brand_raw", ""), frozenset(found.get("flags", ()))


def _compilers() -> list[str]:
    return [name for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name]


def _beside_python(name: str) -> str | None:
    """A program of this environment, which need not be activated."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which(name, path=folders)


def _registers() -> bool:
    done = subprocess.run(
        [sys.executable, "-c", _IS_REGISTERED], capture_output=True, text=True, check=False
    )
    return done.stdout.strip().endswith("True")


def _unresolved() -> str:
    import torch

    try:
        torch.optim.DMuon  # noqa: B018 - the look-up is what is tried
    except Exception as error:  # whatever an import can raise
        return f"{type(error).__name__}: {error}"
    return ""


def extensions_folder() -> Path:
    """Where torch compiles extensions."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "torch_extensions"


def find_locks(folder: Path, *, now: float) -> tuple[Lock, ...]:
    """Lock files under torch's folder of extensions.

    Args:
        now: seconds since the epoch.
    """
    found = []
    for path in sorted(folder.glob("**/lock")):
        try:
            found.append(Lock(path=str(path), age=now - path.stat().st_mtime))
        except FileNotFoundError:  # a compilation has just ended
            continue
    return tuple(found)


def _deepspeed() -> dict[str, object]:
    try:
        from ds_muon.zero.inspection import installed

        found = installed()
    except Exception as error:  # whatever an import can raise
        return {"deepspeed_error": f"{type(error).__name__}: {error}"}
    return {
        "deepspeed_tested": found.tested,
        "missing_seams": found.missing,
        "accelerator": found.accelerator,
        "devices": found.devices,
        "device_bytes": found.device_bytes,
    }
