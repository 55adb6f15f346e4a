# SPDX-License-Identifier: Apache-2.0
"""ds_muon: exact Muon for DeepSpeed, as `"optimizer": {"type": "DMuon"}` in ds_config.json.

torch calls `register` at `import torch` (entry point group `torch.backends`): it sets one attribute
on torch.optim and loads nothing, so no other run pays for it. DeepSpeed resolves an optimizer type
that it does not know as `getattr(torch.optim, type)`, and that lookup is the moment to load the
math and DeepSpeed's hooks. `import ds_muon` registers too, where torch's autoload is switched off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_muon.config import DMuonConfig
    from ds_muon.optimizer import MatrixOwnerOptimizer as DMuon

__all__ = ["DMuon", "DMuonConfig", "__version__", "register"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "DMuon":
        from ds_muon.optimizer import MatrixOwnerOptimizer
        from ds_muon.zero.registration import install

        install()
        return MatrixOwnerOptimizer
    if name == "DMuonConfig":
        from ds_muon.config import DMuonConfig

        return DMuonConfig
    raise AttributeError(f"module 'ds_muon' has no attribute {name!r}")


def register() -> None:
    """Let torch.optim resolve DMuon, in any capitalisation; never fails an `import torch`."""
    # Imported here: where ds_muon comes first, torch calls this function while importing.
    import torch

    optim = getattr(torch, "optim", None)
    if optim is None or hasattr(optim, "_ds_muon_registered"):
        return
    other = getattr(optim, "__getattr__", None)

    def resolve(name: str) -> object:
        if name.lower() == "dmuon":
            return __getattr__("DMuon")
        if other is not None:
            return other(name)
        raise AttributeError(f"module 'torch.optim' has no attribute {name!r}")

    optim._ds_muon_registered = True
    optim.__getattr__ = resolve


register()
