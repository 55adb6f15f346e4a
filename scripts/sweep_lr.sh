#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The lr sweep behind docs/quickstart.md: every run is scripts/train.py on ds_config_examples/zero2.json.
# Usage: scripts/sweep_lr.sh [STEPS]      (from an environment with ds_muon[examples] installed)
set -euo pipefail
cd "$(dirname "$0")/.."
steps=${1:-240}
out=runs/sweep_$steps
run() {
    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 --master_port "$((20000 + RANDOM % 20000))" scripts/train.py \
        --deepspeed_config ds_config_examples/zero2.json --optimizer "$1" --lr "$2" \
        --steps "$steps" --eval_every "$steps" --no_checkpoint --out "$out/$1_$2" >"$out/$1_$2.log" 2>&1
    tail -5 "$out/$1_$2.log" | grep "held-out loss"
}
mkdir -p "$out"
for lr in 5e-4 1e-3 2e-3 4e-3 8e-3; do run AdamW "$lr"; done
for lr in 1e-3 2e-3 3e-3 6e-3 1.2e-2 2.4e-2 4.8e-2; do run DMuon "$lr"; done
