# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_muon.config import parse
from ds_muon.ortho.recipes import resolve
from ds_muon.plan.blocks import one_run
from ds_muon.plan.costs import CostModel
from ds_muon.plan.layout import (
    Fragment,
    Layout,
    Matrix,
    Placement,
    flat_partition_layout,
    replicated_layout,
    split_parameter_layout,
)
from ds_muon.plan.memory import Workspace, aligned, buffer_sets
from ds_muon.plan.owners import assign_owners, makespan
from ds_muon.plan.plan import Plan, build_plan
from ds_muon.plan.traffic import STRATEGIES
from ds_muon.planning import MIB, plan_layout, read_owner_costs


def iterate_bytes(rows: int, cols: int) -> int:
    return 2 * (2 * rows * cols + 2 * min(rows, cols) ** 2)


MODEL = CostModel(steps=5, gram_from=None, gram_restarts=0, iterate_bytes=iterate_bytes)


STAGING = 80


def workspace(cap_bytes: int, exchange: str = "all_to_all", inflight: int = 1) -> Workspace:
    return Workspace(
        cap_bytes=cap_bytes,
        exchange=exchange,
        sets=buffer_sets(inflight),
        wire_bytes=2,
        update_bytes=2,
        staging_bytes=STAGING,
    )


def placements(*shapes: tuple[int, int], gap: int = 0) -> list[Placement]:
    found, offset = [], 0
    for index, (rows, cols) in enumerate(shapes):
        found.append(
            Placement(matrix=Matrix(name=f"m{index:03d}", rows=rows, cols=cols), offset=offset)
        )
        offset += rows * cols + gap
    return found


def beside(name: str, rows: int, *widths: int) -> list[Placement]:
    """Matrices that are columns of one parameter."""
    stride = sum(widths)
    return [
        Placement(
            matrix=Matrix(name=f"{name}.{i}", rows=rows, cols=width),
            offset=sum(widths[:i]),
            run=width,
            stride=stride,
        )
        for i, width in enumerate(widths)
    ]


def offsets_of(parts: Sequence[int]) -> list[int]:
    return [sum(parts[:i]) for i in range(len(parts))]


def whole_parameters(*shapes: tuple[int, int], world: int) -> Layout:
    parts = [-(-r * c // world) for r, c in shapes]
    items = [
        [Placement(matrix=Matrix(name=f"m{i:03d}", rows=r, cols=c), offset=0)]
        for i, (r, c) in enumerate(shapes)
    ]
    return split_parameter_layout(
        items, partition_numels=parts, leaf_offsets=offsets_of(parts), world_size=world
    )


def moved_numel(layout: Layout, owners: tuple[int, ...]) -> int:
    """Elements that travel to their owner, summed over matrices."""
    return sum(
        matrix.numel - layout.held_numel(i, owners[i]) for i, matrix in enumerate(layout.matrices)
    )


def spans(layout: Layout, index: int) -> list[tuple[int, int, int, int]]:
    return [(f.rank, f.place.start, f.matrix_offset, f.numel) for f in layout.fragments[index]]


def test_flat_partition_cuts_at_partition_edges() -> None:
    layout = flat_partition_layout(
        placements((2, 2), (1, 3), (2, 2)), partition_numel=6, world_size=2
    )
    assert spans(layout, 0) == [(0, 0, 0, 4)]
    assert spans(layout, 1) == [(0, 4, 0, 2), (1, 0, 2, 1)]
    assert spans(layout, 2) == [(1, 1, 0, 4)]


def test_a_matrix_over_three_ranks_and_a_rank_of_padding() -> None:
    layout = flat_partition_layout(placements((2, 5)), partition_numel=4, world_size=4)
    assert spans(layout, 0) == [(0, 0, 0, 4), (1, 0, 4, 4), (2, 0, 8, 2)]
    assert layout.held_numel(0, 3) == 0
    assert layout.holders(0) == (0, 1, 2)


def test_split_parameters_have_short_and_empty_last_pieces() -> None:
    layout = whole_parameters((3, 3), (2, 2), world=4)
    assert spans(layout, 0) == [(0, 0, 0, 3), (1, 0, 3, 3), (2, 0, 6, 3)]
    assert spans(layout, 1) == [(0, 3, 0, 1), (1, 3, 1, 1), (2, 3, 2, 1), (3, 3, 3, 1)]


def test_experts_that_divide_evenly_stay_whole() -> None:
    stack = [Placement(matrix=Matrix(name=f"e{i}", rows=2, cols=3), offset=6 * i) for i in range(4)]
    layout = split_parameter_layout([stack], partition_numels=[12], leaf_offsets=[0], world_size=2)
    owners = assign_owners(layout, [1] * 4, scope="balance")
    assert owners == (0, 0, 1, 1)
    assert moved_numel(layout, owners) == 0


def test_replicated_matrices_move_nothing_in_and_an_update_to_every_other_rank() -> None:
    layout = replicated_layout([placements((4, 4)), placements((4, 4))], world_size=3)
    assert layout.is_replicated(0)
    plan = build_plan(layout, MODEL, owner_scope="balance", workspace=workspace(1 << 20))
    assert not any(route.moving(way_in=True) for route in plan.routes)
    assert sum(plan.received_numel()) == 2 * 2 * 16


def test_a_layout_that_does_not_tile_a_matrix_is_a_bug() -> None:
    block = one_run(0, 3)
    piece = Fragment(rank=0, leaf=0, matrix_offset=0, place=block, momentum=block)
    with pytest.raises(AssertionError, match="m"):
        Layout(world_size=2, matrices=(Matrix(name="m", rows=2, cols=2),), fragments=((piece,),))


def test_largest_first_by_hand() -> None:
    layout = whole_parameters((8, 8), (6, 6), (4, 4), (4, 4), (2, 2), world=2)
    costs = [8, 7, 6, 5, 4]
    # 8 -> rank 0, 7 -> rank 1, 6 -> rank 1 (13), 5 -> rank 0 (13), 4 -> tie: fewer bytes received.
    owners = assign_owners(layout, costs, scope="balance")
    assert owners[:4] == (0, 1, 1, 0)
    assert makespan(layout, costs, owners) == 17


def test_equal_costs_break_ties_by_name_and_spread() -> None:
    layout = whole_parameters(*[(4, 4)] * 6, world=3)
    owners = assign_owners(layout, [1] * 6, scope="balance")
    assert Counter(owners) == {0: 2, 1: 2, 2: 2}


def test_more_ranks_than_matrices_and_no_matrix() -> None:
    layout = whole_parameters((4, 4), world=8)
    assert len(set(assign_owners(layout, [1], scope="balance"))) == 1
    empty = Layout(world_size=4, matrices=(), fragments=())
    assert assign_owners(empty, [], scope="balance") == ()
    plan = build_plan(empty, MODEL, owner_scope="balance", workspace=workspace(1))
    assert plan.routes == ()


def test_straddlers_move_only_what_is_split() -> None:
    layout = flat_partition_layout(
        placements((2, 2), (1, 3), (2, 2)), partition_numel=6, world_size=2
    )
    owners = assign_owners(layout, [1, 1, 1], scope="straddlers")
    assert (owners[0], owners[2]) == (0, 1)
    assert moved_numel(layout, owners) in (1, 2)


def test_flops_are_the_published_formulas() -> None:
    n, m = 10, 40
    standard = MODEL.flops(n, m)
    assert standard == MODEL.flops(m, n) == 5 * n * n * (4 * m + 2 * n)
    gram = CostModel(steps=5, gram_from=1.0, gram_restarts=1, iterate_bytes=iterate_bytes)
    # 8 alpha + 28 in units of n^3, alpha = m / n.
    assert gram.flops(n, m) == n**3 * (8 * (m // n) + 28)
    assert gram.flops(n, n) == MODEL.flops(n, n)


def exchange_bytes(plan: Plan, number: int, rank: int) -> int:
    """Buffers of a bucket, counted from the plan's legs: both ways share them."""
    ways = plan.legs()[2 * number : 2 * number + 2]
    return sum(
        aligned(2 * max(getattr(way, side)[rank] for way in ways))
        for side in ("send_numel", "receive_numel")
    )


SHAPE = st.tuples(st.integers(2, 12), st.integers(2, 12))


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(SHAPE, min_size=1, max_size=12),
    world=st.integers(1, 5),
    kind=st.sampled_from(["flat", "split", "replicated"]),
    scope=st.sampled_from(["balance", "straddlers"]),
    cap=st.integers(1, 4000),
    gap=st.integers(0, 3),
    exchange=st.sampled_from(STRATEGIES),
    inflight=st.integers(1, 2),
)
def test_every_plan_moves_every_element_once_and_keeps_the_cap(
    shapes: list[tuple[int, int]],
    world: int,
    kind: str,
    scope: str,
    cap: int,
    gap: int,
    exchange: str,
    inflight: int,
) -> None:
    if kind == "flat":
        items = placements(*shapes, gap=gap)
        end = items[-1].offset + items[-1].matrix.numel
        layout = flat_partition_layout(items, partition_numel=-(-end // world), world_size=world)
    elif kind == "split":
        layout = whole_parameters(*shapes, world=world)
    else:
        layout = replicated_layout([placements(s) for s in shapes], world_size=world)
    if kind == "replicated":
        names = iter(range(len(shapes)))
        layout = Layout(
            world_size=world,
            matrices=tuple(
                Matrix(name=f"m{next(names)}", rows=m.rows, cols=m.cols) for m in layout.matrices
            ),
            fragments=layout.fragments,
        )
    plan = build_plan(
        layout, MODEL, owner_scope=scope, workspace=workspace(cap, exchange, inflight)
    )
    visited = Counter(i for route in plan.routes for i in route.matrices)
    assert visited == Counter(range(len(shapes)))
    sets = buffer_sets(inflight)
    for rank in range(world):
        needed = [exchange_bytes(plan, n, rank) for n in range(len(plan.routes))]
        assert plan.exchange_bytes[rank] == max(needed)
        owned = [m for m, o in zip(layout.matrices, plan.owners, strict=True) if o == rank]
        iterate = max((iterate_bytes(m.rows, m.cols) for m in owned), default=0)
        assert plan.iterate_bytes[rank] == iterate
        assert plan.peak_bytes()[rank] == sets * max(needed) + iterate + STAGING
    assert max(plan.peak_bytes()) <= max([cap, *(o.need_bytes for o in plan.oversize)])
    total, moved = sum(r * c for r, c in shapes), moved_numel(layout, plan.owners)
    if exchange in ("all_to_all", "p2p"):
        expected = (world - 1) * total if kind == "replicated" else 2 * moved
        assert sum(plan.received_numel()) == expected
    for item in plan.legs():
        assert all(0 <= p <= r for p, r in zip(item.padding, item.received, strict=True))
    again = build_plan(
        layout, MODEL, owner_scope=scope, workspace=workspace(cap, exchange, inflight)
    )
    assert again.digest() == plan.digest()
    assert sum(plan.owner_flops()) == sum(plan.flops)


def test_the_digest_sees_owners_and_buckets() -> None:
    layout = whole_parameters(*[(8, 8)] * 6, world=2)
    plans = [
        build_plan(layout, MODEL, owner_scope="balance", workspace=workspace(b))
        for b in (1, 1 << 20)
    ]
    assert plans[0].digest() != plans[1].digest()
    assert len(plans[0].routes) > len(plans[1].routes)


LLAMA_8B = ([(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 3], 32)
LLAMA_70B = ([(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), *[(28672, 8192)] * 3], 80)
QWEN_7B = ([(3584, 3584), (512, 3584), (512, 3584), (3584, 3584), *[(18944, 3584)] * 3], 28)
# Plain largest-first over the mean: whole matrices allow no better.
LARGEST_FIRST = [
    (LLAMA_8B, {8: 1.00, 16: 1.00, 64: 1.06, 256: 2.11}),
    (LLAMA_70B, {8: 1.00, 16: 1.00, 64: 1.01}),
    (QWEN_7B, {8: 1.00, 16: 1.02, 64: 1.30, 256: 2.59}),
]


@pytest.mark.parametrize("flat", [False, True], ids=["zero3", "zero2"])
@pytest.mark.parametrize(
    ("model", "world", "figure"),
    [(m, n, f) for m, figures in LARGEST_FIRST for n, f in figures.items()],
    ids=lambda v: str(v) if isinstance(v, (int, float)) else f"{v[1]}-layers",
)
def test_the_critical_path_over_all_buckets_is_plain_largest_first(
    model: tuple[list[tuple[int, int]], int], world: int, figure: float, flat: bool
) -> None:
    shapes = model[0] * model[1]
    if flat:
        items = placements(*shapes)
        end = items[-1].offset + items[-1].matrix.numel
        layout = flat_partition_layout(items, partition_numel=-(-end // world), world_size=world)
    else:
        layout = whole_parameters(*shapes, world=world)
    config = parse({})
    plan = plan_layout(layout, config, resolve(config), storage=torch.bfloat16)
    assert round(plan.makespan() * world / sum(plan.costs), 2) <= figure
    cap = config.workspace_mb * MIB
    assert max(plan.peak_bytes()) <= max([cap, *(o.need_bytes for o in plan.oversize)])
    if model is LLAMA_8B:
        assert not plan.oversize, "32 layers at 512 MiB"


def write_costs(path: Path, rows: list[list[float]]) -> str:
    path.write_text(json.dumps({"seconds": rows}))
    return str(path)


def test_measured_costs_move_owners_and_are_part_of_the_digest(tmp_path: Path) -> None:
    shapes = [(64, 64)] * 2 + [(32, 256)] * 2
    layout = whole_parameters(*shapes, world=2)

    def plan(**params: object) -> Plan:
        config = parse(params)
        return plan_layout(layout, config, resolve(config), storage=torch.float32)

    plain = plan()
    assert plain.costs == plain.flops
    # As measured, one of the wide ones takes as long as all others together.
    slow = write_costs(tmp_path / "slow.json", [[32, 256, 1.0], [64, 64, 1e-3]])
    measured = plan(owner_costs=slow)
    assert sum(measured.costs) == pytest.approx(sum(plain.flops), rel=1e-3)
    assert measured.costs[2] / measured.costs[0] == pytest.approx(1000, rel=1e-2)
    assert measured.digest() != plain.digest()
    # A shape that the table lacks costs its flops at the table's rate.
    partial = plan(owner_costs=write_costs(tmp_path / "one.json", [[64, 64, 0.5]]))
    assert partial.costs == plain.costs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("[]", "is not that"),
        ('{"seconds": [[64, 32, 1.0]]}', "unusable entry"),
        ('{"seconds": []}', "unusable entry"),
        ('{"seconds": [[1, 2]]}', "is not that"),
        ('{"seconds": [[1.5, 64, 1.0]]}', "unusable entry"),
        ('{"seconds": [[Infinity, 64, 1.0]]}', "unusable entry"),
        ('{"seconds": [[32, 64, 1e-320]]}', "unusable entry"),
        ('{"seconds": [[32, 64, 1e308]]}', "unusable entry"),
        ('{"seconds": [[32, 64, 1.0], [32, 64, 2.0]]}', "a shape twice"),
    ],
)
def test_a_cost_table_that_is_none_is_an_error(
    text: str | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        read_owner_costs(str(path))
    assert "owner_costs" in str(caught.value) and "costs.json" in str(caught.value)


def test_whole_experts_move_only_where_that_pays() -> None:
    """Experts that a rank holds whole stay, though attention alone cannot be balanced."""
    stack = [
        Placement(matrix=Matrix(name=f"e{i}", rows=8, cols=16), offset=128 * i) for i in range(8)
    ]
    attention = [
        [Placement(matrix=Matrix(name=f"q{i}", rows=16, cols=16), offset=0)] for i in range(3)
    ]
    layout = split_parameter_layout(
        [*attention, stack],
        partition_numels=[128, 128, 128, 512],
        leaf_offsets=[0, 128, 256, 384],
        world_size=2,
    )
    costs = [MODEL.flops(m.rows, m.cols) for m in layout.matrices]
    owners = assign_owners(layout, costs, scope="balance")
    assert [o for m, o in zip(layout.matrices, owners, strict=True) if m.name[0] == "e"] == (
        [0] * 4 + [1] * 4
    )


@pytest.mark.parametrize("inflight", [1, 2])
@pytest.mark.parametrize("cap_mib", [52, 55, 64, 73, 148])
def test_many_small_matrices_beside_a_large_one_stay_within_the_cap(
    cap_mib: int, inflight: int
) -> None:
    """One owner takes many in a row, while the other has the smaller budget and holds pieces."""
    layout = whole_parameters((1536, 1536), *[(1024, 128)] * 500, world=2)
    config = parse({"workspace_mb": cap_mib, "max_inflight_buckets": inflight})
    plan = plan_layout(layout, config, resolve(config), storage=torch.bfloat16)
    allowed = max([cap_mib * MIB, *(o.need_bytes for o in plan.oversize)])
    assert max(plan.peak_bytes()) <= allowed
