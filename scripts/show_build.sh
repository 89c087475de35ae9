#!/usr/bin/env bash
# Reads what ninja prints and shows it as one line: what is built, and the time left. On a terminal
# the line is rewritten in place; elsewhere one is printed every half a minute. The whole text goes
# to a file.
# Usage: cmake --build ... 2>&1 | scripts/show_build.sh LOG
set -euo pipefail

log=$1
: >"$log"
interval=30 # seconds
if [[ -t 1 ]]; then interval=0; fi

# 75 is "1 min 15 s".
duration() {
  if (($1 < 60)); then echo "$1 s"; else echo "$(($1 / 60)) min $(($1 % 60)) s"; fi
}

show() {
  if [[ -t 1 ]]; then printf '\r\033[K%s' "$1"; else echo "$1"; fi
}

begin=$SECONDS
shown=$begin
built=0
failed=false
while IFS= read -r line; do
  printf '%s\n' "$line" >>"$log"
  if [[ $line == FAILED:* || $line == 'ninja: build stopped'* || $line == 'ninja: error'* ]]; then
    failed=true
  fi
  if ! [[ $line =~ ^\[([1-9][0-9]*)/([0-9]+)\] ]]; then continue; fi
  built=${BASH_REMATCH[1]}
  total=${BASH_REMATCH[2]}
  elapsed=$((SECONDS - begin))
  if ((SECONDS - shown < interval)); then continue; fi
  shown=$SECONDS
  show "building $built/$total ... about $(duration $((elapsed * (total - built) / built))) left"
done
if [[ -t 1 ]]; then printf '\r\033[K'; fi
if ((built > 0)) && [[ $failed == false ]]; then
  echo "Built in $(duration $((SECONDS - begin))); the log is $log."
fi
