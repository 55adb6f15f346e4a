# SPDX-License-Identifier: Apache-2.0
"""Agreement: at start every rank shows what it is about to do, and all stop if they differ.

Owns: the comparison and the error text, the same on all ranks. A rank that already failed takes
part with its error, so that no other rank waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ds_muon.comm.transport import Transport


def require_agreement(
    transport: Transport,
    facts: Mapping[str, str],
    *,
    problem: Exception | None,
    doing: str = "start",
) -> None:
    """Compare `facts` over all ranks.

    Args:
        facts: name -> value or digest; each must be equal on all ranks.
        problem: what kept this rank from getting here in good order, if anything.
        doing: what all ranks are about to do, for the error text.

    Raises:
        RuntimeError: on all ranks, naming the ranks and the facts that differ.
        Exception: `problem` itself where it is this rank's own.
    """
    shown = transport.all_gather_object((dict(facts), None if problem is None else str(problem)))
    if problem is not None:
        raise problem
    failed = [(rank, text) for rank, (_, text) in enumerate(shown) if text is not None]
    if failed:
        rank, text = failed[0]
        others = f" (and on ranks {[r for r, _ in failed[1:]]})" if failed[1:] else ""
        raise RuntimeError(f"DMuon cannot {doing}: rank {rank} reported{others}: {text}")
    differing = [
        f"{name}: " + ", ".join(f"rank {r} has {f.get(name)!r}" for r, (f, _) in enumerate(shown))
        for name in facts
        if any(other.get(name) != facts[name] for other, _ in shown)
    ]
    if differing:
        raise RuntimeError(
            f"DMuon cannot {doing}: ranks disagree, so their collectives would not match. Give "
            "every rank the same configuration, model and package versions. " + "; ".join(differing)
        )
