#!/usr/bin/env bash
# Configures one preset and builds targets of it. When that builds the program, build/troupe is made
# to point at it. Shows one line of progress; what the build prints goes to build.log in the preset's
# folder, which is named when it fails.
# Usage: scripts/build.sh PRESET TARGETS [CMAKE_OPTION...]     e.g. scripts/build.sh debug all
#   TARGETS is one word: troupe (the program), all (program and tests), troupe_tests, <room>_tests,
#   troupe_bench, or several of them separated by commas; or configure, which builds nothing.
#   JOBS in the environment limits the number of compilers run at once (default: nproc).
set -euo pipefail
cd "$(dirname "$0")/.."

preset=$1
IFS=, read -ra targets <<<"$2"
shift 2

folder=build
if [[ $preset != release ]]; then folder=build-$preset; fi

if [[ $preset == cuda ]] && ! command -v nvcc >/dev/null && ! [[ -x /usr/local/cuda/bin/nvcc ]]; then
  echo "error: the preset 'cuda' needs the CUDA toolkit (nvcc); none was found in PATH or in" \
       "/usr/local/cuda. Install it, or build without PRESET=cuda." >&2
  exit 1
fi

# A folder configured elsewhere (a moved or copied clone) cannot be reused.
cache=$folder/CMakeCache.txt
if [[ -f $cache ]] && ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$(pwd -P)" "$cache"; then
  echo "$folder was configured for another source folder; configuring it anew." >&2
  rm -rf "$folder"
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! cmake --preset "$preset" "$@" >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
if [[ $targets == configure ]]; then exit 0; fi

# Messages of the compilers from the first that failed on; not the command lines, which are long.
show_failure() {
  sed -n '/^FAILED:/,$p' "$folder/build.log" | awk 'length($0) < 400' | head -n 100 >&2
  echo "error: the build failed; all that it printed is in $folder/build.log." >&2
  exit 1
}
NINJA_STATUS='[%f/%t] ' cmake --build --preset "$preset" --target "${targets[@]}" \
  -j "${JOBS:-$(nproc)}" 2>&1 | bash scripts/show_build.sh "$folder/build.log" || show_failure

if [[ " ${targets[*]} " =~ " "(troupe|all)" " && -x $folder/bin/troupe ]]; then
  mkdir -p build
  if [[ $folder == build ]]; then program=bin/troupe; else program=../$folder/bin/troupe; fi
  ln -sfn "$program" build/troupe
fi
