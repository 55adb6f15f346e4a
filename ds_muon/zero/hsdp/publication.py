# SPDX-License-Identifier: Apache-2.0
"""Publication: where ZeRO reads a weight that another replica's update may still be on its way to.

Owns: the copy of an updated range into ZeRO's 16-bit partition, and the calls that settle updates
before they read: of single parameters at stage 3, where every gather names its parameters (module
hooks would be too late, prefetch gathers other modules' parameters), of all for everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from ds_muon.plan.layout import Fragment
from ds_muon.run.publish import Publisher
from ds_muon.run.views import view
from ds_muon.zero.seams import override, private
from ds_muon.zero.wrapping import before

_ENGINE_READERS = (
    "save_checkpoint",
    "save_16bit_model",
    "load_checkpoint",
    "load_module_state_dict",
    "module_state_dict",
)
_ZERO_READERS = (
    "state_dict",
    "load_state_dict",
    "offload_states",
    "reload_states",
    "get_full_hp_param",
    "set_full_hp_param",
    "get_local_fp32_param",
    "set_local_hp_param",
    "refresh_fp32_params",
)


def low_precision_copies(
    zero: Any, leaves: Sequence[tuple[int, Tensor]], shard: int
) -> Callable[[int, Fragment], None]:
    """Return what copies a fragment of plan i's leaf to where ZeRO keeps its 16-bit weights.

    Args:
        leaves: per plan, the number that ZeRO gives to its leaf, and the leaf.
    """

    def flat_of(number: int) -> Tensor:
        # Looked up anew: offloading states replaces these.
        if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            return private(zero, "fp16_partitioned_groups_flat")[number]
        return private(zero, "parallel_partitioned_bit16_groups")[number][shard]

    def arrived(plan: int, fragment: Fragment) -> None:
        number, leaf = leaves[plan]
        with torch.no_grad():
            copy = view(flat_of(number).view(-1), fragment.place)
            copy.copy_(view(leaf.detach().view(-1), fragment.place))

    return arrived


def settle_before_reads(
    engine: Any, publisher: Publisher, names: Mapping[int, frozenset[str]]
) -> None:
    """Hook everything that reads weights or state between steps.

    Args:
        names: id(parameter) -> the matrices in it.
    """
    zero = engine.optimizer
    for owner, readers in ((engine, _ENGINE_READERS), (zero, _ZERO_READERS)):
        for name in readers:
            if hasattr(owner, name):
                setattr(owner, name, before(getattr(owner, name), publisher.settle))
    engine.module.register_state_dict_pre_hook(lambda *_: publisher.settle())
    engine.module.register_load_state_dict_pre_hook(lambda *_: publisher.settle())
    if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        for parameter in engine.module.parameters():
            _settle_gathers(parameter, publisher, names)


def _settle_gathers(
    parameter: Any, publisher: Publisher, names: Mapping[int, frozenset[str]]
) -> None:
    """Both ways to gather are closures on each parameter, which take the list to gather."""
    for name in ("all_gather", "all_gather_coalesced"):
        real = private(parameter, name)

        @functools.wraps(real)
        def gather(*args: Any, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            if publisher.pending:
                listed = args[0] if args else kwargs.get("param_list") or kwargs.get("params")
                wanted = [parameter] if listed is None else listed
                publisher.settle(
                    frozenset().union(*(names.get(id(p), frozenset()) for p in wanted))
                )
            return real(*args, **kwargs)

        override(parameter, name, gather)
