#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install into .venv and run every check: lint, format, all tests. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_venv.sh test
ruff check .
ruff format --check .
python -m pytest "$@"
