#!/usr/bin/env bash
# Runs the program and looks at exit statuses, and at what comes out where.
# Usage: cli_test.sh TROUPE SOURCE_FOLDER
set -u
troupe=$1
source_folder=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0

fail() {
  echo "FAILED: $*"
  sed 's/^/  stdout: /' "$scratch/out"
  sed 's/^/  stderr: /' "$scratch/err"
  failures=$((failures + 1))
}

# expect STATUS ARGUMENTS...: runs troupe; its output lies in $scratch/out and $scratch/err.
expect() {
  local wanted=$1
  shift
  what="troupe $*"
  "$troupe" "$@" >"$scratch/out" 2>"$scratch/err" </dev/null
  local status=$?
  [ "$status" -eq "$wanted" ] || fail "$what: exit status $status instead of $wanted"
}

out_has() { grep -qF -- "$1" "$scratch/out" || fail "$what: standard output lacks: $1"; }
silent_out() { [ ! -s "$scratch/out" ] || fail "$what: standard output is not empty"; }
silent_err() { [ ! -s "$scratch/err" ] || fail "$what: standard error is not empty"; }

# One line on standard error, nothing on standard output.
refused() {
  expect 2 "${@:2}"
  silent_out
  [ "$(wc -l <"$scratch/err")" -eq 1 ] || fail "$what: not one line on standard error"
  grep -qF -- "troupe: $1" "$scratch/err" || fail "$what: standard error lacks: troupe: $1"
}

json_has() {
  python3 - "$scratch/out" "$1" <<'PYTHON' || fail "$what: not one JSON document with $1"
import json, sys
with open(sys.argv[1]) as file:
    document = json.load(file)
sys.exit(sys.argv[2] not in document)
PYTHON
}

refused 'Unknown flag --hiden-size. Did you mean --hidden-size?' train --hiden-size 64
refused 'Unknown command trian. Did you mean train?' trian
refused 'Name a command: '
refused '--lr needs a value.' train --lr
refused '--ranks 2: ' doctor --ranks 2
if ! "$troupe" doctor --json | grep -E '"library": "OpenBLAS [0-9.]+ ' >/dev/null; then
  echo 'doctor does not name the BLAS' >&2
  exit 1
fi
"$troupe" doctor | grep -q 'cuda .*not in this build' && refused '--device cuda: ' doctor --device cuda
refused '--threads takes a whole number, 0 to 4096, not' doctor --threads many

expect 2 tokenize --input "$scratch/missing.txt" --output-prefix "$scratch/corpus"
silent_out
grep -qF missing.txt "$scratch/err" || fail "$what: the missing file is not named"

# Layouts: plan shows them, inspect the program of any rank.
layout=(--ranks 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
  --expert-model-parallel-size 4)
expect 0 plan --model mixtral-tiny "${layout[@]}" --global-batch-size 8
silent_err
out_has "8 ranks: TP 2 x CP 1 x DP 2 x PP 2; experts ETP 1 x EP 4 x EDP 1 x PP 2"
out_has "ep         {0 1 2 3} {4 5 6 7}"
out_has "experts                               sum over edp (1)"
out_has "loss of micro-batches                 sum x 1/8 (4 on each of 2 replicas)"
out_has "rank 1    . F0 B0--- F1 B1---"
expect 0 plan --model mixtral-tiny "${layout[@]}" --global-batch-size 8 \
  --num-layers-per-virtual-pipeline-stage 1
silent_err
out_has "the letter after it"
expect 0 plan --model mixtral-tiny "${layout[@]}" --json
silent_err
json_has layout
json_has pipeline
refused '--expert-model-parallel-size 3: it must divide the number of experts, 8. Nearest: 2 or 4.' \
  plan --model mixtral-tiny --ranks 3 --expert-model-parallel-size 3
refused '--global-batch-size 4: it must be a multiple of --micro-batch-size 1 x DP 3 = 3. Nearest: 3 or 6.' \
  plan --model mixtral-tiny --ranks 3 --global-batch-size 4
refused '--num-layers-per-virtual-pipeline-stage 3: 4 layers are not a multiple of 3 x 2' \
  plan --model mixtral-tiny --ranks 2 --pipeline-model-parallel-size 2 \
  --num-layers-per-virtual-pipeline-stage 3
refused '--pipeline-model-parallel-layout Et|ttt: L (loss) must stand once' \
  plan --model mixtral-tiny --ranks 2 --pipeline-model-parallel-size 2 \
  --pipeline-model-parallel-layout 'Et|ttt'
expect 0 inspect --model mixtral-tiny "${layout[@]}" --global-batch-size 8 --rank 6
silent_err
out_has "receive"
out_has "all_reduce"

expect 0 --help
silent_err
commands=$(sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p' "$scratch/out")
[ "$(echo "$commands" | wc -l)" -ge 11 ] || fail "$what: commands are missing"
for command in $commands; do
  expect 0 "$command" --help
  silent_err
  out_has "Usage: troupe $command"
done

expect 0 --version
version=$(sed -n 's/^project(Troupe VERSION \([0-9.]*\).*/\1/p' "$source_folder/CMakeLists.txt")
[ "$(head -n 1 "$scratch/out")" = "troupe $version" ] || fail "$what: CMakeLists.txt says $version"

expect 0 doctor
silent_err
out_has "All is well."
expect 0 doctor --json
silent_err
json_has cores
expect 0 --json doctor
json_has healthy

"$troupe" help >/dev/full 2>"$scratch/err"
[ $? -eq 1 ] || fail "troupe help with a full disk: exit status is not 1"

if [ "$failures" -gt 0 ]; then
  echo "$failures failures"
  exit 1
fi
echo "all passed"
