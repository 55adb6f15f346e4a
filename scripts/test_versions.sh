#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run a parity smoke on every DeepSpeed version that ds_muon/zero/seams.py calls tested, each in an
# environment of its own, and print a table; exits 1 if one fails.
# Usage: scripts/test_versions.sh [VERSION ...]
#   BASE       a virtual environment with everything but DeepSpeed; default: made in .venv
#   VENVS      where the environments go; default .venvs
#   SELECTION  pytest's arguments, instead of the smoke
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${BASE:-}" ]; then
    . scripts/setup_venv.sh test
    BASE=$VIRTUAL_ENV
fi
venvs=${VENVS:-.venvs}
export PYTHONPATH=$PWD
versions=("$@")
if [ ${#versions[@]} = 0 ]; then
    read -r -a versions <<<"$("$BASE/bin/python" -c \
        'from ds_muon.zero.seams import TESTED_VERSIONS as v; print(*v)' | tail -n 1)"
fi
d=tests/distributed
smoke=(
    "$d/test_parity.py::test_parity_with_clip_decay_and_accumulation[2-"{0,1,2,3}"]"
    "$d/test_hsdp.py::test_parity_with_one_process[4-2-2-False]"
    "$d/test_checkpoint.py::test_resume_continues_bit_equal[stage 2 bf16-fp32-3]"
    "$d/test_checkpoint.py::test_resume_continues_bit_equal[stage 3-fp32-0]"
    "$d/test_elastic_checkpoint.py::test_universal_round_trip[2-1]"
    "$d/test_fp16.py::test_static_scales_and_growth_give_the_same_update["{0,2}"]"
)
if [ -n "${SELECTION:-}" ]; then
    eval "smoke=($SELECTION)"
fi

# An environment that sees the packages of $BASE, with DeepSpeed before them; it compiles its own
# operators, since their sources differ between versions.
make_venv() {
    local venv=$1 version=$2 site
    [ -x "$venv/bin/python" ] || "$BASE/bin/python" -m venv "$venv"
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$BASE/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/base.pth"
    [ -d "$site/deepspeed-$version.dist-info" ] ||
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
            "deepspeed==$version"
}

# Compile what a first start on a CPU would, outside any test's time-out: a rank that is killed while
# it compiles leaves a lock that every later start waits for.
compile_operator() {
    rm -f "$TORCH_EXTENSIONS_DIR"/*/lock
    "$1" -c "from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder('ShareMemCommBuilder').load()"
}

export DS_ACCELERATOR=cpu DS_MUON_FULL_GRID=1
failed=0 rows=()
for version in "${versions[@]}"; do
    venv=$venvs/deepspeed-$version log=$venvs/deepspeed-$version.log
    make_venv "$venv" "$version"
    found=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("deepspeed"))')
    [ "$found" = "$version" ] || { echo "$venv has deepspeed $found, not $version"; exit 1; }
    echo "deepspeed $version ..."
    export TORCH_EXTENSIONS_DIR=$(realpath "$venv")/torch_extensions
    compile_operator "$venv/bin/python" >"$log" 2>&1 || { tail -n 40 "$log"; exit 1; }
    started=$SECONDS verdict=pass
    "$venv/bin/python" -m pytest -q -p no:cacheprovider "${smoke[@]}" >"$log" 2>&1 ||
        { verdict=FAIL failed=1; tail -n 40 "$log"; }
    rows+=("$(printf '%-10s %-6s %7d  %s' "$version" "$verdict" $((SECONDS - started)) \
        "$(tail -n 1 "$log")")")
done
printf '\n%-10s %-6s %7s  %s\n' deepspeed result seconds pytest
printf '%s\n' "${rows[@]}"
exit $failed
