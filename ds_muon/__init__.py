# SPDX-License-Identifier: Apache-2.0
"""ds_muon: exact Muon for DeepSpeed, as `"optimizer": {"type": "DMuon"}` in ds_config.json.

Public names load what they need on first use; importing this package loads neither DeepSpeed nor
the math. `import ds_muon` also registers the type where torch's autoload is switched off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch  # noqa: F401  # register() hangs on torch.optim, whichever is imported first

from ds_muon.autoload import register

if TYPE_CHECKING:
    from ds_muon.config import DMuonConfig
    from ds_muon.optimizer import MatrixOwnerOptimizer as DMuon

__all__ = ["DMuon", "DMuonConfig", "__version__"]
__version__ = "0.1.0"

register()


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
