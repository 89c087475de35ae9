#!/usr/bin/env bash
# Format, structure and clang-tidy over the sources.
# Usage: scripts/lint.sh [--all | --tidy-only | --changed [COMMIT]]
#   --all        format and structure, then clang-tidy over every src/**/*.cc (default)
#   --tidy-only  only clang-tidy over every src/**/*.cc
#   --changed    like --all, but clang-tidy only over the .cc files of src/ that differ from COMMIT
#                (default HEAD) or are new
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:---all}
if [[ $mode != --tidy-only ]]; then
  bash scripts/format.sh --check
  python3 scripts/check_structure.py
fi

# clang-tidy reads the compile commands of the release preset; configuring is enough, nothing is
# built. Sources that this configuration does not compile (CUDA) are left out.
bash scripts/build.sh release configure

case $mode in
  --all | --tidy-only) candidates=$(find src -name '*.cc' | sort) ;;
  --changed)
    commit=${2:-HEAD}
    candidates=$({
      git diff --name-only --diff-filter=d "$commit" -- src
      git ls-files --others --exclude-standard -- src
    } | grep '\.cc$' | sort -u || true)
    ;;
  *)
    echo "error: unknown option '$mode'; use --all, --tidy-only or --changed [COMMIT]." >&2
    exit 2
    ;;
esac

files=$(python3 - "$candidates" <<'PYTHON'
import json, os, sys
compiled = {os.path.realpath(entry["file"]) for entry in json.load(open("build/compile_commands.json"))}
print("\n".join(f for f in sys.argv[1].split() if os.path.realpath(f) in compiled))
PYTHON
)
if [[ -z $files ]]; then
  echo "clang-tidy: no files to check"
  exit 0
fi
echo "clang-tidy: $(wc -l <<<"$files") files"
# g++'s own warning options are unknown to clang-tidy.
xargs -P "$(nproc)" -n 1 clang-tidy -p build --quiet \
  --extra-arg=-Wno-unknown-warning-option <<<"$files" 2>&1 |
  { grep -v -E '^[0-9]+ warnings? (generated|treated)|^[0-9]+ warnings? and' || true; }
