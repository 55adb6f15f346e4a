# SPDX-License-Identifier: Apache-2.0
"""QK-clip without ranks: the formula, rows of heads, what is measured, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ds_muon.attention.find import find_attention, unknown_attention
from ds_muon.attention.probe import LogitProbe
from ds_muon.ortho import qk_clip
from ds_muon.ortho.qk_clip import factor_table, largest_logits
from ds_muon.plan.heads import Heads, Projection, Rows, Slots, row_ranges
from tests.harness import models

CPU = torch.device("cpu")
sdpa = nn.functional.scaled_dot_product_attention


def test_one_key_per_head_is_the_papers_formula() -> None:
    largest = torch.tensor([50.0, 400.0, 100.0, math.inf, math.nan, -math.inf])
    query, key, whole, one = factor_table(largest, torch.arange(6), keys=6, tau=100.0).split(
        [6, 6, 6, 1]
    )
    half = torch.tensor([1.0, 0.5, 1.0, 1.0, 1.0, 1.0])  # sqrt(100 / 400) = 1 / 2
    assert torch.equal(query, half) and torch.equal(key, half)
    assert torch.equal(whole, half.square()) and one.item() == 1.0


def test_heads_that_share_a_key_each_get_their_own_gamma() -> None:
    largest = torch.tensor([50.0, 400.0, 200.0, 30.0])
    query, key, _ = factor_table(largest, torch.tensor([0, 0, 0, 1]), keys=2, tau=100.0).split(
        [4, 2, 5]
    )
    assert torch.equal(key, torch.tensor([0.5, 1.0]))
    clipped = largest * query * key[[0, 0, 0, 1]]
    assert torch.equal(clipped, torch.tensor([50.0, 100.0, 100.0, 30.0]))


def full_logits(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """All logits at once, in float64, hidden ones at -inf."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = (q.double() @ k.double().transpose(-1, -2)) * scale
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:]).tril() == 0, -math.inf)
    return logits if mask is None else logits.masked_fill(~mask, -math.inf)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", ["no", "bool", "additive"])
def test_chunks_find_the_largest_logit(
    causal: bool, masked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, heads, 13, 8, generator=generator) for heads in (6, 2))
    attends = torch.rand(2, 1, 13, 13, generator=generator) > 0.5
    mask = {"no": None, "bool": attends, "additive": attends.float().log().clamp(min=-1e4)}[masked]
    hidden = attends if masked != "no" else None
    expected = full_logits(q, k, hidden, causal, 0.3).amax(dim=(0, 2, 3)).float()
    for chunk in (1, 500, 2**24):  # rows at a time: 1, 3, all
        monkeypatch.setattr(qk_clip, "CHUNK_NUMEL", chunk)
        found = largest_logits(q, k, mask=mask, causal=causal, scale=0.3)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("cols", [1, 5])
def test_row_ranges_cover_a_fragment_wherever_it_is_cut(cols: int) -> None:
    rows = 7
    owner = torch.arange(rows).repeat_interleave(cols)
    for start in range(rows * cols):
        for end in range(start + 1, rows * cols + 1):
            leaf = torch.full((end - start + 4,), -1)
            ranges = row_ranges(parameter_offset=start, leaf_offset=2, numel=end - start, cols=cols)
            assert len(ranges) <= 3
            for r in ranges:
                block = leaf[r.leaf_offset : r.leaf_offset + r.rows * r.cols].view(r.rows, r.cols)
                assert (block == -1).all()
                block.copy_(torch.arange(r.first_row, r.first_row + r.rows)[:, None])
            assert torch.equal(leaf[2:-2], owner[start:end])
            assert (leaf[[0, 1, -2, -1]] == -1).all()


def test_slots_follow_the_order_of_the_table() -> None:
    rows = (Rows(2, "query", 0), Rows(1, "whole", 0), Rows(2, "query", 1), Rows(1, "whole", 1))
    keys = (Rows(1, "key", 0), Rows(2, "none", None), Rows(1, "key", 1), Rows(2, "none", None))
    module = Heads(
        name="a",
        heads=2,
        keys=2,
        projections=(Projection(name="q", rows=rows), Projection(name="k", rows=keys)),
    )
    slots = Slots(modules=(module, module))
    assert slots.size == 13 and slots.key_of() == (0, 1, 2, 3)
    assert list(slots.of_rows()) == [
        ("q", (0, 0, 8, 1, 1, 9)),
        ("k", (4, 12, 12, 5, 12, 12)),
        ("q", (2, 2, 10, 3, 3, 11)),
        ("k", (6, 12, 12, 7, 12, 12)),
    ]


class Toy(nn.Module):
    """Attention with options to break what QK-clip relies on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.num_heads = kind, 4
        self.q_proj, self.k_proj = nn.Linear(16, 32), nn.Linear(16, 16)
        if kind == "named norm":
            self.q_norm = nn.RMSNorm(8)
        if kind == "sinks":
            self.sinks = nn.Parameter(torch.zeros(4))
        if kind == "no heads":
            del self.num_heads
        if kind == "frozen":
            self.k_proj.requires_grad_(False)
        if kind == "quantised":
            self.q_proj = nn.Sequential(nn.Linear(16, 32))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (2, 8)).transpose(1, 2)
        if self.kind == "hidden norm":
            q = q / q.norm(dim=-1, keepdim=True)
        if self.kind == "interleaved":
            q = self.q_proj(x).unflatten(-1, (8, 4)).permute(0, 3, 1, 2)
        k = k.repeat_interleave(2, dim=1)
        if self.kind == "unseen":
            return ((q @ k.mT).exp() @ k).sum()
        if self.kind == "softmax":
            hidden = torch.ones(x.shape[1], x.shape[1]).triu(1) > 0
            return (nn.functional.softmax((q @ k.mT / 8**0.5).masked_fill(hidden, -1e30), -1)).sum()
        return sdpa(q, k, k, is_causal=True).sum()


def probe(kind: str) -> tuple[Toy, LogitProbe]:
    torch.manual_seed(1)
    toy = Toy(kind)
    return toy, LogitProbe(find_attention(toy), CPU)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("named norm", "normalises queries or keys .q_norm"),
        ("sinks", "parameters of its own .sinks"),
        ("no heads", "head_dim or num_heads"),
        ("frozen", "k_proj is frozen"),
        ("quantised", "Sequential"),
    ],
)
def test_what_cannot_be_scaled_is_refused_at_start(kind: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_attention(Toy(kind))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("hidden norm", "normalised in between"),
        ("interleaved", "rows of its projections in order"),
        ("unseen", "cannot be seen"),
    ],
)
def test_what_only_a_forward_shows_is_refused_there(kind: str, words: str) -> None:
    toy, _ = probe(kind)
    with pytest.raises(ValueError, match=words):
        toy(torch.randn(2, 5, 16))


def test_models_without_attention_and_frozen_ones() -> None:
    with pytest.raises(ValueError, match="no attention that it can scale"):
        find_attention(models.Mlp())
    with pytest.raises(ValueError, match="no attention that it can scale"):
        find_attention(Toy("plain").requires_grad_(False))
    both = nn.ModuleList([Toy("plain"), nn.MultiheadAttention(4, 2)])
    assert unknown_attention(both, find_attention(both)) == ["1"]


def test_counted_are_training_forwards_and_nothing_changes() -> None:
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    plain, _ = probe("plain")
    results = []
    for kind in ("plain", "softmax"):
        toy, seen = probe(kind)
        toy.eval()(x)
        with torch.no_grad():
            toy.train()(x)
        assert (seen.largest == -math.inf).all()
        toy(x * 0.1)
        toy(x)
        found = seen.largest.clone()
        toy(x)
        toy(x * 0.1)
        assert torch.equal(found, seen.largest)
        results.append(found)
        unhooked = Toy(kind)
        unhooked.load_state_dict(toy.state_dict())
        assert torch.equal(unhooked(x), toy(x))
    q = plain.q_proj(x).unflatten(-1, (4, 8)).transpose(1, 2)
    k = plain.k_proj(x).unflatten(-1, (2, 8)).transpose(1, 2)
    expected = full_logits(q, k, None, True, 8**-0.5).amax(dim=(0, 2, 3)).float()
    for found in results:
        torch.testing.assert_close(found, expected)


def test_compiled_models_are_refused() -> None:
    toy = Toy("plain")
    toy.compile(backend="eager")
    with pytest.raises(ValueError, match="torch.compile"):
        find_attention(toy)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "DeepseekV3"])
def test_transformers_families(family: str) -> None:
    """Both attention functions show the same logits; after scaling none exceeds tau."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    latent = {
        "q_lora_rank": 12,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
    }
    grouped = {"num_key_value_heads": 2}
    more = latent if family == "DeepseekV3" else grouped
    config = getattr(transformers, f"{family}Config")(**sizes, num_attention_heads=4, **more)
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    padded = torch.ones_like(tokens)
    padded[0, 5:] = 0
    found = []
    for attention in ("eager", "sdpa"):
        config._attn_implementation = attention
        torch.manual_seed(2)
        model = getattr(transformers, f"{family}ForCausalLM")(config).train()
        for name, p in model.named_parameters():
            if "self_attn" in name and "norm" not in name:
                p.data.normal_(std=0.5)
        seen = LogitProbe(find_attention(model), CPU)
        model(input_ids=tokens, attention_mask=padded)
        found.append(seen.largest.clone())
    torch.testing.assert_close(*found)
    tau = float(found[0].sort().values[1:3].mean())
    table = factor_table(found[1], torch.tensor(seen.slots.key_of()), keys=seen.slots.keys, tau=tau)
    for name, rows in seen.slots.of_rows():
        weight = model.get_parameter(name)
        weight.data.view(len(rows), -1).mul_(table[list(rows)][:, None])
    seen.largest.fill_(-math.inf)
    model(input_ids=tokens, attention_mask=padded)
    # fp32 products in another order, of rows that were scaled and rounded once.
    torch.testing.assert_close(seen.largest, found[1].clamp(max=tau), rtol=1e-5, atol=1e-5)
    assert sum(found[1] > tau) == 2
