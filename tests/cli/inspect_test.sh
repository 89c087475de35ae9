#!/usr/bin/env bash
# The quickstart model's program, as `troupe inspect` prints one of its blocks, equals the golden text.
# The golden text documents the training step; a change to it is a change to read.
# Usage: inspect_test.sh TROUPE SOURCE_DIR [--update]
set -euo pipefail
troupe=$1
source_dir=$2
golden=$source_dir/tests/golden/quickstart_layer_1.txt

actual=$("$troupe" inspect --model "$source_dir/configs/quickstart.json" --seq-length 64 \
  --micro-batch-size 2 --layer 1 --threads 1)
if [[ ${3:-} == --update ]]; then
  printf '%s\n' "$actual" >"$golden"
elif ! diff -u "$golden" <(printf '%s\n' "$actual"); then
  echo "The printed program differs from $golden. If that is meant, run again with --update." >&2
  exit 1
fi
