# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_muon.config import parse
from ds_muon.ortho.recipes import resolve
from ds_muon.plan.replicas import (
    messages,
    momentum_numel,
    reductions,
    restrict,
    split_over_replicas,
)
from ds_muon.planning import plan_run
from tests.unit.test_plan import MODEL, whole_parameters


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
            assert piece._replace(momentum_offset=original.momentum_offset) == original
    for rank in range(2):
        held = [p for pieces in part.fragments for p in pieces if p.rank == rank]
        assert held[0].momentum_offset == 0
        assert held[1].momentum_offset == held[0].numel < held[1].leaf_offset


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
    layout = whole_parameters(*shapes, world=world)
    config = parse({})
    [rows] = plan_run([layout], config, resolve(config), storage=torch.bfloat16, replicas=replicas)
    for shard in range(world):
        pieces = [p for of_matrix in layout.fragments for p in of_matrix if p.rank == shard]
        numel = sum(p.numel for p in pieces)
        leaf = max((p.leaf_offset + p.numel for p in pieces), default=0)
        sent = [part for bucket in messages(rows, shard) for m in bucket for part in m.parts]
        assert sorted(p.fragment.leaf_offset for p in sent) == sorted(p.leaf_offset for p in pieces)
        assert sum(p.fragment.numel for p in sent) == numel
        chunks = reductions(rows, shard, leaf_numel=leaf, chunk_numel=chunk)
        assert all(0 < c.numel <= chunk for c in chunks)
        ranges = sorted(r for c in chunks for r in c.ranges)
        assert sum(n for _, n in ranges) == numel
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ranges))
        assert sum(momentum_numel(row, shard) for row in rows) == numel
        [everything] = reductions(None, shard, leaf_numel=7, chunk_numel=7)
        assert everything.destination is None and everything.ranges == ((0, 7),)
