# SPDX-License-Identifier: Apache-2.0
"""Fused and separate: the same maps in few parameters, and each in a Linear of its own."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

WIDTH, HEADS, HEAD = 10, 3, 4
Maps = dict[str, Tensor]


class RowsOfThreeSizes(nn.Module):
    """Phi-3: q of three heads, k and v of one."""

    num_heads, num_key_value_heads, head_dim = HEADS, 1, HEAD

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(WIDTH, 5 * HEAD, bias=False)

    def maps(self) -> Maps:
        q, k, v = self.qkv_proj.weight.split([HEADS * HEAD, HEAD, HEAD])
        return {"q": q, "k": k, "v": v}


class HeadByHead(nn.Module):
    """GPT-NeoX: q, k and v of the first head, then of the second."""

    num_heads, head_dim = HEADS, HEAD

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="gpt_neox")
        self.query_key_value = nn.Linear(WIDTH, 3 * HEADS * HEAD, bias=False)

    def maps(self) -> Maps:
        by_head = self.query_key_value.weight.view(HEADS, 3, HEAD, WIDTH)
        return {name: by_head[:, i].reshape(-1, WIDTH) for i, name in enumerate("qkv")}


class Columns(nn.Module):
    """GPT-2: outputs are columns."""

    num_heads, head_dim = HEADS, HEAD

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = Conv1D(3 * HEADS * HEAD, WIDTH)
        self.c_attn.bias = None

    def maps(self) -> Maps:
        parts = self.c_attn.weight.split(HEADS * HEAD, dim=1)
        return {name: part.T for name, part in zip("qkv", parts, strict=True)}


class Gated(nn.Module):
    """Halves, in a layer with its reader beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * 7, bias=False)
        self.down_proj = nn.Linear(7, WIDTH, bias=False)

    def maps(self) -> Maps:
        gate, up = self.gate_up_proj.weight.chunk(2)
        return {"half0": gate, "half1": up, "down": self.down_proj.weight.T}


class Experts(nn.Module):
    """[E, 2I, H], [E, H, I]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 2 * 6, WIDTH) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(3, WIDTH, 6) * 0.3)

    def maps(self) -> Maps:
        found = {}
        for i, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            found[f"half{i}"], found[f"up{i}"] = gate_up.chunk(2)
            found[f"down{i}"] = down.T
        return found


class TransposedExperts(nn.Module):
    """GPT-OSS: [E, H, 2I] with gate and up in turn, [E, I, H]."""

    is_transposed, is_concatenated = True, False

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, WIDTH, 2 * 5) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(3, 5, WIDTH) * 0.3)

    def maps(self) -> Maps:
        found = {}
        for i, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            found[f"half{i}"], found[f"up{i}"] = gate_up[:, ::2].T, gate_up[:, 1::2].T
            found[f"down{i}"] = down
        return found


class Separate(nn.Module):
    """The maps of a fused module, each (out, in) in a Linear; `down` as its reader has it."""

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        self.linears = nn.ModuleDict()
        for name, weight in fused.maps().items():
            stored = weight.T if name.startswith("down") else weight
            linear = nn.Linear(stored.shape[1], stored.shape[0], bias=False)
            linear.weight = nn.Parameter(stored.detach().clone().contiguous())
            self.linears[name] = linear

    def maps(self) -> Maps:
        return {
            name: linear.weight.T if name.startswith("down") else linear.weight
            for name, linear in self.linears.items()
        }


class Zoo(nn.Module):
    """Every layout at once; the loss is smooth in every map.

    The order puts ZeRO-1/2's edges into Columns on two ranks, and into HeadByHead on three.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        kinds = (RowsOfThreeSizes, Gated, Experts, Columns, HeadByHead, TransposedExperts)
        self.units = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for number, unit in enumerate(self.units):
            for index, weight in enumerate(unit.maps().values()):
                target = torch.sin(x[:, :1] * (number + 2 * index + 1))
                y = torch.tanh(nn.functional.linear(x[:, : weight.shape[1]], weight))
                total = total + (y - target).square().mean()
        return total

    def separate(self) -> Zoo:
        """The same function with a Linear per map."""
        twin = Zoo()
        twin.units = nn.ModuleList(Separate(unit) for unit in self.units)
        return twin


def whole_maps(zoo: Zoo, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The maps by unit and name, of whole weights by the parameters' names."""
    copy = zoo if not isinstance(zoo.units[0], Separate) else Zoo().separate()
    copy = Zoo() if copy is zoo else copy
    copy.load_state_dict(weights)
    return {
        f"{number}.{name}": weight.detach().clone().contiguous()
        for number, unit in enumerate(copy.units)
        for name, weight in unit.maps().items()
    }
