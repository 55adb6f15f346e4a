# SPDX-License-Identifier: Apache-2.0
"""Fixtures and process-wide settings of the tests."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
