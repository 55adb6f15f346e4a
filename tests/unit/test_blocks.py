# SPDX-License-Identifier: Apache-2.0
"""Blocks against the list of their elements, and as views of a tensor."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_muon.ortho import chunks as chunks_module
from ds_muon.ortho.chunks import chunks
from ds_muon.plan.blocks import Block, one_run
from ds_muon.plan.layout import Matrix, Placement, flat_partition_layout
from ds_muon.run.views import packed, view

BLOCKS = st.builds(
    lambda start, run, runs, gap: (
        Block(start, runs * run, run, run + gap) if runs > 1 else one_run(start, run)
    ),
    st.integers(0, 9),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 5),
)


def elements(block: Block) -> list[int]:
    runs = range(block.start, block.start + block.numel // block.run * block.stride, block.stride)
    return [first + k for first in runs for k in range(block.run)]


@given(BLOCKS, st.data())
def test_a_cut_keeps_the_elements_in_their_order(block: Block, data: st.DataObject) -> None:
    listed = elements(block)
    assert [block.at(k) for k in range(block.numel)] == listed
    assert block.stop == listed[-1] + 1
    position = data.draw(st.integers(0, block.stop + 3))
    assert block.before(position) == sum(e < position for e in listed)
    first = data.draw(st.integers(0, block.numel))
    last = data.draw(st.integers(0, block.numel))
    pieces = block.cut(first, last)
    assert [e for piece in pieces for e in elements(piece)] == listed[first:last]
    assert len(pieces) <= 3
    assert all(e.run == e.numel or e.numel // e.run > 1 for e in pieces)


@given(BLOCKS)
def test_a_view_shows_the_elements_and_takes_no_memory(block: Block) -> None:
    whole = torch.arange(100)
    flat = whole[7:]
    found = view(flat, block)
    assert found.shape == block.shape
    assert found.flatten().tolist() == [7 + e for e in elements(block)]
    assert found.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert packed(flat, 2, block).flatten().tolist() == list(range(9, 9 + block.numel))


def test_many_rows_of_columns_are_three_fragments_at_most() -> None:
    """GPT-2 medium's c_attn: 1024 rows of three times 1024 columns, cut inside a row."""
    columns = [
        Placement(
            matrix=Matrix(name=n, rows=1024, cols=1024), offset=1024 * i, run=1024, stride=3072
        )
        for i, n in enumerate("qkv")
    ]
    layout = flat_partition_layout(columns, partition_numel=393_000, world_size=9)
    counts = Counter((i, p.rank) for i, of in enumerate(layout.fragments) for p in of)
    assert max(counts.values()) == 3 and len(counts) > 20
    assert sum(p.numel for of in layout.fragments for p in of) == 3 * 1024 * 1024


def test_chunks_of_a_strided_view_are_small_and_cover_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "CHUNK_NUMEL", 12)
    for rows, run in ((7, 5), (3, 30), (40, 1)):
        whole = torch.zeros(rows, run + 3)
        part = whole[:, :run]
        parts = [c for (c,) in chunks(part)]
        assert max(c.numel() for c in parts) <= 12
        for c in parts:
            c.add_(1)
        assert torch.equal(part, torch.ones(rows, run)) and whole.sum() == rows * run
