# SPDX-License-Identifier: Apache-2.0
"""Fused: parameters that hold several linear maps, recognised by name, configuration and shape.

A map here is what an unfused implementation would keep in a Linear of its own. Sizes come from the
module that uses the weight or from the nearest configuration; a layout counts only if they add up
to the parameter's outputs, and whatever is not recognised stays one matrix.

Owns: the table of layouts (docs/routing.md shows it), and which projections have heads.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from ds_muon.routing.sites import Site


class Part(NamedTuple):
    """Outputs of one map in one period of a fused parameter; `head`: of one of its heads, or 0."""

    label: str
    size: int
    head: int = 0


Parts = tuple[Part, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayout:
    """One row of the table.

    Attributes:
        names: globs on the name of the layer, or of the parameter itself.
        maps: what it holds, in the order of its outputs.
        where: in which models, and what sizes are read.
        read: (site, outputs, inputs) -> parts of one period, or None.
    """

    names: tuple[str, ...]
    maps: str
    where: str
    read: Callable[[Site, int, int], Parts]


class _Attention(NamedTuple):
    """Heads of queries, heads of keys and values, and outputs of each."""

    heads: int
    kv_heads: int
    width: int


# model_type of models in which every head's rows of q, k and v follow each other.
PER_HEAD_TYPES = ("bloom", "gpt_neox", "gpt_neox_japanese", "persimmon")


def fused_parts(site: Site, outputs: int, inputs: int) -> Parts:
    """Return one period of a recognised fused parameter, or None.

    Args:
        outputs: the length of the axis that holds the maps' outputs.
    """
    for layout in FUSED_LAYOUTS:
        if any(fnmatch.fnmatchcase(site.role, name) for name in layout.names):
            parts = layout.read(site, outputs, inputs)
            if parts is not None and _fits(parts, outputs, inputs):
                return parts
    return None


def _fits(parts: tuple[Part, ...], outputs: int, inputs: int) -> bool:
    period = sum(part.size for part in parts)
    if period == 0 or outputs % period or inputs < 2:
        return False
    return min(part.size for part in parts) * (outputs // period) >= 2


def head_parts(site: Site, outputs: int) -> Parts:
    """Return the heads of a projection that has nothing but heads, or None.

    The names and geometries are those of DeepSpeed's `per_head_muon`: of latent attention's
    kv_b_proj a head is its keys and values together, and output projections have no heads.
    """
    attention = _attention(site)
    nope, rope = site.number("qk_nope_head_dim"), site.number("qk_rope_head_dim")
    values = site.number("v_head_dim")
    candidates = []
    if attention is not None:
        queries, keys = attention.heads, attention.kv_heads
        if site.role in ("q_proj", "query", "wq", "q_b_proj") and nope and rope:
            candidates.append((queries, nope + rope))
        if site.role == "kv_b_proj" and nope and values:
            candidates.append((queries, nope + values))
        if site.role in ("q_proj", "query", "wq", "q_attn"):
            candidates.append((queries, attention.width))
        if site.role in ("k_proj", "key", "wk", "v_proj", "value", "wv"):
            candidates.append((keys, attention.width))
    for count, width in candidates:
        if count * width == outputs and width >= 2:
            return (Part("head", width, width),)
    return None


def _attention(site: Site) -> _Attention | None:
    heads = site.number("num_heads", "num_attention_heads", "n_heads", "n_head")
    if heads is None:
        return None
    kv_heads = site.number("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
    width = site.number("head_dim", "head_size", "attention_head_size")
    hidden = site.number("hidden_size", "embed_dim", "dim", "d_model")
    if width is None and hidden is not None and hidden % heads == 0:
        width = hidden // heads
    return None if width is None else _Attention(heads, kv_heads or heads, width)


def _qkv(site: Site, outputs: int, inputs: int) -> Parts:
    """q, then k, then v; or k and v of a cross attention, whose q is elsewhere."""
    found = _attention(site)
    if site.model_type == "codegen":
        quarter = outputs // 12
        return (Part("q", quarter), Part("v", quarter), Part("k", quarter))
    if found is None:
        return _thirds(site, outputs, inputs)
    if site.model_type == "gpt_bigcode" and site.flag("multi_query") is False:
        return _one_head_each(found)
    q, kv = found.heads * found.width, found.kv_heads * found.width
    if outputs == q + 2 * kv:
        return _in_a_row(("q", q), ("k", kv), ("v", kv), head=found.width)
    if outputs == 2 * kv and hasattr(site.holder, "q_attn"):
        return _in_a_row(("k", kv), ("v", kv), head=found.width)
    if outputs == 3 * q:
        return _in_a_row(("q", q), ("k", q), ("v", q), head=found.width)
    return _thirds(site, outputs, inputs)


def _query_key_value(site: Site, outputs: int, inputs: int) -> Parts:
    """Head by head, or for Falcon group by group; other models' order is not known."""
    found = _attention(site)
    if found is None:
        return None
    if site.model_type in PER_HEAD_TYPES:
        return _one_head_each(found) if outputs == 3 * found.heads * found.width else None
    if site.model_type != "falcon":
        return None
    if site.flag("new_decoder_architecture"):
        queries = found.heads // found.kv_heads * found.width
        return _in_a_row(("q", queries), ("k", found.width), ("v", found.width), head=found.width)
    if site.flag("multi_query"):
        q = found.heads * found.width
        return _in_a_row(("q", q), ("k", found.width), ("v", found.width), head=found.width)
    return _one_head_each(found)


def _one_head_each(found: _Attention) -> tuple[Part, ...]:
    return tuple(Part(label, found.width, found.width) for label in "qkv")


def _in_a_row(*sizes: tuple[str, int], head: int = 0) -> tuple[Part, ...]:
    return tuple(Part(label, size, head) for label, size in sizes)


def _thirds(site: Site, outputs: int, inputs: int) -> Parts:
    if outputs != 3 * inputs:
        return None
    return _in_a_row(("q", inputs), ("k", inputs), ("v", inputs))


def _key_value(site: Site, outputs: int, inputs: int) -> Parts:
    known = site.role == "to_kv" or site.model_type == "jetmoe"
    if outputs % 2 or not known:
        return None
    return _in_a_row(("k", outputs // 2), ("v", outputs // 2))


def _gated_queries(site: Site, outputs: int, inputs: int) -> Parts:
    found = _attention(site)
    if found is None or not site.model_type.startswith(("qwen3_next", "qwen3_5")):
        return None
    if outputs != 2 * found.heads * found.width:
        return None
    return tuple(Part(label, found.width, found.width) for label in ("q", "gate"))


def _torch_attention(site: Site, outputs: int, inputs: int) -> Parts:
    if not isinstance(site.holder, nn.MultiheadAttention):
        return None
    embed, heads = site.holder.embed_dim, site.holder.num_heads
    parts = _in_a_row(("q", embed), ("k", embed), ("v", embed), head=embed // heads)
    return parts if outputs == 3 * embed else None


# Gates in the order of their rows; weight_hr, the projection behind them, is one matrix.
_GATES = {
    (nn.LSTM, nn.LSTMCell): ("i", "f", "g", "o"),
    (nn.GRU, nn.GRUCell): ("r", "z", "n"),
}


def _recurrent(site: Site, outputs: int, inputs: int) -> Parts:
    gates = next((g for kinds, g in _GATES.items() if isinstance(site.holder, kinds)), None)
    if gates is None or outputs != len(gates) * site.holder.hidden_size:
        return None
    return tuple(Part(gate, outputs // len(gates)) for gate in gates)


def _gate_up(site: Site, outputs: int, inputs: int) -> Parts:
    """Halves; in a layer of its own only if another one beside it reads half of its outputs."""
    if outputs % 2:
        return None
    if len(site.shape) == 3:
        if site.gated is None:
            return None
        if getattr(site.holder, "is_concatenated", True) is False:
            return (Part("gate", 1), Part("up", 1))
        return _in_a_row(("gate", outputs // 2), ("up", outputs // 2))
    readers = [m for m in site.holder.children() if isinstance(m, nn.Linear)]
    if not any(reader.in_features == outputs // 2 for reader in readers):
        return None
    first, second = ("input", "gate") if site.role == "Wi" else ("gate", "up")
    return _in_a_row((first, outputs // 2), (second, outputs // 2))


def _latent(site: Site, outputs: int, inputs: int) -> Parts:
    latent, rope = site.number("kv_lora_rank"), site.number("qk_rope_head_dim")
    if not latent or not rope or latent + rope != outputs:
        return None
    return _in_a_row(("latent", latent), ("rope", rope))


def _latent_up(site: Site, outputs: int, inputs: int) -> Parts:
    found = site.number("num_heads", "num_attention_heads")
    keys, values = site.number("qk_nope_head_dim"), site.number("v_head_dim")
    if not found or not keys or not values or found * (keys + values) != outputs:
        return None
    return (Part("k", keys), Part("v", values))


def _state_space(site: Site, outputs: int, inputs: int) -> Parts:
    """Mamba's x and z; Mamba-2's z, x, B, C and dt."""
    inner = site.number("intermediate_size", "ssm_intermediate_size")
    if inner is None or not hasattr(site.holder, "A_log"):
        return None
    if outputs == 2 * inner:
        return _in_a_row(("x", inner), ("z", inner))
    states = (site.number("n_groups") or 0) * (site.number("ssm_state_size", "state_size") or 0)
    heads = site.number("num_heads") or 0
    if outputs != 2 * inner + 2 * states + heads or not states or not heads:
        return None
    return _in_a_row(("z", inner), ("x", inner), ("B", states), ("C", states), ("dt", heads))


def _selection(site: Site, outputs: int, inputs: int) -> Parts:
    rank, states = site.number("time_step_rank"), site.number("ssm_state_size", "state_size")
    if not rank or not states or rank + 2 * states != outputs:
        return None
    return _in_a_row(("dt", rank), ("B", states), ("C", states))


def _delta_net(site: Site, outputs: int, inputs: int) -> Parts:
    """Gated delta nets: q and k of one key head, v and z of the value heads that share it."""
    keys, values = site.number("num_k_heads"), site.number("num_v_heads")
    width, value_width = site.number("head_k_dim"), site.number("head_v_dim")
    if not keys or not values or not width or not value_width:
        return None
    if site.role == "in_proj_qkv":
        k, v = keys * width, values * value_width
        parts = _in_a_row(("q", k), ("k", k), ("v", v))
        return parts if sum(p.size for p in parts) == outputs else None
    shared = values // keys
    if site.role == "in_proj_ba":
        return _in_a_row(("b", shared), ("a", shared)) if outputs == 2 * values else None
    v = shared * value_width
    parts = _in_a_row(("q", width), ("k", width), ("v", v), ("z", v))
    return parts if keys * sum(p.size for p in parts) == outputs else None


FUSED_LAYOUTS: tuple[FusedLayout, ...] = (
    FusedLayout(
        names=("qkv_proj", "qkv", "Wqkv", "c_attn", "att_proj", "qkv_linear"),
        maps="q, k, v, one after another",
        where="GPT-2, Phi-3, MPT, DBRX, ModernBERT, vision transformers; k and v may have fewer "
        "heads than q. CodeGen: q, v, k in each of four blocks. GPT-BigCode without multi_query: "
        "head by head. c_attn of a cross attention: k, v",
        read=_qkv,
    ),
    FusedLayout(
        names=("query_key_value",),
        maps="q, k, v of each head, head by head",
        where="by model_type: GPT-NeoX, GPT-NeoX-Japanese, BLOOM, Persimmon, Falcon. Falcon's new "
        "decoder: the queries of a group, then its k and v; its multi_query: one after another",
        read=_query_key_value,
    ),
    FusedLayout(
        names=("to_qkv",),
        maps="q, k, v, one after another",
        where="outputs = 3 inputs",
        read=_thirds,
    ),
    FusedLayout(
        names=("to_kv", "kv_proj"),
        maps="k, v, one after another",
        where="perceivers; kv_proj: JetMoE",
        read=_key_value,
    ),
    FusedLayout(
        names=("q_proj",),
        maps="q and its output gate of each head, head by head",
        where="Qwen3-Next, Qwen3.5, where outputs are twice the heads",
        read=_gated_queries,
    ),
    FusedLayout(
        names=("in_proj_weight",),
        maps="q, k, v, one after another",
        where="torch.nn.MultiheadAttention",
        read=_torch_attention,
    ),
    FusedLayout(
        names=("weight_ih", "weight_hh", "weight_ih_l*", "weight_hh_l*"),
        maps="the gates, one after another",
        where="torch.nn.LSTM and LSTMCell (4), GRU and GRUCell (3); every layer and direction",
        read=_recurrent,
    ),
    FusedLayout(
        names=("gate_up_proj", "gate_and_up_proj", "input_linear", "weights_in", "Wi"),
        maps="gate, up, one after another",
        where="a layer or a stack of experts, [E, 2I, H] or transposed [E, H, 2I], if another one "
        "beside it reads half of its outputs. GPT-OSS: gate and up in turn, column by column",
        read=_gate_up,
    ),
    FusedLayout(
        names=("kv_a_proj_with_mqa",),
        maps="the latent, the shared rope key",
        where="latent attention: kv_lora_rank, qk_rope_head_dim",
        read=_latent,
    ),
    FusedLayout(
        names=("kv_b_proj",),
        maps="k, v of each head, head by head",
        where="latent attention: qk_nope_head_dim, v_head_dim",
        read=_latent_up,
    ),
    FusedLayout(
        names=("in_proj",),
        maps="x, z; or z, x, B, C, dt",
        where="Mamba; Mamba-2 (a module with A_log)",
        read=_state_space,
    ),
    FusedLayout(
        names=("x_proj",),
        maps="dt, B, C",
        where="Mamba: time_step_rank, ssm_state_size",
        read=_selection,
    ),
    FusedLayout(
        names=("in_proj_qkvz", "in_proj_qkv", "in_proj_ba"),
        maps="q, k, v, z (or b, a) of each key head; in_proj_qkv: q, k, v, one after another",
        where="gated delta nets (Qwen3-Next and later)",
        read=_delta_net,
    ),
)
