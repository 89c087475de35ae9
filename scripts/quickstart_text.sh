#!/usr/bin/env bash
# Writes the quickstart text: the King James Bible (1611, public domain), as the program `bible` of
# the package bible-kjv prints it. About 4.1 MB of plain ASCII English in 1,189 documents.
# Usage: scripts/quickstart_text.sh OUTDIR        writes OUTDIR/kjv.txt and prints its path
#
# A document is a chapter, a line is a verse without its number, and one blank line separates two
# documents: tokenize it with `--split-documents 1`. Chapters are written in a fixed scattered
# order, so that the last few percent, which become the validation set, are chapters spread evenly
# over all books. The output is the same bytes on every machine.
set -euo pipefail

if (($# != 1)); then
  echo "usage: $0 OUTDIR" >&2
  exit 2
fi
out_dir=$1
unpacked=$(dirname "$0")/../build-dependencies/debian # by install_dependencies.sh
if command -v bible >/dev/null; then
  bible=(bible)
elif [[ -x $unpacked/usr/bin/bible ]]; then
  libraries=$unpacked/usr/lib/x86_64-linux-gnu:$unpacked/lib/x86_64-linux-gnu
  bible=(env "LD_LIBRARY_PATH=$libraries" "$unpacked/usr/bin/bible" -p "$unpacked/usr/lib/")
else
  echo "error: the program 'bible' is missing; install it with: apt-get install bible-kjv" >&2
  exit 1
fi

mkdir -p "$out_dir"
partial=$(mktemp "$out_dir/kjv.txt.XXXXXX")
trap 'rm -f "$partial"' EXIT

# With -f each verse is one line: "Ge1:1 In the beginning ...". A step of 735 through 1,189 chapters
# (no common factor; their ratio is near the golden section) visits each once, and any run of
# visits is spread evenly.
export LC_ALL=C
"${bible[@]}" -f Gen1:1-Rev22:21 </dev/null | awk '
  {
    chapter = $1
    sub(/:.*/, "", chapter)
    if (chapter != previous) ++chapters
    previous = chapter
    sub(/^[^ ]* +/, "")
    gsub(/  +/, " ")
    text[chapters] = text[chapters] $0 "\n"
  }
  END {
    if (chapters != 1189) {
      print "error: the bible program printed " chapters + 0 " chapters, not 1189" >"/dev/stderr"
      exit 1
    }
    for (i = 0; i < chapters; ++i) {
      if (i > 0) printf "\n"
      printf "%s", text[(i * 735) % chapters + 1]
    }
  }' >"$partial"

chmod 644 "$partial"
mv "$partial" "$out_dir/kjv.txt"
trap - EXIT
echo "$out_dir/kjv.txt"
