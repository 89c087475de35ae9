#!/usr/bin/env bash
# Runs the tests of a built preset that need no GPU, on all cores, and ends with their number. The
# test programs run as they are: ctest would start each of some thousand tests by itself, and
# starting a program takes longer than most tests. The tests of a program are dealt out to as many
# processes as there are cores; scripts and runs of several processes, which ctest starts, follow. Prints what failed, and fails if anything did.
# Usage: scripts/run_tests.sh PRESET [CTEST_ARG...]
#   With arguments ctest runs what they select, e.g. -R Softmax, -L layout.
#   JOBS in the environment: how many tests run at once (default: nproc).
set -euo pipefail
cd "$(dirname "$0")/.."

preset=$1
shift
jobs=${JOBS:-$(nproc)}
if (($#)); then exec ctest --preset "$preset" "$@"; fi

folder=build
if [[ $preset != release ]]; then folder=build-$preset; fi
results=$(mktemp)
trap 'rm -f "$results"' EXIT

limit_s=1800 # of a program: far more than it takes, so that none hangs for ever
status=0
for program in "$folder"/tests/*_tests; do
  if [[ $program == *_gpu_tests ]]; then continue; fi
  for ((shard = 0; shard < jobs; ++shard)); do
    echo "GTEST_TOTAL_SHARDS=$jobs GTEST_SHARD_INDEX=$shard timeout $limit_s $program --gtest_brief=1"
  done
done | xargs -P "$jobs" -L 1 env 2>&1 | tee "$results" || status=1
ctest --preset "$preset" -R '_test\.(sh|py)$|^mpi/' -j "$jobs" | tee -a "$results" || status=1

read -r passed failed < <(awk '
  /^\[  PASSED  \]/ { passed += $4 }
  /^ [0-9]+ FAILED TESTS?$/ { failed += $1 }
  /tests passed, [0-9]+ tests failed out of [0-9]+/ { failed += $4; passed += $NF - $4 }
  END { print passed + 0, failed + 0 }' "$results")
if ((failed)); then status=1; fi
if ((passed + failed == 0)); then
  echo "error: no tests in $folder/tests; build them first: scripts/build.sh $preset all" >&2
  exit 1
fi
echo "In all $((passed * 100 / (passed + failed)))% tests passed, $failed tests failed out of $((passed + failed))"
exit "$status"
