# SPDX-License-Identifier: Apache-2.0
"""Save: `latest` names a tag only once every rank has written its files of it.

DeepSpeed writes `latest` in place and before its last barrier, so that a kill can leave it empty or
on a tag without all its files. Here rank 0 writes it after that barrier, by a rename. Every save
has a name of its own, in all its files, by which a load sees a tag that two saves wrote to.
"""

from __future__ import annotations

import functools
import os
import uuid
from pathlib import Path
from typing import Any

from ds_muon.comm.transport import Transport
from ds_muon.optimizer import MatrixOwnerOptimizer
from ds_muon.zero.checkpoint.contents import CLIENT_KEY


def save_whole(engine: Any, optimizer: MatrixOwnerOptimizer, transport: Transport) -> None:
    """Hook `engine.save_checkpoint`; `transport` is over all ranks."""
    save = engine.save_checkpoint

    @functools.wraps(save)
    def save_checkpoint(
        save_dir: str,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        name = transport.all_gather_object(uuid.uuid4().hex[:12])[0]
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        optimizer.save_name = name
        folder = Path(save_dir) / tag
        old = _written(folder) if transport.rank == 0 else {}
        # A checkpoint engine that writes in the background commits by itself, later.
        own_latest = save_latest and not engine.checkpoint_engine.is_decoupled()
        try:
            done = save(
                save_dir,
                tag=tag,
                client_state={**(client_state or {}), CLIENT_KEY: {"save": name}},
                save_latest=save_latest and not own_latest,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )
        finally:
            optimizer.save_name = None
        # What an earlier save into this tag wrote, at another stage or size, and this one did not.
        if transport.rank == 0:
            for path in [path for path, at in _written(folder).items() if old.get(path) == at]:
                path.unlink()
        if own_latest:
            if transport.rank == 0:
                _write_latest(Path(save_dir), tag)
            transport.all_gather_object(None)
        return done

    engine.save_checkpoint = save_checkpoint


def _written(folder: Path) -> dict[Path, int]:
    """Files of a checkpoint in a folder, and when each was written."""
    paths = folder.glob("*_states.pt") if folder.is_dir() else ()
    return {path: path.stat().st_mtime_ns for path in paths}


def _write_latest(folder: Path, tag: str) -> None:
    written = folder / "latest.writing"
    with written.open("w") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    written.replace(folder / "latest")
