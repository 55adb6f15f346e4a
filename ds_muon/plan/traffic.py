# SPDX-License-Identifier: Apache-2.0
"""Traffic: elements, calls and buffer sizes of each exchange strategy, as formulas.

Owns: the one source that plans, reports and tests read; comm/strategies.py moves what it says.
Never does: move anything.

| received by rank r | way in | way out |
|---|---|---|
| all_to_all, p2p | home_in[r], no padding | away_out[r] |
| all_gather, padded to the largest | (N - 1) * max(away_in) | (N - 1) * max(owned) |
| broadcast, a packed buffer per owner | as all_to_all | sum(owned) - owned[r] |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_muon.plan.routes import BucketRoute

STRATEGIES = ("all_to_all", "all_gather", "broadcast", "p2p")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Elements of one bucket per rank, before a strategy is chosen.

    Attributes:
        away_in, home_in: pieces held for other owners, and pieces that others hold for this owner.
        away_out, home_out: the same on the way back (a replicated matrix has only this way).
        owned: whole matrices owned.
        peers_in, peers_out: messages that a rank sends or receives, one per pair that shares.
    """

    away_in: tuple[int, ...]
    home_in: tuple[int, ...]
    away_out: tuple[int, ...]
    home_out: tuple[int, ...]
    owned: tuple[int, ...]
    peers_in: tuple[int, ...]
    peers_out: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One way of one bucket under one strategy, per rank.

    Attributes:
        send_numel, receive_numel: sizes of the two buffers.
        received: elements that arrive from other ranks.
        padding: of those, elements that carry nothing.
        calls: collectives, or messages of a batch, that the rank issues.
    """

    send_numel: tuple[int, ...]
    receive_numel: tuple[int, ...]
    received: tuple[int, ...]
    padding: tuple[int, ...]
    calls: tuple[int, ...]


def load_of(route: BucketRoute, owned_numel: Sequence[int]) -> Load:
    """Sum a bucket's pieces per rank; `owned_numel` are its matrices' elements per owner."""
    size = route.world_size
    sums: dict[bool, tuple[list[int], list[int]]] = {}
    peers: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
    for way_in in (True, False):
        away, home = [0] * size, [0] * size
        for piece in route.moving(way_in=way_in):
            away[piece.holder] += piece.numel
            home[piece.owner] += piece.numel
            peers[way_in].add((piece.holder, piece.owner))
        sums[way_in] = (away, home)
    return Load(
        away_in=tuple(sums[True][0]),
        home_in=tuple(sums[True][1]),
        away_out=tuple(sums[False][0]),
        home_out=tuple(sums[False][1]),
        owned=tuple(owned_numel),
        peers_in=_messages(peers[True], size),
        peers_out=_messages(peers[False], size),
    )


def _messages(pairs: set[tuple[int, int]], world_size: int) -> tuple[int, ...]:
    counts = [0] * world_size
    for holder, owner in pairs:
        counts[holder] += 1
        counts[owner] += 1
    return tuple(counts)


def leg(strategy: str, load: Load, *, way_in: bool) -> Leg:
    """Return the traffic of one way.

    Raises:
        ValueError: unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"exchange {strategy!r} is unknown; valid: {', '.join(STRATEGIES)}")
    away, home = (load.away_in, load.home_in) if way_in else (load.away_out, load.home_out)
    size, silent = len(away), not any(away)
    zeros = (0,) * size
    if silent:
        return Leg(
            send_numel=zeros, receive_numel=zeros, received=zeros, padding=zeros, calls=zeros
        )
    if strategy == "all_gather":
        contributed = away if way_in else load.owned
        width = max(contributed)
        others = [sum(contributed) - c for c in contributed]
        return Leg(
            send_numel=(width,) * size,
            receive_numel=(size * width,) * size,
            received=((size - 1) * width,) * size,
            padding=tuple((size - 1) * width - o for o in others),
            calls=(1,) * size,
        )
    if strategy == "broadcast" and not way_in:
        received = tuple(sum(load.owned) - o for o in load.owned)
        owners = sum(o > 0 for o in load.owned)
        return Leg(
            send_numel=load.owned,
            receive_numel=received,
            received=received,
            padding=zeros,
            calls=(owners,) * size,
        )
    send, receive = (away, home) if way_in else (home, away)
    calls = (1,) * size
    if strategy == "p2p":
        calls = load.peers_in if way_in else load.peers_out
    return Leg(send_numel=send, receive_numel=receive, received=receive, padding=zeros, calls=calls)
