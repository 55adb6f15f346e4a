# SPDX-License-Identifier: Apache-2.0
"""GatheredParameters under HSDP: what one rank wrote reaches all replicas.

DeepSpeed's context broadcasts inside a parameter's own group, which is a row here; its
`modifier_rank`, a rank of the world, then stands for a row and a place in it.

Owns: one wrapped class, which passes every parameter without a mesh through untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import Tensor

from ds_muon.zero.hsdp.mesh import Mesh, mesh_of


def install() -> None:
    """Wrap the class; a second call does nothing."""
    if hasattr(GatheredParameters, "_ds_muon_wrapped"):
        return
    GatheredParameters._ds_muon_wrapped = True
    init, leave = GatheredParameters.__init__, GatheredParameters.__exit__

    @functools.wraps(init)
    def init_with_mesh(
        self: Any, params: Any, modifier_rank: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        single = isinstance(params, Tensor) or not isinstance(params, Iterable)
        listed = [params] if single else list(params)
        mesh = next((m for m in map(mesh_of, listed) if m is not None), None)
        self._ds_muon_source = None
        if mesh is not None and modifier_rank is not None:
            replica, modifier_rank = divmod(modifier_rank, mesh.shard_size)
            self._ds_muon_source = (mesh, replica)
        init(self, listed, modifier_rank, *args, **kwargs)

    @functools.wraps(leave)
    def leave_and_copy(self: Any, *error: Any) -> Any:
        result = leave(self, *error)
        if self.enabled and self._ds_muon_source is not None:
            _copy_from(*self._ds_muon_source, self.params)
        return result

    GatheredParameters.__init__, GatheredParameters.__exit__ = init_with_mesh, leave_and_copy


def _copy_from(mesh: Mesh, replica: int, parameters: Iterable[Any]) -> None:
    """Give every replica one replica's shards."""
    for parameter in parameters:
        if mesh_of(parameter) is not None:
            mesh.column.broadcast(parameter.ds_tensor.data, source=replica).wait()
