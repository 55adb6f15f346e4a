# SPDX-License-Identifier: Apache-2.0
"""Log: what rank 0 says at start, whatever DeepSpeed's log level hides.

Owns: the logger "ds_muon". It writes to stderr until the application configures logging itself.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("ds_muon")


def say(text: str, *, rank: int, level: int = logging.INFO) -> None:
    """Log `text` on rank 0."""
    if rank != 0:
        return
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[ds_muon] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    logger.log(level, text)
