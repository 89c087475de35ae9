#!/usr/bin/env python3
"""Megatron's published command lines, given to `troupe plan` as they stand: what is refused is what
this version does not do, and no more.

megatron_command_lines/*.args hold them, a flag a line, with the file and the commit that they come
from; expected.json says for each which flags are refused, and why. A flag that is refused is left
out and the rest is tried again, until the plan is made. A flag that is newly refused fails this
test, and so does one that no longer is: then it is taken out of expected.json.

Usage: megatron_command_lines_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import re
import shlex
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import main, run

FOLDER = pathlib.Path(__file__).parent / "megatron_command_lines"
DONE, DOES_NOT_FIT = 0, 3  # a plan is made in both cases


def read(path):
    """The number of ranks, and the words of each flag."""
    ranks, flags = 1, []
    for line in path.read_text().splitlines():
        if line.startswith("# ranks "):
            ranks = int(line.split()[2])
        elif not line.startswith("#"):
            flags.append(shlex.split(line))
    return ranks, flags


def refused_flags(path):
    """The flags that are refused, each with the message, and the last run."""
    ranks, flags = read(path)
    refused = {}
    while True:
        done = run("plan", "--quiet", "--ranks", ranks, *[word for flag in flags for word in flag])
        named = re.search(r"--([a-z0-9][a-z0-9_-]*)", done.stderr)
        if done.returncode in (DONE, DOES_NOT_FIT) or named is None:
            return refused, done
        left = [flag for flag in flags if flag[0] != f"--{named[1]}"]
        if len(left) == len(flags):
            return refused, done
        refused[named[1]] = done.stderr.strip()
        flags = left


class MegatronCommandLines(unittest.TestCase):
    maxDiff = None

    def test_only_what_is_not_there_is_refused(self):
        expected = json.loads((FOLDER / "expected.json").read_text())
        paths = sorted(FOLDER.glob("*.args"))
        self.assertEqual(sorted(expected), [path.stem for path in paths])
        for path in paths:
            with self.subTest(path.stem):
                refused, last = refused_flags(path)
                self.assertIn(last.returncode, (DONE, DOES_NOT_FIT),
                              f"{last.stderr} without {sorted(refused)}")
                self.assertEqual(sorted(refused), sorted(expected[path.stem]), refused)


if __name__ == "__main__":
    main()
