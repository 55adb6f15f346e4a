# SPDX-License-Identifier: Apache-2.0
"""Strategies: four ways to bring a matrix together, interchangeable and with the same bits.

Owns: where each piece stands in the send and the receive buffer of a way, and which collectives
move them. Elements, calls and buffer sizes are plan/traffic.py's formulas.
Never does: math; what is written into a piece, and what is done with one, is the caller's.

Origins: all_to_all is Canzona's and XTuner's exchange (with splits instead of padding); all_gather
is DeepSpeed ZeRO-3's concatenated all-gather with reorder; broadcast is DMuon's packed buffer per
owner; p2p is MatrixFSDP's ragged segments by send and receive.

The reorder of the concatenated all-gather, three ranks and matrices A, B, C: rank r contributes one
buffer, all ranks receive

    [A0 B0 C0 | A1 B1 C1 | A2 B2 C2]        one collective instead of one per matrix

and slot (rank, offset) of every piece puts A0 A1 A2, B0 B1 B2, C0 C1 C2 together again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_muon.comm.transport import Pending, Transport
from ds_muon.plan.routes import BucketRoute, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A range of one matrix in a buffer; offsets and numel in elements.

    Attributes:
        piece: what the range is to its holder; None: a whole matrix in its owner's packed buffer.
    """

    matrix: int
    matrix_offset: int
    numel: int
    buffer_offset: int
    piece: Piece | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One direction of one bucket as this rank runs it.

    Attributes:
        sends: ranges that this rank writes before the exchange.
        receives: ranges that it reads after it.
        start: issues the collectives (receive buffer, send buffer) and returns their handles.
    """

    sends: tuple[Slot, ...]
    receives: tuple[Slot, ...]
    send_numel: int
    receive_numel: int
    start: Callable[[Transport, Tensor, Tensor], list[Pending]]


def plan_way(
    strategy: str, route: BucketRoute, matrix_numels: Sequence[int], rank: int, *, way_in: bool
) -> Way:
    """Lay out one direction of a bucket for `rank`; matrix_numels[i] is matrix i's size."""
    if not route.moving(way_in=way_in):
        return Way(sends=(), receives=(), send_numel=0, receive_numel=0, start=_nothing)
    if strategy == "all_gather":
        return _all_gather(route, matrix_numels, rank, way_in=way_in)
    if strategy == "broadcast" and not way_in:
        return _broadcast(route, matrix_numels, rank)
    return _personal(strategy, route, rank, way_in=way_in)


def warm_up(strategy: str, transport: Transport, device: torch.device) -> None:
    """Issue every collective of a strategy once, so that connections and their memory exist.

    A communication library connects a pair of ranks when they first talk; without this the first
    step would be the one that runs out of memory.
    """
    size, rank = transport.world_size, transport.rank
    sent, received = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    if strategy == "all_gather":
        pending = [transport.all_gather(received, sent[:1])]
    elif strategy == "p2p":
        peers = [peer for peer in range(size) if peer != rank]
        pending = transport.send_receive(
            {peer: received[peer : peer + 1] for peer in peers},
            {peer: sent[peer : peer + 1] for peer in peers},
        )
    else:
        ones = [1] * size
        pending = [transport.all_to_all(received, sent, received_numels=ones, sent_numels=ones)]
    for handle in pending:
        handle.wait()
    if strategy == "broadcast":
        for source in range(size):
            transport.broadcast(sent[:1], source=source).wait()


def _nothing(transport: Transport, received: Tensor, sent: Tensor) -> list[Pending]:
    return []


def _slot(piece: Piece, offset: int) -> Slot:
    return Slot(
        matrix=piece.matrix,
        matrix_offset=piece.fragment.matrix_offset,
        numel=piece.numel,
        buffer_offset=offset,
        piece=piece,
    )


def _pack(
    pieces: Sequence[Piece], peers: Sequence[int], world_size: int
) -> tuple[tuple[Slot, ...], tuple[int, ...]]:
    """Place pieces one after another, grouped by peer rank; return slots and elements per peer."""
    slots, numels, offset = [], [0] * world_size, 0
    for i in sorted(range(len(pieces)), key=lambda i: peers[i]):
        slots.append(_slot(pieces[i], offset))
        offset += pieces[i].numel
        numels[peers[i]] += pieces[i].numel
    return tuple(slots), tuple(numels)


def _personal(strategy: str, route: BucketRoute, rank: int, *, way_in: bool) -> Way:
    """all_to_all and p2p: every rank receives exactly what it needs."""
    moving = route.moving(way_in=way_in)
    away = [p for p in moving if p.holder == rank]
    home = [p for p in moving if p.owner == rank]
    away_slots, away_numels = _pack(away, [p.owner for p in away], route.world_size)
    home_slots, home_numels = _pack(home, [p.holder for p in home], route.world_size)
    sends, sent = (away_slots, away_numels) if way_in else (home_slots, home_numels)
    receives, received = (home_slots, home_numels) if way_in else (away_slots, away_numels)

    def all_to_all(transport: Transport, into: Tensor, out: Tensor) -> list[Pending]:
        return [transport.all_to_all(into, out, received_numels=received, sent_numels=sent)]

    def p2p(transport: Transport, into: Tensor, out: Tensor) -> list[Pending]:
        return transport.send_receive(_by_peer(into, received), _by_peer(out, sent))

    return Way(
        sends=sends,
        receives=receives,
        send_numel=sum(sent),
        receive_numel=sum(received),
        start=p2p if strategy == "p2p" else all_to_all,
    )


def _by_peer(buffer: Tensor, numels: Sequence[int]) -> dict[int, Tensor]:
    parts = buffer.split(list(numels))
    return {peer: part for peer, part in enumerate(parts) if part.numel()}


def _owned_slots(
    route: BucketRoute, matrix_numels: Sequence[int]
) -> tuple[list[list[Slot]], list[int]]:
    """Per rank, the whole matrices it owns, packed in the bucket's order, and their elements."""
    slots: list[list[Slot]] = [[] for _ in range(route.world_size)]
    numels = [0] * route.world_size
    owner_of = {p.matrix: p.owner for p in route.pieces}
    for index in route.matrices:
        owner, numel = owner_of[index], matrix_numels[index]
        slots[owner].append(
            Slot(
                matrix=index,
                matrix_offset=0,
                numel=numel,
                buffer_offset=numels[owner],
                piece=None,
            )
        )
        numels[owner] += numel
    return slots, numels


def _own_pieces(route: BucketRoute, rank: int, start_of: dict[int, int]) -> tuple[Slot, ...]:
    """Where this rank's pieces lie in received whole matrices; `start_of` is by matrix."""
    return tuple(
        _slot(p, start_of[p.matrix] + p.fragment.matrix_offset)
        for p in route.moving(way_in=False)
        if p.holder == rank
    )


def _all_gather(
    route: BucketRoute, matrix_numels: Sequence[int], rank: int, *, way_in: bool
) -> Way:
    """Every rank contributes one buffer, padded to the largest, and receives all of them."""
    if way_in:
        by_rank = [
            [p for p in route.moving(way_in=True) if p.holder == r] for r in range(route.world_size)
        ]
        packed = [_pack(pieces, [0] * len(pieces), route.world_size)[0] for pieces in by_rank]
        width = max(sum(s.numel for s in slots) for slots in packed)
        sends = packed[rank]
        receives = tuple(
            _slot(s.piece, r * width + s.buffer_offset)
            for r, slots in enumerate(packed)
            for s in slots
            if s.piece is not None and s.piece.owner == rank
        )
    else:
        owned, numels = _owned_slots(route, matrix_numels)
        width = max(numels)
        sends = tuple(owned[rank])
        starts = {
            s.matrix: r * width + s.buffer_offset for r, slots in enumerate(owned) for s in slots
        }
        receives = _own_pieces(route, rank, starts)

    def start(transport: Transport, into: Tensor, out: Tensor) -> list[Pending]:
        return [transport.all_gather(into, out)]

    return Way(
        sends=sends,
        receives=receives,
        send_numel=width,
        receive_numel=route.world_size * width,
        start=start,
    )


def _broadcast(route: BucketRoute, matrix_numels: Sequence[int], rank: int) -> Way:
    """Each owner broadcasts one packed buffer of its updates; its own does not come back."""
    owned, numels = _owned_slots(route, matrix_numels)
    base, starts = 0, {}
    regions: list[tuple[int, int]] = []
    for owner, slots in enumerate(owned):
        regions.append((base, numels[owner]))
        if owner != rank:
            starts.update((s.matrix, base + s.buffer_offset) for s in slots)
            base += numels[owner]

    def start(transport: Transport, into: Tensor, out: Tensor) -> list[Pending]:
        return [
            transport.broadcast(out if owner == rank else into[first : first + numel], source=owner)
            for owner, (first, numel) in enumerate(regions)
            if numel
        ]

    return Way(
        sends=tuple(owned[rank]),
        receives=_own_pieces(route, rank, starts),
        send_numel=numels[rank],
        receive_numel=base,
        start=start,
    )
