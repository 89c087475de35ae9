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

# Memory on the host is listed, too.
memory=$("$troupe" inspect --model quickstart --seq-length 64 --num-layers 2 --threads 1 \
  --optimizer-cpu-offload)
if ! grep -Eq '^# optimizer +[0-9.]+ MiB  on the host$' <<<"$memory"; then
  printf 'inspect does not list the optimizer on the host:\n%s\n' "$memory" >&2
  exit 1
fi

# Passes: a table, the program as it is after one of them, and without one.
model=(--model quickstart --seq-length 64 --num-layers 2 --threads 1)
sharded=("${model[@]}" --ranks 2 --use-megatron-fsdp --overlap-param-gather --overlap-grad-reduce)
expect() { # expect WHAT PATTERN TEXT
  if ! grep -Eq -- "$2" <<<"$3"; then
    printf '%s: nothing matches "%s" in\n%s\n' "$1" "$2" "$3" >&2
    exit 1
  fi
}
table=$("$troupe" inspect "${sharded[@]}" --passes)
expect 'the table' '^emission +[0-9.]+ [a-z]+ +[0-9]+ +0 +0 +[0-9.]+ MiB +-$' "$table"
for pass in recompute schedule gradient-sums gathers; do
  expect "$pass" "^$pass +[0-9.]+ [a-z]+ +[0-9]+ +[0-9]+ +[0-9]+ +[0-9.]+ MiB +-?[0-9.]+ [KM]?i?B$" "$table"
done
if grep -q '^copies' <<<"$table"; then echo "a step that offloads nothing ran copies" >&2; exit 1; fi
if (($(wc -L <<<"$table") > 80)); then echo "the table is wider than 80 columns" >&2; exit 1; fi
table=$("$troupe" inspect "${sharded[@]}" --passes --skip-passes gathers schedule)
if grep -Eq '^(gathers|schedule) ' <<<"$table"; then echo "skipped passes ran" >&2; exit 1; fi
json=$("$troupe" inspect "${sharded[@]}" --passes --json)
expect 'json' '^\{"passes":\[\{"name":"emission","seconds":[0-9.e-]+,"ops_before":0,"ops_after":[0-9]+,' "$json"
last=$("$troupe" inspect "${sharded[@]}" --json)
if [[ $("$troupe" inspect "${sharded[@]}" --dump-after gathers --json) != "$last" ]]; then
  echo "the program after the last pass is not the program" >&2
  exit 1
fi
if [[ $("$troupe" inspect "${sharded[@]}" --dump-after emission --json) == "$last" ]]; then
  echo "the emitted program is the last one" >&2
  exit 1
fi
refused() { # refused PATTERN FLAGS...
  local pattern=$1 said status=0
  shift
  said=$("$troupe" inspect "$@" 2>&1 >/dev/null) || status=$?
  if ((status != 2)); then echo "inspect $*: status $status, expected 2" >&2; exit 1; fi
  expect "inspect $*" "$pattern" "$said"
}
refused '--dump-after copies: this step does not need the pass' "${model[@]}" --dump-after copies
refused '--dump-after takes emission, loss-chunks, messages, precision, recompute, .* not .x.' "${model[@]}" --dump-after x
refused "--skip-passes takes loss-chunks, messages, recompute, offload, schedule, copies, stash, gradient-sums, gathers or multiprocessors, not 'x'." "${model[@]}" --skip-passes x
refused "--skip-passes takes .* not 'emission'" "${model[@]}" --skip-passes emission
refused 'only the program of a training step has passes' "${model[@]}" --program eval --passes
refused '--passes lists passes and no operations: leave out' "${model[@]}" --passes --layer 0
refused '--passes lists passes and no operations: leave out' "${model[@]}" --passes --dump-after schedule
