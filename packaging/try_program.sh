#!/usr/bin/env bash
# Tries an installed program in a temporary folder: doctor, a reference model, and at each level of CPU
# kernels that this processor has five steps of training, each level but the first going on from where
# the one before has stopped. Where qemu-x86_64 is found, one step and a resumed one run on an emulated
# processor of 2008. Says what it does; the first failure ends it.
# Usage: packaging/try_program.sh PROGRAM
set -euo pipefail

program=$(realpath "$1")
source=$(realpath "$(dirname "$0")/..")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

step() {
  echo "== $*"
  "$@" >output.log 2>&1 || {
    cat output.log >&2
    echo "error: that failed." >&2
    exit 1
  }
}
# train ITERATIONS LEVEL PROGRAM...: goes on where a checkpoint is.
train() {
  local iterations=$1 level=$2
  shift 2
  step "$@" train --cpu-kernels "$level" --model quickstart --num-layers 1 --mock-data \
    --seq-length 32 --micro-batch-size 1 --global-batch-size 4 --train-iters "$iterations" \
    --lr 1e-3 --lr-decay-style constant --save run --load run
}

step "$program" doctor --json
levels=$(python3 -c 'import json; print(*json.load(open("output.log"))["cpu_kernels"]["usable"])')
step "$program" verify "$source/tests/fixtures/hf/mixtral"
iterations=0
for level in $levels; do
  step "$program" doctor --json --cpu-kernels "$level"
  grep -qE '"core": "(Nehalem|Haswell|SkylakeX)"' output.log || {
    echo "error: OpenBLAS did not follow --cpu-kernels $level." >&2
    exit 1
  }
  iterations=$((iterations + 5))
  train "$iterations" "$level" "$program"
done
emulator=$(command -v qemu-x86_64 || true)
if [[ -n $emulator ]]; then
  rm -rf run
  train 1 x86-64-v2 "$emulator" -cpu Nehalem "$program"
  train 2 x86-64-v2 "$emulator" -cpu Nehalem "$program"
fi
echo "All is well at: $levels${emulator:+, and on an emulated Nehalem}."
