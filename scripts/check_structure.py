#!/usr/bin/env python3
"""Checks that the sources keep the rules of the house that a compiler does not check.

  floors      a file includes only its own room and the rooms below it (ROOMS, bottom first)
  circles     no file includes itself, directly or through others; nor does a unit, which is a header
              with its sources (of an operation also its kernels)
  budget      the core without CUDA stays small: BUDGET_LINES in all, PASS_LINES per file of
              src/passes
  pragma      every header says #pragma once
  environment only src/cli reads environment variables
  names       in program, passes and runtime no decision hangs on how a name is spelt
  flags       below options no text spells a flag: rooms name settings (parallel/refusal.h), which
              options words; SPELLS_FLAGS are yet to follow
  citations   pages and sources that a comment names are in the repository; so are a page's sections

Usage: check_structure.py [ROOT]     ROOT is the project's folder (default: the one this script is in)
Prints one line per violation and exits with 1 if there is any.
"""

import re
import sys
from pathlib import Path

ROOMS = ["base", "program", "comm", "ops", "optimizer", "parallel", "model", "passes", "runtime",
         "plan", "data", "io", "options", "train", "report", "cli"]
BUDGET_FOLDERS = ["base", "program", "passes", "runtime/cpu"]
BUDGET_LINES = 9350
PASS_LINES = 400
NAMELESS_ROOMS = ["program", "passes", "runtime"]
SPELLS_FLAGS = ("comm/post/", "comm/cuda/", "runtime/", "data/")

# Operations each of which is the derivative of the other.
MUTUAL = [{"ops/exchange/all_gather/all_gather", "ops/exchange/reduce_scatter/reduce_scatter"},
          {"ops/experts/combine/combine", "ops/experts/permute/permute"}]
KERNELS = re.compile(r"_(?:cpu|cuda)$")
KERNEL_FOLDER = re.compile(r"^ops/(\w+)/(\w+)/cuda/.*")

HEADERS = {".h", ".cuh"}
SOURCES = {".cc", ".cu"} | HEADERS

# A comment, or a literal in which comment marks mean nothing. A quote after a letter or digit is a
# digit separator (1'000), not the start of a character.
LEXEME = re.compile(
    r'//[^\n]*|/\*.*?\*/'
    r'|R"([^()\s\\]{0,16})\(.*?\)\1"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])*'",
    re.DOTALL)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b", re.MULTILINE)
GETENV = re.compile(r"\b(?:secure_)?getenv\b")
# In comments, which break lines where they like.
CITED_PAGE = re.compile(r'\b([\w/.-]+\.md)\b(?:,\s(?://\s)?"([^"]+)")?')
CITED_SOURCE = re.compile(r"(?<![\w/.<*-])([\w/]+\.(?:h|cuh|cc|cu))\b")
HEADING = re.compile(r"^#+ (.*?)\s*$", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--[a-z]")
NAME_TEST = re.compile(r'(?:\.|->)\s*(?:(?:starts_with|ends_with)\s*\(|r?find\s*\(\s*")')


def without_comments(text):
    """The text with comments blanked; literals and line numbers stay."""

    def blank(match):
        lexeme = match.group(0)
        if lexeme.startswith(("//", "/*")):
            return "\n" * lexeme.count("\n") or " "
        return lexeme

    return LEXEME.sub(blank, text)


def without_strings(text):
    """The text (already without comments) with the contents of literals blanked."""
    return LEXEME.sub(lambda match: '""' + "\n" * match.group(0).count("\n"), text)


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def circles(graph):
    """The circles of a graph (node -> nodes that it leads to), as paths that end where they begin."""
    finished = set()
    for start in graph:
        if start in finished:
            continue
        path, pending = [start], [iter(graph[start])]
        while pending:
            target = next(pending[-1], None)
            if target is None:
                finished.add(path.pop())
                pending.pop()
            elif target in path:
                yield path[path.index(target):] + [target]
            elif target not in finished:
                path.append(target)
                pending.append(iter(graph.get(target, [])))


def run_checker(arguments, checker_of, summary_of):
    """Checks a project's folder: a script's status. Prints a line for each of checker.violations,
    then summary_of(checker, what checker.run() returned) and their number."""
    root = Path(arguments[1]) if len(arguments) > 1 else Path(__file__).resolve().parent.parent
    if not (root / "src").is_dir():
        print(f"error: {root} has no folder src", file=sys.stderr)
        return 2
    checker = checker_of(root)
    found = checker.run()
    for violation in checker.violations:
        print(violation, file=sys.stderr)
    print(f"{summary_of(checker, found)}, {len(checker.violations)} violations")
    return 1 if checker.violations else 0


class Checker:
    def __init__(self, root):
        self.source_folder = root / "src"
        self.violations = []
        self.texts = {}  # path relative to src/ -> text as it stands
        self.codes = {}  # the same without comments
        for path in sorted(self.source_folder.rglob("*")):
            if path.suffix in SOURCES and path.is_file():
                name = path.relative_to(self.source_folder).as_posix()
                self.texts[name] = path.read_text(encoding="utf-8", errors="replace")
                self.codes[name] = without_comments(self.texts[name])

    def report(self, name, line, message):
        place = f"src/{name}:{line}" if line else f"src/{name}"
        self.violations.append(f"{place}: {message}")

    def includes(self, name):
        for match in INCLUDE.finditer(self.codes[name]):
            yield match.group(1), line_of(self.codes[name], match.start())

    def check_floors(self):
        for name in self.codes:
            room = name.split("/")[0]
            if "/" not in name or room not in ROOMS:
                self.report(name, 0, f"'{room}' is not a room; the rooms are {', '.join(ROOMS)}")
                continue
            for target, line in self.includes(name):
                if target not in self.codes:
                    self.report(name, line, f'includes "{target}", which is not a file below src/; '
                                            "write includes relative to src/")
                    continue
                target_room = target.split("/")[0]
                if target_room in ROOMS and ROOMS.index(target_room) > ROOMS.index(room):
                    self.report(name, line, f'includes "{target}": the room {room} lies below '
                                            f"{target_room} and may not know it")

    def check_circles(self):
        includes = {name: [target for target, _ in self.includes(name) if target in self.codes]
                    for name in self.codes}
        for circle in circles(includes):
            self.report(circle[-2], 0, "include circle: " + " -> ".join(circle))

    def check_units(self):
        """Circles between units, each once, with an include that closes it."""

        def unit_of(name):
            stem = KERNELS.sub("", str(Path(name).with_suffix("")))
            return KERNEL_FOLDER.sub(r"ops/\1/\2/\2", stem)

        known = {}  # unit -> unit that it includes -> where
        for name in self.codes:
            for target, line in self.includes(name):
                ends = {unit_of(name), unit_of(target)}
                if target in self.codes and len(ends) == 2 and ends not in MUTUAL:
                    known.setdefault(unit_of(name), {}).setdefault(unit_of(target), (name, line))
        for circle in circles({unit: sorted(known[unit]) for unit in sorted(known)}):
            name, line = known[circle[-2]][circle[-1]]
            self.report(name, line, "circle of units: " + " -> ".join(circle))

    def check_budget(self):
        """Returns the number of lines of the core."""
        lines = {name: len(text.splitlines()) for name, text in self.texts.items()
                 if not name.endswith((".cu", ".cuh"))}
        total = sum(count for name, count in lines.items()
                    if any(name.startswith(folder + "/") for folder in BUDGET_FOLDERS)
                    and "/cuda/" not in name)
        if total > BUDGET_LINES:
            folders = ", ".join("src/" + folder for folder in BUDGET_FOLDERS)
            self.violations.append(f"{folders}: {total} lines together, over the budget of "
                                   f"{BUDGET_LINES}")
        for name, count in lines.items():
            if name.startswith("passes/") and count > PASS_LINES:
                self.report(name, 0, f"{count} lines, over the {PASS_LINES} that a pass may have")
        return total

    def check_citations(self):
        root = self.source_folder.parent
        known = {path.name for folder in ("src", "tests", "bench", "fuzz")
                 for path in (root / folder).rglob("*.*")}
        for name, text in self.texts.items():
            for match in LEXEME.finditer(text):
                comment = match.group(0)
                if not comment.startswith(("//", "/*")):
                    continue
                for source in CITED_SOURCE.findall(comment):
                    room, _, rest = source.partition("/")
                    is_there = source in known if not rest else (
                        room not in ROOMS or source in self.texts)
                    if not is_there:
                        self.report(name, line_of(text, match.start()),
                                    f"names {source}, which is not in the repository")
            for match in CITED_PAGE.finditer(text):
                page, section = match.groups()
                places = [path for path in (root / page, root / "docs" / page) if path.is_file()]
                line = line_of(text, match.start())
                if not places:
                    self.report(name, line, f"names {page}, which is not in the repository")
                elif section and section.replace("\n// ", " ") not in HEADING.findall(
                        places[0].read_text(encoding="utf-8")):
                    self.report(name, line, f'names "{section}", which is no section of {page}')

    def check_headers(self):
        for name, code in self.codes.items():
            if Path(name).suffix in HEADERS and not PRAGMA_ONCE.search(code):
                self.report(name, 0, "header without #pragma once")

    def check_environment(self):
        for name, code in self.codes.items():
            if name.startswith("cli/"):
                continue
            bare = without_strings(code)
            for match in GETENV.finditer(bare):
                self.report(name, line_of(bare, match.start()),
                            "reads an environment variable; only src/cli may, and passes it on as "
                            "an option")

    def check_names(self):
        for name, code in self.codes.items():
            if name.split("/")[0] not in NAMELESS_ROOMS:
                continue
            for match in NAME_TEST.finditer(code):
                self.report(name, line_of(code, match.start()),
                            "tests how a string is spelt; names never decide here, use an id or an "
                            "attribute")

    def check_flags(self):
        for name, code in self.codes.items():
            room = name.split("/")[0]
            if room not in ROOMS[:ROOMS.index("options")] or name.startswith(SPELLS_FLAGS):
                continue
            for match in LEXEME.finditer(code):
                if FLAG.search(match.group(0)):
                    self.report(name, line_of(code, match.start()),
                                "spells a flag; name a Setting (parallel/refusal.h), or say it "
                                "without")

    def run(self):
        self.check_floors()
        before = len(self.violations)
        self.check_circles()
        if len(self.violations) == before:  # those are circles of units, too
            self.check_units()
        total = self.check_budget()
        self.check_citations()
        self.check_headers()
        self.check_environment()
        self.check_names()
        self.check_flags()
        return total


def main(arguments):
    return run_checker(arguments, Checker, lambda checker, total:
                       f"structure: {len(checker.texts)} files, core {total} of {BUDGET_LINES} lines")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
