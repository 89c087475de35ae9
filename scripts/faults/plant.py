#!/usr/bin/env python3
"""Plants small faults at random places of the code without CUDA, to find out how many the tests
notice.

A fault is one change of one expression or statement: a comparison takes the border in or leaves it
out, == becomes !=, && becomes ||, + becomes -, * becomes +, a number grows by one, min becomes max, a
condition is turned around, or a call or assignment is left out. All faults are planted into one copy
of the project, each with a switch (fault.h), so that it is built once; try.py then tries each by
itself.

Places are drawn evenly among the lines of code of src/**/*.cc: a line, then one of the changes that
it allows. Left out are lines that guard against our own mistakes (TROUPE_CHECK), reserve memory,
compute constants of the compiler, or make samples for tests; look through the list afterwards for
faults that change nothing that can be seen, and leave them out before the first try (--without).

Usage: plant.py FOLDER [--seed N] [--count N] [--without NUMBER,...] [--within src/ROOM,...]
Writes the copy to FOLDER, and FOLDER/faults.tsv: number, file:line, the old text, the new one. Needs
libclang (Debian: python3-clang) and build/compile_commands.json (scripts/build.sh release configure).
"""

import argparse
import itertools
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import sys

from clang import cindex

ROOT = pathlib.Path(__file__).resolve().parents[2]
NUMBER = "<number>"  # of a fault, where its text names it
SWITCH = f"::troupe_fault::on({NUMBER})"
OPERATORS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&",
             "+": "-", "-": "+", "*": "+", "/": "*", "+=": "-=", "-=": "+="}
EXTREMA = {"min": "max", "max": "min"}
NO_FAULTS = re.compile(r"TROUPE_CHECK|\.reserve\(|static_assert|constexpr")
FUNCTIONS = {cindex.CursorKind.FUNCTION_DECL, cindex.CursorKind.CXX_METHOD,
             cindex.CursorKind.FUNCTION_TEMPLATE, cindex.CursorKind.CONSTRUCTOR}


class Change:
    """Bytes begin..end of a file, and their new text, which has NUMBER for that of the fault."""

    def __init__(self, begin, end, old, new, shown):
        self.begin, self.end, self.old, self.new, self.shown = begin, end, old, new, shown


def compile_flags(folder):
    """Those of the project, for its copy."""
    flags = []
    for entry in json.loads((ROOT / "build/compile_commands.json").read_text()):
        words = shlex.split(entry["command"].replace(f"{ROOT}/src", f"{folder}/src"))
        for word, following in zip(words, words[1:] + [""]):
            if word.startswith(("-I", "-D", "-std=")):
                flags.append(word)
            elif word == "-isystem":
                flags += [word, following]
    unique = list(dict.fromkeys(f for f in flags if f != "-isystem" and not f.startswith("/")))
    system = dict.fromkeys(f for f in flags if f.startswith("/"))
    return unique + [word for folder in system for word in ("-isystem", folder)]


def changes_of(cursor, parent, text):
    """The changes that a node of the syntax tree allows."""
    begin, end = cursor.extent.start.offset, cursor.extent.end.offset
    old = text[begin:end].decode()
    kind = cursor.kind
    children = list(cursor.get_children())

    def change(new, shown):
        return [Change(begin, end, old, f"({SWITCH} ? ({new}) : ({old}))", shown)]

    if kind in (cindex.CursorKind.BINARY_OPERATOR, cindex.CursorKind.COMPOUND_ASSIGNMENT_OPERATOR):
        left_end, right = children[0].extent.end.offset, children[1].extent.start.offset
        operator = text[left_end:right].decode().strip()
        if operator in OPERATORS and begin <= left_end <= right <= end:
            other = OPERATORS[operator]
            new = text[begin:left_end].decode() + f" {other} " + text[right:end].decode()
            return change(new, f"{operator} -> {other}")
    elif kind == cindex.CursorKind.INTEGER_LITERAL and re.fullmatch(r"[0-9]+", old):
        return change(str(int(old) + 1), f"{old} -> {int(old) + 1}")
    elif kind == cindex.CursorKind.CALL_EXPR and cursor.spelling in EXTREMA:
        name, other = cursor.spelling, EXTREMA[cursor.spelling]
        if old.startswith(f"std::{name}"):
            return change(old.replace(name, other, 1), f"{name} -> {other}")
    elif kind == cindex.CursorKind.UNARY_OPERATOR and old[:1] in ("!", "-"):
        # A type of its own would turn that of the other choice into itself: !x of an optional.
        new = f"static_cast<bool>({old[1:]})" if old[0] == "!" else old[1:]
        return change(new, f"no {old[0]}")
    if parent.kind == cindex.CursorKind.IF_STMT and children and cursor == next(parent.get_children()):
        if kind not in (cindex.CursorKind.VAR_DECL, cindex.CursorKind.DECL_STMT):
            return change(f"!({old})", "condition turned around")
    assigns = kind == cindex.CursorKind.BINARY_OPERATOR and re.match(r"[^=!<>]+=[^=]", old)
    if parent.kind == cindex.CursorKind.COMPOUND_STMT and (kind == cindex.CursorKind.CALL_EXPR or assigns):
        return [Change(begin, end, old, f"if (!{SWITCH}) {old}", "left out")]
    return []


def changes_in(file, flags, index):
    """The changes of each line of a file, by line."""
    text = file.read_bytes()
    lines = text.split(b"\n")
    unit = index.parse(str(file), args=flags)
    found = {}

    def visit(cursor, parent):
        if cursor.location.file and cursor.location.file.name != str(file):
            return
        if cursor.kind in FUNCTIONS and "sample" in cursor.spelling:
            return
        # What the compiler computes has no faults (fault.h).
        if cursor.kind == cindex.CursorKind.VAR_DECL and any(
                token.spelling == "constexpr" for token in itertools.islice(cursor.get_tokens(), 3)):
            return
        if cursor.kind.is_statement() or cursor.kind.is_expression():
            begin, end = cursor.extent.start, cursor.extent.end
            whole = b"\n".join(lines[begin.line - 1 : end.line])
            if end.offset > begin.offset and not NO_FAULTS.search(whole.decode()):
                for change in changes_of(cursor, parent, text):
                    found.setdefault(begin.line, []).append(change)
        for child in cursor.get_children():
            # Nor has the type of a variable, which stands before its name.
            if (cursor.kind != cindex.CursorKind.VAR_DECL
                    or child.extent.end.offset > cursor.location.offset):
                visit(child, cursor)

    for child in unit.cursor.get_children():
        visit(child, unit.cursor)
    return found


def copy_project(folder):
    """What git has, as it is now: the project may change while faults are drawn."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def planted(file, changes, folder):
    """The text of a file with numbered changes, which do not overlap."""
    text = file.read_bytes()
    for number, change in sorted(changes, key=lambda each: -each[1].begin):
        new = change.new.replace(NUMBER, str(number))
        text = text[: change.begin] + new.encode() + text[change.end :]
    include = f'#include "{os.path.relpath(folder / "scripts/faults", file.parent)}/fault.h"\n'
    return include.encode() + text


def parses(file, text, flags, index):
    unit = index.parse(str(file), args=flags, unsaved_files=[(str(file), text.decode())])
    return not any(each.severity >= cindex.Diagnostic.Error for each in unit.diagnostics)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--without", default="")
    parser.add_argument("--within", default="src")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder}: is there already")
    if not (ROOT / "build/compile_commands.json").exists():
        parser.error("build/compile_commands.json is missing: scripts/build.sh release configure")
    without = {int(each) for each in arguments.without.split(",") if each}

    folder = arguments.folder.absolute()
    copy_project(folder)
    draw = random.Random(arguments.seed)
    files = {file for part in arguments.within.split(",") for file in folder.glob(f"{part}/**/*.cc")}
    files = sorted(files - set(folder.glob("src/**/cuda/**/*.cc")))
    places = [(file, line) for file in files
              for line, text in enumerate(file.read_text().split("\n"), 1)
              if text.strip() and not text.strip().startswith("//")]
    index, flags, known, chosen = cindex.Index.create(), compile_flags(folder), {}, {}
    number = 0
    while number < arguments.count:
        file, line = draw.choice(places)
        if file not in known:
            known[file] = changes_in(file, flags, index)
        if line not in known[file]:
            continue
        change = draw.choice(known[file][line])
        others = chosen.setdefault(file, [])
        if any(change.begin < each.end and each.begin < change.end for _, each in others):
            continue
        if not parses(file, planted(file, [(number + 1, change)], folder), flags, index):
            continue
        number += 1
        others.append((number, change))
        print(f"\rdrawn {number} of {arguments.count}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    rows = []
    for file, changes in chosen.items():
        changes = [(number, change) for number, change in changes if number not in without]
        text = file.read_bytes()
        for number, change in changes:
            line = text[: change.begin].count(b"\n") + 1
            rows.append((number, f"{file.relative_to(folder)}:{line}", " ".join(change.old.split()),
                         change.shown))
        file.write_bytes(planted(file, changes, folder))
    (folder / "faults.tsv").write_text("".join("\t".join(map(str, row)) + "\n" for row in sorted(rows)))


main()
