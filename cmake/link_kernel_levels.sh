#!/usr/bin/env bash
# Joins the CPU kernels that were compiled for several processor levels into one object file. Each
# function keeps its name as a jump through a slot, and the slots begin with the functions of the
# first level; src/ops/kernel_level.cc fills in those of another. All code of a level, the inline
# functions and templates of headers too, gets names of its own: so no code for new processors can be
# taken for that of another place. Variables of headers stay one for all.
#
# For x86-64 and ELF. Fails where levels define different functions, variables of a single source
# that others could use, or code that runs before main().
# Usage: link_kernel_levels.sh OUTPUT --level NAME OBJECT... [--level NAME OBJECT...]...
#        CXX, NM, OBJCOPY and OBJDUMP in the environment: the tools
set -euo pipefail

output=$1
shift
work=$output.parts
rm -rf "$work"
mkdir -p "$work"

fail() {
  echo "error: $(basename "$output"): $*" >&2
  exit 1
}

levels=() parts=() tables=() objects=()
finish_level() {
  ((${#levels[@]})) || return 0
  local suffix=.${levels[-1]//[^a-z0-9]/_} variables
  "$NM" --defined-only "${objects[@]}" >"$work/symbols"
  # T: functions of one source. W, V: inline functions, templates, tables of virtual functions; n:
  # names of groups of these.
  awk 'NF == 3 && $2 == "T" { print $3 }' "$work/symbols" | sort >"$work/functions"
  variables=$(awk 'NF == 3 && $2 ~ /[ABDGRSC]/ { print $3 }' "$work/symbols")
  [[ -z $variables ]] || fail "CPU kernels of several levels cannot define variables: $variables"
  if "$OBJDUMP" -h "${objects[@]}" | grep -qE '[.](init_array|ctors)'; then
    fail "a source of CPU kernels has code that runs before main(), on whatever processor."
  fi
  if ((${#levels[@]} > 1)) && ! cmp -s "$work/functions" "$work/functions.first"; then
    fail "the levels ${levels[0]} and ${levels[-1]} define different functions:" \
      "$(diff "$work/functions.first" "$work/functions" | grep '^[<>]' | head -n 5)"
  fi
  cp "$work/functions" "$work/functions.first"
  awk -v suffix="$suffix" 'NF == 3 && $2 ~ /[TWVn]/ && !seen[$3]++ { print $3, $3 suffix }' \
    "$work/symbols" >"$work/renamed"
  cut -d ' ' -f 2 "$work/renamed" >>"$work/names"
  local object
  for object in "${objects[@]}"; do
    parts+=("$work/${#parts[@]}.o")
    "$OBJCOPY" --redefine-syms="$work/renamed" "$object" "${parts[-1]}"
  done
  sed "s/\$/$suffix/" "$work/functions" >"$work/functions$suffix"
  tables+=("$work/functions$suffix")
}

while (($#)); do
  if [[ $1 == --level ]]; then
    finish_level
    levels+=("$2")
    objects=()
    shift 2
  else
    objects+=("$1")
    shift
  fi
done
finish_level
((${#tables[@]})) || fail "no level was given."

{
  # The linker need not make the stack executable for this.
  echo '.section .note.GNU-stack,"",@progbits'
  echo '.text'
  awk '{ printf ".globl %s\n.type %s, @function\n.p2align 4\n%s: endbr64\n", $1, $1, $1
         printf "jmp *troupe_kernel_slots+%d(%%rip)\n.size %s, .-%s\n", 8 * (NR - 1), $1, $1 }' \
    "$work/functions.first"
  echo '.data'
  echo '.p2align 3'
  echo '.globl troupe_kernel_slots'
  echo 'troupe_kernel_slots:'
  sed 's/^/.quad /' "${tables[0]}"
  echo '.section .data.rel.ro,"aw"'
  echo '.p2align 3'
  echo '.globl troupe_kernel_functions'
  echo 'troupe_kernel_functions:'
  sed 's/^/.quad /' "${tables[@]}"
  echo '.section .rodata'
  echo '.p2align 3'
  echo '.globl troupe_kernel_count'
  echo "troupe_kernel_count: .quad $(wc -l <"$work/functions.first")"
} >"$work/slots.s"
"$CXX" -c "$work/slots.s" -o "$work/slots.o"
"$CXX" -r -nostdlib -fuse-ld=bfd -o "$output" "$work/slots.o" "${parts[@]}"
undefined=$("$NM" --undefined-only "$output" | awk '{ print $NF }' | grep -Fxf "$work/names" || true)
[[ -z $undefined ]] || fail "functions of a level were taken for those of another: $undefined"
rm -rf "$work"
