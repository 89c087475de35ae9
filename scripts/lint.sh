#!/usr/bin/env bash
# Format, structure, prose and clang-tidy over the sources.
# Usage: scripts/lint.sh [--all | --tidy-only | --changed [COMMIT]]
#   --all        format, structure and prose, then clang-tidy over every src/**/*.cc (default)
#   --tidy-only  only clang-tidy over every src/**/*.cc
#   --changed    like --all, but clang-tidy only over the .cc files of src/ that differ from COMMIT
#                (default HEAD) or are new
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:---all}
if [[ $mode != --tidy-only ]]; then
  bash scripts/format.sh --check
  python3 scripts/check_structure.py
  python3 scripts/check_prose.py
fi

# All sources are checked as they are compiled, eight at a time (cmake/TroupeRooms.cmake), changed
# ones by themselves. Configuring is enough, nothing is built; sources that this configuration does
# not compile (CUDA) are left out.
folder=build-tidy
log=$(mktemp)
trap 'rm -f "$log"' EXIT
configure() {
  rm -rf "$folder"
  if ! cmake --preset release -B "$folder" -DTROUPE_TESTS=OFF "$@" >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
  fi
}
case $mode in
  --all | --tidy-only)
    # Unity builds include sources by design.
    options=(--checks=-bugprone-suspicious-include)
    configure
    candidates=.
    ;;
  --changed)
    options=()
    configure -DTROUPE_UNITY=OFF
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

files=$(python3 - "$folder" "$candidates" <<'PYTHON'
import json, os, sys
folder, candidates = sys.argv[1:]
# Without those that a build writes first.
compiled = [os.path.relpath(entry["file"])
            for entry in json.load(open(folder + "/compile_commands.json"))
            if os.path.exists(entry["file"])]
wanted = set(candidates.split())
print("\n".join(sorted(f for f in compiled if wanted == {"."} or f in wanted)))
PYTHON
)
if [[ -z $files ]]; then
  echo "clang-tidy: no files to check"
  exit 0
fi
echo "clang-tidy: $(wc -l <<<"$files") translation units"
# g++'s own warning options are unknown to clang-tidy.
xargs -P "$(nproc)" -n 1 clang-tidy -p "$folder" --quiet "${options[@]}" \
  --extra-arg=-Wno-unknown-warning-option <<<"$files" 2>&1 |
  { grep -v -E '^[0-9]+ warnings? (generated|treated)|^[0-9]+ warnings? and' || true; }
