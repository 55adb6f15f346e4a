#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to two loss curves: installs into .venv, then trains a small byte-level
# transformer on Python's own source files with the deepspeed launcher on 2 ranks under ZeRO-2,
# with DMuon and, the one word changed, with AdamW, each at the best lr of docs/quickstart.md.
# Needs Python 3.10 or newer and a C++ compiler; a GPU is used if there is one, but not needed.
set -euo pipefail
cd "$(dirname "$0")/.."
steps=${STEPS:-240}
out=${OUT:-runs/quickstart}
. scripts/setup_venv.sh examples

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONWARNINGS=ignore
train() {
    port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
    deepspeed --num_gpus 2 --master_port "$port" scripts/train.py \
        --deepspeed_config ds_config_examples/zero2.json --steps "$steps" "$@"
}
echo "== AdamW (the very first run is silent for a minute or two while DeepSpeed compiles operators)"
train --optimizer AdamW --lr "${ADAMW_LR:-0.002}" --out "$out/AdamW" --no_checkpoint
echo "== DMuon: the same config as it stands in ds_config_examples/zero2.json"
train --out "$out/DMuon"
python scripts/plot_losses.py --out "$out/loss.png" "$out/DMuon/metrics.json" "$out/AdamW/metrics.json"
echo "loss curves: $out/loss.png   checkpoint: $out/DMuon/checkpoint"
