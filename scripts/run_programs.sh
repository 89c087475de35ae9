#!/usr/bin/env bash
# Runs test programs whole, without ctest, which would start each of their tests by itself: starting
# a program takes longer than most tests. The tests of a program are dealt out to as many processes
# as run at once. Prints what failed, "[  ENDED   ] ..." for a process that ended before its last test
# (a crash, or the time limit), and fails if anything did.
# Usage: scripts/run_programs.sh LIMIT_S PROGRAM...
#   LIMIT_S: seconds that a process may take; 0: any number.
#   JOBS in the environment: how many processes run at once (default: nproc).
set -euo pipefail

limit_s=$1
shift
jobs=${JOBS:-$(nproc)}
# GoogleTest's status is 1 where tests failed.
# shellcheck disable=SC2016
run='"$@"
status=$?
if [ $status -gt 1 ]; then echo "[  ENDED   ] $6 with status $status, before its last test"; fi
exit $((status > 0))' # xargs ends when a signal ended one
for program in "$@"; do
  for ((shard = 0; shard < jobs; ++shard)); do
    echo "env GTEST_TOTAL_SHARDS=$jobs GTEST_SHARD_INDEX=$shard timeout $limit_s $program --gtest_brief=1"
  done
done | xargs -P "$jobs" -L 1 sh -c "$run" run
