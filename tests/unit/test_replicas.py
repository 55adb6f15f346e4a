# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_muon.config import parse
from ds_muon.ortho.recipes import resolve
from ds_muon.plan.blocks import one_run
from ds_muon.plan.layout import split_parameter_layout
from ds_muon.plan.replicas import (
    messages,
    momentum_numel,
    reductions,
    restrict,
    split_over_replicas,
)
from ds_muon.planning import plan_run
from tests.unit.test_plan import MODEL, beside, offsets_of, whole_parameters


def test_replicas_share_the_matrices_of_all_leaves() -> None:
    layouts = [whole_parameters(*[(8, 8)] * 6, (4, 4), world=2) for _ in range(2)]
    costs = [[MODEL.flops(m.rows, m.cols) for m in layout.matrices] for layout in layouts]
    first, second = split_over_replicas(layouts, costs, 3)
    loads = Counter()
    for rows, of_layout in ((first, costs[0]), (second, costs[1])):
        assert sorted(i for row in rows for i in row) == list(range(7))
        loads.update({r: sum(of_layout[i] for i in row) for r, row in enumerate(rows)})
    # Twelve equal ones and two small ones on three replicas.
    assert sorted(loads.values()) == sorted(
        [4 * costs[0][0], 4 * costs[0][0] + costs[0][6], 4 * costs[0][0] + costs[0][6]]
    )


def test_a_row_keeps_its_matrices_where_they_are_and_their_momentum_together() -> None:
    layout = whole_parameters((8, 8), (4, 4), (6, 6), world=2)
    part = restrict(layout, (0, 2))
    assert part.matrices == (layout.matrices[0], layout.matrices[2])
    for kept, index in zip(part.fragments, (0, 2), strict=True):
        for piece, original in zip(kept, layout.fragments[index], strict=True):
            assert piece._replace(momentum=original.momentum) == original
    for rank in range(2):
        held = [p for pieces in part.fragments for p in pieces if p.rank == rank]
        assert held[0].momentum == one_run(0, held[0].numel)
        assert held[1].momentum.start == held[0].numel < held[1].place.start


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    world=st.integers(1, 4),
    replicas=st.integers(2, 4),
    chunk=st.integers(1, 50),
)
def test_columns_reduce_and_publish_every_element_once(
    shapes: list[tuple[int, int]], world: int, replicas: int, chunk: int
) -> None:
    # Every parameter is two matrices, side by side in its columns.
    items = [beside(f"m{i:03d}", rows, cols, cols + 1) for i, (rows, cols) in enumerate(shapes)]
    parts = [-(-rows * (2 * cols + 1) // world) for rows, cols in shapes]
    layout = split_parameter_layout(
        items, partition_numels=parts, leaf_offsets=offsets_of(parts), world_size=world
    )
    config = parse({})
    [rows] = plan_run([layout], config, resolve(config), storage=torch.bfloat16, replicas=replicas)
    for shard in range(world):
        pieces = [p for of_matrix in layout.fragments for p in of_matrix if p.rank == shard]
        numel = sum(p.numel for p in pieces)
        leaf = sum(parts)
        sent = [part for bucket in messages(rows, shard) for m in bucket for part in m.parts]
        assert sorted(p.fragment.place for p in sent) == sorted(p.place for p in pieces)
        assert sum(p.fragment.numel for p in sent) == numel
        chunks = reductions(rows, shard, leaf_numel=leaf, chunk_numel=chunk)
        assert all(0 < c.numel <= chunk for c in chunks)
        reduced = [b.at(k) for c in chunks for b in c.blocks for k in range(b.numel)]
        held = [p.place.at(k) for p in pieces for k in range(p.numel)]
        assert sorted(reduced) == sorted(held) and len(set(held)) == numel
        assert sum(momentum_numel(row, shard) for row in rows) == numel
        [everything] = reductions(None, shard, leaf_numel=7, chunk_numel=7)
        assert everything.destination is None and everything.blocks == (one_run(0, 7),)
