# SPDX-License-Identifier: Apache-2.0
"""Autoload: `torch.optim.DMuon`, resolved on first use.

torch calls `register` at `import torch` (entry point group `torch.backends`); it sets one module
attribute and imports nothing, so no other run pays for it. DeepSpeed resolves an optimizer type it
does not know as `getattr(torch.optim, type)`: that lookup is the moment to load DeepSpeed's hooks.
"""

from __future__ import annotations


def register() -> None:
    """Let torch.optim resolve DMuon, in any capitalisation; never fails an `import torch`."""
    import sys

    optim = sys.modules.get("torch.optim")
    if optim is None or getattr(optim, "_ds_muon_registered", False):
        return
    other = getattr(optim, "__getattr__", None)

    def resolve(name: str) -> object:
        if name.lower() == "dmuon":
            from ds_muon import DMuon

            return DMuon
        if other is not None:
            return other(name)
        raise AttributeError(f"module 'torch.optim' has no attribute {name!r}")

    optim.__getattr__ = resolve  # type: ignore[method-assign]
    optim._ds_muon_registered = True
