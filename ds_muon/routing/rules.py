# SPDX-License-Identifier: Apache-2.0
"""Rules: what has a matrix's shape and is no hidden matrix; modules first, then names.

A module whose class says what its weight is (a linear map, an embedding, a norm) is not judged by
a name that says otherwise: `embed_proj` and `q_norm_proj` may well be Linears.

Owns: the rules that no configuration key is needed for, each with the reason that reports show.
"""

from __future__ import annotations

from torch import nn

from ds_muon.routing.sites import CONVOLUTIONS, Site, is_conv1d

HEAD_NAMES = frozenset(
    {"lm_head", "embed_out", "output_projection", "unembed", "head", "score", "classifier"}
)
_ROUTER_NAMES = frozenset({"gate", "router", "wg"})
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
# Factors that PEFT's other methods add: low rank, or small blocks of a rotation.
_ADAPTERS = ("hada_", "lokr_", "oft_", "boft_", "ia3_", "vera_")
# Tables that are no module: one row per position, token or query, each used by itself.
_TABLES = ("position", "rel_pos", "pos_emb", "bias_table", "latents", "_token", "queries")
_MAPS = (
    nn.Linear,
    nn.Bilinear,
    *CONVOLUTIONS,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)
_NORMS = (nn.LayerNorm, nn.RMSNorm)


def ruled_out_by(site: Site) -> str | None:
    """Return the rule that keeps a matrix-shaped parameter from Muon, if any."""
    leaf, module = site.leaf, site.module
    if any(isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) for owner in site.owners):
        return "embedding" if len(site.owners) == 1 else "embedding tied to another module"
    if any(isinstance(owner, _NORMS) for owner in site.owners):
        return "norm"
    if site.is_head:
        return "output head"
    if any(part.startswith("lora_") for part in site.parts):
        return "LoRA factor"
    if any(part.startswith(_ADAPTERS) for part in site.parts):
        return "adapter factor"
    if module in HEAD_NAMES or leaf in HEAD_NAMES:
        return "output head by name"
    if leaf == "bias" or leaf.endswith("_bias"):
        return "bias, a row per expert or head"
    named = _named_otherwise(site)
    if named is not None:
        return named
    if _is_router(site):
        return "router"
    if leaf == "A_log":
        return "state-space decay (A_log)"
    return None


def _named_otherwise(site: Site) -> str | None:
    """What a name says of a parameter whose module's class says nothing.

    Of a map over the vocabulary the name decides still: a Linear may be used as an embedding.
    """
    leaf, module = site.leaf, site.module
    is_map = any(isinstance(owner, _MAPS) or is_conv1d(owner) for owner in site.owners)
    if not is_map and ("norm" in module.lower() or "norm" in leaf.lower()):
        return "norm, a row per head"
    of_tokens = site.number("vocab_size", "vocabulary_size") in site.shape
    if not is_map or (of_tokens and site.convolution is None):
        named = any("embed" in part.lower() for part in (leaf, module))
        if named or {"wte", "wpe"} & {leaf, module}:
            return "embedding by name"
    if not is_map and any(word in leaf.lower() for word in _TABLES):
        return "table by name"
    return None


def _is_router(site: Site) -> bool:
    """A router maps to one score per expert, and is small; also one layer deeper (router.layer)."""
    if len(site.shape) != 2 or not _ROUTER_NAMES & set(site.parts[-3:]):
        return False
    if site.number(*_EXPERT_COUNTS) in site.shape:
        return True
    return site.role in _ROUTER_NAMES and site.shape[0] < site.shape[-1]
