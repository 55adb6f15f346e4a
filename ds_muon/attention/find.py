# SPDX-License-Identifier: Apache-2.0
"""Find: the attention modules whose heads QK-clip can scale, and which rows belong to which head.

Owns: recognition by the names of projections, and the refusal of what cannot be scaled exactly.
Read next: probe.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from ds_muon.plan.heads import Heads, Part, Projection, Rows
from ds_muon.routing import clean_name, layer_shape

SUPPORTED = (
    "modules with linear q_proj and k_proj (Llama, Mistral, Qwen2, Mixtral and their like), or "
    "with kv_b_proj and q_proj or q_b_proj (DeepSeek's MLA)"
)
_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm", "qk_norm")
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What shares one pair of projections, usually one module.

    Attributes:
        checked: projections whose outputs are compared with what is attended with, and their heads.
    """

    modules: tuple[nn.Module, ...]
    heads: Heads
    checked: tuple[tuple[nn.Module, int], ...]


def find_attention(model: nn.Module) -> tuple[Attention, ...]:
    """Return all attention modules whose projections are trained.

    Raises:
        ValueError: there is none, or one cannot be scaled; names it, the rule and the remedy.
    """
    require_eager(model)
    names = {id(p): clean_name(name) for name, p in model.named_parameters()}
    found: dict[int, Attention] = {}
    for name, module in model.named_modules():
        attention = _recognise(clean_name(name), module, names)
        if attention is not None:
            key = id(attention.checked[0][0].weight)
            same = found.get(key, replace(attention, modules=()))
            found[key] = replace(same, modules=(*same.modules, module))
    if not found:
        raise ValueError(
            f"optimizer.params.qk_clip: the model has no attention that it can scale; it knows "
            f"{SUPPORTED}. Remove the key"
        )
    return tuple(found.values())


def require_eager(model: nn.Module) -> None:
    """Refuse compiled modules, whose calls nobody sees.

    Raises:
        ValueError: names the key and the remedy.
    """
    for module in model.modules():
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if compiled or isinstance(module, OptimizedModule):
            raise ValueError(
                "optimizer.params.qk_clip measures logits in uncompiled attention, and the model "
                "is compiled by torch.compile; train without it, or remove qk_clip"
            )


def unknown_attention(model: nn.Module, known: Sequence[Attention]) -> list[str]:
    """Names of modules that are called attention, have weights, and are not scaled."""
    inside = {id(m) for a in known for module in a.modules for m in module.modules()}
    return [
        clean_name(name)
        for name, module in model.named_modules()
        if type(module).__name__.lower().endswith("attention")
        and any(p.requires_grad for p in module.parameters())
        and id(module) not in inside
        and not any(id(m) in inside for m in module.modules())
    ]


def _recognise(name: str, module: nn.Module, names: dict[int, str]) -> Attention | None:
    children = dict(module.named_children())
    if "kv_b_proj" in children:
        query = "q_b_proj" if "q_b_proj" in children else "q_proj"
        wanted = (query, "kv_b_proj")
    else:
        wanted = ("q_proj", "k_proj")
    if not set(wanted) <= set(children):
        return None
    linears = [children[child] for child in wanted]
    parameters = [p for linear in linears for p in linear.parameters()]
    if not any(p.requires_grad for p in parameters):
        return None
    _require_scalable(name, module, children, dict(zip(wanted, linears, strict=True)))
    rows = _latent_rows(module) if "kv_b_proj" in children else _plain_rows(name, module, *linears)
    projections = [
        Projection(name=names[id(p)], rows=of_linear)
        for linear, of_linear in zip(linears, rows.of_linears, strict=True)
        for p in linear.parameters()
    ]
    heads = Heads(name=name, heads=rows.heads, keys=rows.keys, projections=tuple(projections))
    checked = [(linears[0], rows.heads)]
    if "kv_b_proj" not in children:
        checked.append((linears[1], rows.keys))
    return Attention(modules=(module,), heads=heads, checked=tuple(checked))


def _require_scalable(
    name: str, module: nn.Module, children: dict[str, nn.Module], linears: dict[str, nn.Module]
) -> None:
    norms = [norm for norm in _NORMS if norm in children]
    if norms:
        raise ValueError(
            f"optimizer.params.qk_clip: {name} normalises queries or keys ({', '.join(norms)}), "
            "so its logits do not follow its projections and are bounded already; remove qk_clip"
        )
    own = [child for child, _ in module.named_parameters(recurse=False)]
    if own:
        raise ValueError(
            f"optimizer.params.qk_clip: {name} has parameters of its own ({', '.join(own)}) that "
            f"may enter its logits; it can scale {SUPPORTED}. Remove qk_clip"
        )
    for child, linear in linears.items():
        if not isinstance(linear, nn.Linear) or not isinstance(linear.weight, nn.Parameter):
            kind = type(linear)
            raise ValueError(
                f"optimizer.params.qk_clip: {name}.{child} is a {kind.__module__}.{kind.__name__}, "
                "and only plain torch.nn.Linear projections can be scaled; remove qk_clip"
            )
        frozen = [n for n, p in linear.named_parameters() if not p.requires_grad]
        if frozen:
            raise ValueError(
                f"optimizer.params.qk_clip: {name}.{child} is frozen ({', '.join(frozen)}) while "
                "other projections of its module train; train both, freeze both, or remove qk_clip"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Rows of the query and of the key projection."""

    heads: int
    keys: int
    of_linears: tuple[tuple[Rows, ...], tuple[Rows, ...]]


def _plain_rows(name: str, module: nn.Module, query: nn.Module, key: nn.Module) -> _Layout:
    """Head after head, in both projections; several heads may share a key (GQA)."""
    query_rows, key_rows = (layer_shape(p.weight)[0] for p in (query, key))
    width = _attribute(module, ("head_dim",))
    if width is None:
        count = _attribute(module, _COUNTS)
        width = query_rows // count if count else None
    if not width or query_rows % width or key_rows % width:
        raise ValueError(
            f"optimizer.params.qk_clip: how many heads {name} has is not known; give the module an "
            f"attribute head_dim or num_heads that divides its {query_rows} and {key_rows} rows"
        )
    heads, keys = query_rows // width, key_rows // width
    if heads % keys:
        raise ValueError(
            f"optimizer.params.qk_clip: {name} has {heads} heads and {keys} keys, which do not "
            "form equal groups; remove qk_clip"
        )
    return _Layout(
        heads=heads,
        keys=keys,
        of_linears=(_repeated(heads, (width, "query")), _repeated(keys, (width, "key"))),
    )


def _latent_rows(module: Any) -> _Layout:
    """DeepSeek's MLA: per head the query is [plain | rotary], the latent's rows [key | value]."""
    heads, plain, rotary = module.num_heads, module.qk_nope_head_dim, module.qk_rope_head_dim
    return _Layout(
        heads=heads,
        keys=heads,
        of_linears=(
            _repeated(heads, (plain, "query"), (rotary, "whole")),
            _repeated(heads, (plain, "key"), (module.v_head_dim, "none")),
        ),
    )


def _repeated(heads: int, *parts: tuple[int, Part]) -> tuple[Rows, ...]:
    return tuple(
        Rows(count=count, part=part, head=None if part == "none" else head)
        for head in range(heads)
        for count, part in parts
    )


def _attribute(module: nn.Module, names: Sequence[str]) -> int | None:
    """The first of these attributes that the module, or its `config`, has as an integer."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None
