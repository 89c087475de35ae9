#!/usr/bin/env bash
# Runs the tests of a built preset that need no GPU, on all cores, or those that need one, one after
# the other, and ends with their number: the test programs whole (run_programs.sh), then scripts and
# runs of several processes, which ctest starts. Prints what failed, and fails if anything did; and
# what was skipped, with the reason, which is counted neither as passed nor as failed.
# Usage: scripts/run_tests.sh PRESET|gpu [CTEST_ARG...]
#   gpu: those of the preset cuda that need a GPU.
#   With arguments ctest runs what they select, e.g. -R Softmax, -L layout.
#   JOBS in the environment: how many tests without GPU run at once (default: nproc).
set -euo pipefail
cd "$(dirname "$0")/.."

preset=$1
shift
jobs=${JOBS:-$(nproc)}
if (($#)); then exec ctest --preset "$preset" "$@"; fi

folder=build
if [[ $preset != release ]]; then folder=build-$preset; fi
which=(-not -name '*_gpu_tests')
if [[ $preset == gpu ]]; then
  folder=build-cuda
  which=(-name '*_gpu_tests')
  jobs=1
fi
results=$(mktemp)
trap 'rm -f "$results"' EXIT

mapfile -t programs < <(find "$folder/tests" -maxdepth 1 -name '*_tests' "${which[@]}" | sort)
if ((${#programs[@]} == 0)); then
  echo "error: no tests in $folder/tests; build them first: scripts/build.sh ${preset/gpu/cuda} all" >&2
  exit 1
fi
limit_s=1800 # of a process: far more than it takes, so that none hangs forever
status=0
JOBS=$jobs bash scripts/run_programs.sh "$limit_s" "${programs[@]}" 2>&1 | tee "$results" || status=1
# These wait much of their time: one more than there are cores.
ctest --preset "$preset" -R '_test\.(sh|py)(/|$)|^processes/' -j "$((jobs + (jobs > 1)))" |
  tee -a "$results" || status=1

grep -h '^SKIPPED ' "$folder"/Testing/Temporary/LastTest.log || true
read -r passed failed < <(awk '
  /^\[  PASSED  \]/ { passed += $4 }
  /^\[  FAILED  \] .*\([0-9]+ ms\)$/ || /^\[  ENDED   \] / { ++failed }
  /tests passed, [0-9]+ tests failed out of [0-9]+/ { failed += $4; passed += $NF - $4 }
  /^\t *[0-9]+ - .* \(Skipped\)/ { --passed }
  END { print passed + 0, failed + 0 }' "$results")
if ((failed)); then status=1; fi
echo "In all $((passed * 100 / (passed + failed)))% tests passed, $failed tests failed out of $((passed + failed))"
exit "$status"
