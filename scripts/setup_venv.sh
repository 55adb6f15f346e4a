#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Create the virtual environment .venv (or $VENV) and install this checkout into it.
# Usage: . scripts/setup_venv.sh EXTRA      (EXTRA: examples or test)
venv=${VENV:-.venv}
if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
fi
. "$venv/bin/activate"
# DeepSpeed compiles its CPU operators on first use (about a minute); each environment keeps its own.
export TORCH_EXTENSIONS_DIR=$VIRTUAL_ENV/torch_extensions
echo "Installing into $venv (the first time takes a few minutes) ..."
# torch first: DeepSpeed's build looks at it.
python -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt torch
python -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt -e ".[$1]"
