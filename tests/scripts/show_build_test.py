#!/usr/bin/env python3
"""scripts/show_build.sh, through which make shows a build: one line, the whole text in a file.

Broken before: make quickstart printed 255 lines of the build."""

import os
import pathlib
import pty
import subprocess
import sys
import tempfile
import unittest

NINJA = """[0/2] Re-checking globbed directories...
[1/3] Building CXX object a.o
[2/3] Building CXX object b.o
[3/3] Linking CXX executable troupe
"""
SOURCE = pathlib.Path(sys.argv.pop() if len(sys.argv) > 2 else ".")


def read_all(master):
    data = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # the other end is closed
            return data
        data += piece


class ShowBuildTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="troupe_test_")
        self.addCleanup(folder.cleanup)
        self.log = pathlib.Path(folder.name) / "build.log"

    def show(self, text, **options):
        return subprocess.run(["bash", SOURCE / "scripts/show_build.sh", self.log], input=text,
                              text=True, check=True, **options)

    def test_one_line_is_rewritten_on_a_terminal(self):
        master, terminal = pty.openpty()
        self.show(NINJA, stdout=terminal)
        os.close(terminal)
        shown = read_all(master).decode()
        os.close(master)
        self.assertEqual(shown.count("\r\x1b[Kbuilding "), 3, shown)
        self.assertIn("building 2/3 ... about 0 s left", shown)
        self.assertEqual(shown.count("\n"), 1, "the line that says how long it took")
        self.assertEqual(self.log.read_text(), NINJA)

    def test_few_lines_without_a_terminal(self):
        done = self.show(NINJA, stdout=subprocess.PIPE)
        self.assertRegex(done.stdout, r"\ABuilt in \d+ s; the log is .*build\.log\.\n\Z")
        self.assertEqual(self.log.read_text(), NINJA)

    def test_an_interrupted_build_was_not_built(self):
        for last in ("ninja: build stopped: interrupted by user.", "ninja: error: loading build.ninja"):
            done = self.show(f"[1/3] Building CXX object a.o\n{last}\n", stdout=subprocess.PIPE)
            self.assertEqual(done.stdout, "")

    def test_a_failed_build_was_not_built(self):
        done = self.show("[1/3] Building CXX object a.o\nFAILED: a.o\na.cc:1: error: no\n",
                         stdout=subprocess.PIPE)
        self.assertEqual(done.stdout, "")
        self.assertIn("a.cc:1: error: no", self.log.read_text())

    def test_nothing_to_build_says_nothing(self):
        done = self.show("[0/2] Re-checking globbed directories...\nninja: no work to do.\n",
                         stdout=subprocess.PIPE)
        self.assertEqual(done.stdout, "")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
