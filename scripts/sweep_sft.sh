#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The fine-tuning runs behind docs/sft.md: scripts/train.py pre-trains on Python files with AdamW, then
# goes on with C++ headers at several learning rates, each optimizer from the same checkpoint.
# Usage: scripts/sweep_sft.sh [STEPS [PRETRAIN_STEPS]]   (from an environment with ds_muon[examples])
set -euo pipefail
cd "$(dirname "$0")/.."
steps=${1:-60}
first=${2:-300}
out=runs/sft
adamw='{"torch_adam": true}'  # nothing to compile on a CPU
run() {
    name=$1
    shift
    OMP_NUM_THREADS=1 RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 \
        MASTER_PORT="$((20000 + RANDOM % 20000))" python scripts/train.py \
        --deepspeed_config ds_config_examples/zero2.json --width 64 --layers 2 --out "$out/$name" \
        "$@" >"$out/$name.log" 2>&1
    echo "$name: $(grep "held-out loss" "$out/$name.log")"
}
mkdir -p "$out"
if ! [ -d "$out/first/checkpoint" ]; then
    run first --optimizer AdamW --params "$adamw" --lr 2e-3 --steps "$first" --eval_every "$first"
fi
tune() {
    run "$@" --start "$out/first/checkpoint" --text headers --steps "$steps" --warmup 10 \
        --eval_every "$steps" --no_checkpoint
}
for lr in 1e-3 2e-3 4e-3 8e-3; do tune "AdamW_$lr" --optimizer AdamW --params "$adamw" --lr "$lr"; done
for lr in 1e-3 3e-3 1e-2 2.4e-2; do tune "DMuon_$lr" --lr "$lr"; done
tune DMuon_mlp_only --lr 3e-3 --params '{"exclude": ["*.[qkvo]_proj.weight"]}'
tune DMuon_no_decay --lr 3e-3 --params '{"weight_decay": 0.0}'
