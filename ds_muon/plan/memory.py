# SPDX-License-Identifier: Apache-2.0
"""Memory: the exchange buffers of a bucket on a rank, and what a workspace is made of.

Owns: the sizes of the send and the receive region, which a bucket's two ways share. Plans check
them against the cap, the step engine lays its views out by them.
Never does: allocate.

A rank's workspace is `sets` times the exchange buffers of its largest bucket, the iteration of the
largest matrix it owns, and the temporaries of one elementwise pass.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT_BYTES = 64


def aligned(nbytes: int) -> int:
    """Round up, so that every region starts at a boundary any dtype and kernel likes."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def buffer_sets(inflight: int) -> int:
    """Exchange buffers alive with `inflight` buckets: one going in, one iterated, one going out."""
    return 1 if inflight == 1 else inflight + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """What the memory of a bucket follows from.

    Attributes:
        cap_bytes: `workspace_mb`; exchange and iteration together, per rank.
        exchange: strategy, which decides the buffers.
        sets: exchange buffers that live at a time (one, or one more than the buckets in flight).
        wire_bytes: per element of a momentum piece on its way in.
        update_bytes: per element of an update on its way out.
        staging_bytes: temporaries of one elementwise pass.
    """

    cap_bytes: int
    exchange: str
    sets: int
    wire_bytes: int
    update_bytes: int
    staging_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Both ways of a bucket on one rank.

    Attributes:
        send_in, receive_in, send_out, receive_out: elements.
        receive_start: byte at which the receive region starts; the send region starts at 0.
        nbytes: of both regions.
    """

    send_in: int
    receive_in: int
    send_out: int
    receive_out: int
    receive_start: int
    nbytes: int


def buffers(
    workspace: Workspace, *, send_in: int, receive_in: int, send_out: int, receive_out: int
) -> Buffers:
    """Lay out the two regions for the given elements.

    Both ways send from the first: what was sent in is free when the way out is packed, while
    arrivals of the bucket's later matrices are still unread then.
    """
    wire, update = workspace.wire_bytes, workspace.update_bytes
    send = aligned(max(send_in * wire, send_out * update))
    receive = aligned(max(receive_in * wire, receive_out * update))
    return Buffers(
        send_in=send_in,
        receive_in=receive_in,
        send_out=send_out,
        receive_out=receive_out,
        receive_start=send,
        nbytes=send + receive,
    )
