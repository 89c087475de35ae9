#!/usr/bin/env bash
# Formats every C++ and CUDA source with clang-format; with --check only reports, and fails when a
# file is not formatted.
# Usage: scripts/format.sh [--check]
set -euo pipefail
cd "$(dirname "$0")/.."

sources() {
  find src tests bench fuzz -type f \
    \( -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) -print0 | sort -z
}

if [[ ${1:-} != --check ]]; then
  sources | xargs -0 -r -n 64 -P "$(nproc)" clang-format --style=file -i
  exit 0
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! sources | xargs -0 -r -n 64 -P "$(nproc)" clang-format --style=file --dry-run -Werror \
  >"$log" 2>&1; then
  # One line per file instead of one per difference.
  sed -n -E 's/^([^: ]+):[0-9]+:[0-9]+: error: code should be clang-formatted.*/\1: not formatted/p' \
    "$log" | sort -u >&2
  grep -v -e '\[-Wclang-format-violations\]' "$log" | grep -E '(error|warning):' >&2 || true
  echo "error: some sources are not formatted; run 'make format'." >&2
  exit 1
fi
