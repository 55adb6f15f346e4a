# SPDX-License-Identifier: Apache-2.0
"""Convert: a tag folder to DeepSpeed's universal format, without ranks.

DeepSpeed's own converter knows exp_avg and exp_avg_sq only; it fails on what Muon trains.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from deepspeed.checkpoint.constants import DS_VERSION

from ds_muon.checkpoint import universal
from ds_muon.zero.checkpoint.contents import read_tag, scaler_of
from ds_muon.zero.checkpoint.files import find, open_model
from ds_muon.zero.checkpoint.fill import SCALE_NUMBERS

_SCALARS = (
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "clip_grad",
    DS_VERSION,
    *SCALE_NUMBERS,
)


def to_universal(source: Path, output: Path) -> int:
    """Write `output`, and name it in `latest_universal` beside it.

    Args:
        source: a tag folder, or the folder with `latest` in it.
        output: a new folder; `engine.load_checkpoint` finds it in its parent, with
            "checkpoint": {"load_universal": true}.

    Returns:
        How many parameters were written.

    Raises:
        ValueError: the source cannot be read, or the output exists.
    """
    latest = source / "latest"
    folder = source / latest.read_text().strip() if latest.is_file() else source
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} exists and is not empty; name a new folder")
    try:
        tag = find(folder)
        model = open_model(tag.model_files[0])
        shards = read_tag(tag, model, states=True)
        scalars = {key: value for key, value in scaler_of(tag, model).items() if key in _SCALARS}
        output.mkdir(parents=True, exist_ok=True)
        written = universal.write(output, shards, scalars)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    for path in tag.model_files:
        shutil.copyfile(path, output / path.name)
    named = output.parent / "latest_universal.writing"
    named.write_text(output.name)
    named.replace(output.parent / "latest_universal")
    return written
