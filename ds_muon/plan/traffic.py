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
# Every rank receives exactly what it needs, both ways.
PERSONAL = ("all_to_all", "p2p")


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
    away_in, home_in, away_out, home_out = ([0] * size for _ in range(4))
    peers_in, peers_out = set[tuple[int, int]](), set[tuple[int, int]]()
    for (_, holder, owner, fragment), inward in zip(route.pieces, route.inbound, strict=True):
        if holder == owner:
            continue
        numel = fragment.numel
        away_out[holder] += numel
        home_out[owner] += numel
        peers_out.add((holder, owner))
        if inward:
            away_in[holder] += numel
            home_in[owner] += numel
            peers_in.add((holder, owner))
    return Load(
        away_in=tuple(away_in),
        home_in=tuple(home_in),
        away_out=tuple(away_out),
        home_out=tuple(home_out),
        owned=tuple(owned_numel),
        peers_in=_messages(peers_in, size),
        peers_out=_messages(peers_out, size),
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
    size = len(away)
    zeros = (0,) * size
    if not any(away):
        return Leg(
            send_numel=zeros, receive_numel=zeros, received=zeros, padding=zeros, calls=zeros
        )
    contributed = away if way_in else load.owned
    widest, everything = max(contributed), sum(load.owned)
    numels = [
        way_numels(
            strategy,
            size,
            away=away[r],
            home=home[r],
            owned=load.owned[r],
            widest=widest,
            everything=everything,
            way_in=way_in,
        )
        for r in range(size)
    ]
    send, receive = (tuple(n) for n in zip(*numels, strict=True))
    received, padding, calls = receive, zeros, (1,) * size
    if strategy == "all_gather":
        received = ((size - 1) * widest,) * size
        padding = tuple(
            r - (sum(contributed) - c) for r, c in zip(received, contributed, strict=True)
        )
    elif strategy == "broadcast" and not way_in:
        calls = (sum(o > 0 for o in load.owned),) * size
    elif strategy == "p2p":
        calls = load.peers_in if way_in else load.peers_out
    return Leg(
        send_numel=send, receive_numel=receive, received=received, padding=padding, calls=calls
    )


def way_numels(
    strategy: str,
    world_size: int,
    *,
    away: int,
    home: int,
    owned: int,
    widest: int,
    everything: int,
    way_in: bool,
) -> tuple[int, int]:
    """Return the elements of one rank's send and receive buffer on a way that moves anything.

    Args:
        away, home: pieces held for others, pieces held by others for this rank.
        owned: elements of the whole matrices that this rank owns.
        widest: largest contribution of any rank: `away` on the way in, `owned` on the way out.
        everything: elements of all matrices of the bucket.
    """
    if strategy == "all_gather":
        return widest, world_size * widest
    if strategy == "broadcast" and not way_in:
        return owned, everything - owned
    return (away, home) if way_in else (home, away)
