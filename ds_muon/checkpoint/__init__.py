# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by parameter name: what files hold, and how any run takes what it needs of them.

header.py says what a rank writes; pieces.py is the common form of everything that can be read;
native.py, foreign.py and universal.py bring files into that form; restore.py fills a run from it.
Never does: import DeepSpeed; zero/checkpoint/ finds and opens its files, and hooks the engine.
"""

from ds_muon.checkpoint.header import CheckpointHeader, ParameterSlice

__all__ = ["CheckpointHeader", "ParameterSlice"]
