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

# All sources are checked eight at a time, as the sources of a unity build: a header is parsed once
# for eight, which takes a fifth of the time. (So the sources of a room must not give two things one
# name, not even in unnamed namespaces.) Single sources are checked by themselves. Configuring is
# enough, nothing is built; sources that this configuration does not compile (CUDA) are left out.
case $mode in
  --all | --tidy-only)
    folder=build-tidy
    # Unity builds include sources by design.
    options=(--checks=-bugprone-suspicious-include)
    rm -rf "$folder"
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    if ! cmake --preset release -B "$folder" -DTROUPE_TESTS=OFF -DCMAKE_UNITY_BUILD=ON \
         -DCMAKE_UNITY_BUILD_BATCH_SIZE=8 >"$log" 2>&1; then
      cat "$log" >&2
      exit 1
    fi
    candidates=.
    ;;
  --changed)
    folder=build
    options=()
    bash scripts/build.sh release configure
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
