#!/usr/bin/env bash
# Runs fuzz targets that are built, two at a time, and prints a line for each. Inputs that reach new
# code are kept in build-fuzz/corpus/TARGET for the next run. An input that breaks a parser is kept
# in build-fuzz/findings; then the script ends with 1 and shows how to run it again.
# Usage: fuzz/run.sh [TARGET...]     without targets: all of them, e.g. fuzz/run.sh hf_config
#   FUZZ_SECONDS in the environment is the time for each target (default: 60).
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${FUZZ_SECONDS:-60}
build=build-fuzz
mkdir -p "$build/findings"

run_target() {
  local name=$1 binary=$build/fuzz/$1_fuzz corpus=$build/corpus/$1 log=$build/findings/$1.log
  local started=$SECONDS status=0
  mkdir -p "$corpus"
  "$binary" --write-seeds "$corpus"
  # An input may take 10 seconds and 2 GiB; one allocation of as much is a finding, too.
  "$binary" "$corpus" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
    -malloc_limit_mb=2048 -max_len=65536 -dict=fuzz/json.dict \
    -artifact_prefix="$build/findings/$name-" -print_final_stats=1 >"$log" 2>&1 || status=$?
  stat() { sed -n "s/^stat::$1: *//p" "$log"; }
  if ((status != 0)); then
    echo "$name: FINDING after $((SECONDS - started)) s; the report is in $log. Its end:"
    grep -v '^#[0-9]' "$log" | grep -E 'ERROR|runtime error|^fuzz: |internal error|violated|what\(\)|Test unit written|^    #[0-7] ' |
      cut -c 1-200 | tail -n 20
    echo "Again: $binary $build/findings/$name-<kind>-<hash>"
    return 1
  fi
  echo "$name: $(stat number_of_executed_units) inputs in $((SECONDS - started)) s," \
    "$(stat average_exec_per_sec) per second, up to $(stat peak_rss_mb) MB;" \
    "$(find "$corpus" -type f | wc -l) inputs kept"
}

if (($# == 0)); then
  set --
  for source in fuzz/*_fuzz.cc; do set -- "$@" "$(basename "$source" _fuzz.cc)"; done
fi
for name in "$@"; do
  if ! [[ -x $build/fuzz/${name}_fuzz ]]; then
    echo "error: $build/fuzz/${name}_fuzz is not there; build it with make fuzz, or see fuzz/*_fuzz.cc" \
      "for the names." >&2
    exit 2
  fi
done

export -f run_target
export seconds build
printf '%s\n' "$@" | xargs -P $((2 * $(nproc))) -I NAME bash -euo pipefail -c 'run_target NAME'
