#!/usr/bin/env python3
"""Checks the prose of pages, comments and messages by the rules of CONTRIBUTING.md.

  paragraphs  a paragraph or list item of a page (*.md) has at most PARAGRAPH_WORDS words: what
              stands between blanks, signs among them
  words       pages, comments and messages use the words of the field: WORDS says what to write
              instead of words that mislead or are out of use
  links       what pages link to is in the repository, headings included, and so are pages that
              comments cite

Usage: check_prose.py [ROOT]     ROOT is the project's folder (default: the one this script is in)
Prints one line per violation and exits with 1 if there is any.
"""

import re
import sys
from pathlib import Path

from check_structure import LEXEME, SOURCES, line_of, run_checker

PARAGRAPH_WORDS = 90
CODE_FOLDERS = ["src", "bench", "fuzz", "tests"]
SCRIPT_FOLDERS = ["scripts", "cmake", ".ci", "packaging"]
# The first two name the words; the last has texts that tokenizers are tested with.
SKIPPED = {"scripts/check_prose.py", "tests/scripts/check_prose_test.py", "tests/fixtures"}
# A record: what was written stays as it was.
RECORD = "CHANGELOG.md"

# What misleads or is out of use, and what to write instead.
WORDS = {
    r"(?<!left )(?<!leave )(?<!leaves )behind": "after, issued after, overlaps",
    r"so\s+many": "N, this many",
    r"wants?": "needs, asks for",
    r"whoever|nobody|whom": "name the rank, thread or operation",
    r"meetings?": "barrier, rendezvous, collective",
    r"in\s+vain": "timed out; that nothing reads",
    r"but\s+for": "except",
    r"likewise": "repeat the noun",
    r"shar(?:e|es|ed)\s+out": "shard",
    r"hand(?:s|ed)?\s+out": "all-gather, give",
    r"copy\s+unit": "TMA",
    r"for\s+ever": "forever; a deadlock",
    r"of\s+which\s+alone": "only",
}
BANNED = re.compile(r"\b(?:" + "|".join(f"({word})" for word in WORDS) + r")\b", re.IGNORECASE)

FENCE = re.compile(r"^ *(```|~~~)")
ITEM = re.compile(r"^ *(?:[-*+]|\d+\.) ")
# A line that is no part of a paragraph: blank, heading, row of a table, HTML comment.
APART = re.compile(r"^ *(?:$|#|\||<!--|!\[)")
INLINE_CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"\]\(([^()\s]+)\)")
CITATION = re.compile(r"\bdocs/[\w/]+\.md\b")


def lines_of(page):
    """Each line, and whether it belongs to a fenced block (fences included)."""
    lines, in_fence = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = bool(FENCE.match(line))
        lines.append((line, in_fence or fence))
        in_fence ^= fence
    return lines


class Checker:
    def __init__(self, root):
        self.root = root
        self.headings = {}  # of pages that were linked to
        self.violations = []

    def report(self, path, line, message):
        self.violations.append(f"{path.relative_to(self.root)}:{line}: {message}")

    def check_words(self, path, text, first_line):
        """`text`: prose in which nothing but line breaks and comment marks was left out."""
        for match in BANNED.finditer(text):
            instead = list(WORDS.values())[match.lastindex - 1]
            self.report(path, first_line + text.count("\n", 0, match.start()),
                        f"'{' '.join(match.group(0).split())}': write {instead}")

    def check_links(self, path, text):
        for match in LINK.finditer(text):
            target, _, heading = match.group(1).partition("#")
            if ":" in target:
                continue
            found = (path.parent / target).resolve() if target else path
            line = line_of(text, match.start())
            if not found.exists():
                self.report(path, line, f"links to {target}, which does not exist")
            elif heading and heading not in self.headings_of(found):
                self.report(path, line, f"links to #{heading}, which is no heading there")

    def headings_of(self, path):
        if path not in self.headings:
            text = "\n".join(line for line, in_fence in lines_of(path) if not in_fence)
            self.headings[path] = {
                re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
                for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
        return self.headings[path]

    def check_citations(self, path, text):
        for match in CITATION.finditer(text):
            if not (self.root / match.group(0)).exists():
                self.report(path, line_of(text, match.start()),
                            f"cites {match.group(0)}, which does not exist")

    def check_page(self, path):
        paragraph, begin = [], 0
        prose = []

        def end_paragraph():
            words = len(" ".join(paragraph).split())
            if words > PARAGRAPH_WORDS:
                self.report(path, begin, f"a paragraph of {words} words; at most {PARAGRAPH_WORDS}: "
                                         "cut it, or make it a list or a table")
            paragraph.clear()

        for number, (line, in_fence) in enumerate([*lines_of(path), ("", False)], 1):
            if in_fence or APART.match(line):
                end_paragraph()
            else:
                if ITEM.match(line):
                    end_paragraph()
                if not paragraph:
                    begin = number
                paragraph.append(line)
            prose.append("" if in_fence else INLINE_CODE.sub("`code`", line))
        if path.name != RECORD:
            self.check_words(path, "\n".join(prose), 1)
        self.check_links(path, "\n".join(prose))

    def check_code(self, path):
        text = path.read_text(encoding="utf-8", errors="replace")
        self.check_citations(path, text)
        end = 0
        block, begin = "", 0
        for match in LEXEME.finditer(text):
            # Comments and literals between which nothing stands are one text.
            if text[end:match.start()].strip() or not block:
                self.check_words(path, block, begin)
                block, begin = "", line_of(text, match.start())
            else:
                block += text[end:match.start()]
            block += re.sub(r'^(?://+|R?"|/\*)|"$', " ", match.group(0))
            end = match.end()
        self.check_words(path, block, begin)

    def skips(self, path):
        name = path.relative_to(self.root).as_posix()
        return any(name == each or name.startswith(each + "/") for each in SKIPPED)

    def run(self):
        """Returns how many files were looked at."""
        pages = [path for path in sorted(self.root.rglob("*.md"))
                 if not path.relative_to(self.root).parts[0].startswith(("build", "."))]
        codes = [path for folder in CODE_FOLDERS for path in sorted((self.root / folder).rglob("*"))
                 if path.suffix in SOURCES]
        scripts = [path for folder in SCRIPT_FOLDERS
                   for path in sorted((self.root / folder).rglob("*")) if path.is_file()
                   and "__pycache__" not in path.parts]
        scripts += [path for path in sorted((self.root / "tests").rglob("*"))
                    if path.suffix in {".py", ".sh"}]
        files = 0
        for paths, check in ((pages, self.check_page), (codes, self.check_code),
                             (scripts, lambda path: self.check_words(path, path.read_text(), 1))):
            for path in paths:
                if self.skips(path):
                    continue
                files += 1
                check(path)
        return files


def main(arguments):
    return run_checker(arguments, Checker, lambda _, files: f"prose: {files} files")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
