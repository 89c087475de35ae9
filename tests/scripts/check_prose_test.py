#!/usr/bin/env python3
"""Tests of scripts/check_prose.py on small trees made for the purpose.

Usage: check_prose_test.py PROGRAM SOURCE_FOLDER     (the program is not used)
"""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SOURCE_FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).resolve().parents[2]
SCRIPT = SOURCE_FOLDER / "scripts" / "check_prose.py"
LONG = "word " * 91

GOOD_TREE = {
    "README.md": "# Title\n\nSee [a page](docs/page.md#its-heading).\n\n" + LONG[:-5] + "\n",
    # Code, tables and several items may be long; code may use any word.
    "docs/page.md": "## Its heading\n\n```\n" + LONG + " behind\n```\n\n| " + LONG + "|\n\n- " +
                    "word " * 60 + "\n- " + "word " * 60 + "\n\nThe name `wants(i)`.\n",
    "src/base/error.h": "// See docs/page.md.\nint behind = wants(nobody);\n",
}


class CheckProse(unittest.TestCase):
    def check(self, changes):
        """Runs the script over the good tree with `changes` laid over it."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in {**GOOD_TREE, **changes}.items():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return subprocess.run([sys.executable, str(SCRIPT), folder], capture_output=True,
                                  text=True, check=False)

    def assert_violation(self, changes, *words):
        result = self.check(changes)
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)

    def test_good_tree_passes(self):
        result = self.check({})
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("3 files, 0 violations", result.stdout)

    def test_long_paragraph(self):
        self.assert_violation({"docs/other.md": "# A\n\n" + LONG + "\n"}, "docs/other.md:3",
                              "a paragraph of 91 words")

    def test_long_paragraph_over_several_lines(self):
        self.assert_violation({"docs/other.md": LONG.replace(" ", "\n")}, "docs/other.md:1")

    def test_signs_are_words(self):
        self.assert_violation({"docs/other.md": "x = y + z; " * 19 + "\n"}, "of 95 words")

    def test_long_item(self):
        self.assert_violation({"docs/other.md": "- short\n- " + LONG + "\n"}, "docs/other.md:2")

    def test_word_in_a_page(self):
        self.assert_violation({"docs/other.md": "It goes\nbehind the exchange.\n"},
                              "docs/other.md:2", "'behind'", "after")

    def test_word_in_a_comment(self):
        self.assert_violation({"src/ops/add.cc": "int a;  // what it wants\n"}, "src/ops/add.cc:1",
                              "'wants'", "needs")

    def test_words_over_two_lines_of_a_comment(self):
        self.assert_violation({"src/ops/add.cc": "// All of them but\n// for one.\nint a;\n"},
                              "src/ops/add.cc:1", "'but for'", "except")

    def test_word_in_a_message(self):
        self.assert_violation({"src/ops/add.cc": 'f("a" "it waits in "\n  "vain");\n'},
                              "src/ops/add.cc:1", "'in vain'")

    def test_word_in_a_script(self):
        self.assert_violation({"scripts/run.sh": "# so many\n"}, "scripts/run.sh:1", "'so many'")

    def test_link_to_no_page_and_no_heading(self):
        self.assert_violation({"docs/other.md": "[a](none.md)\n"}, "none.md, which does not exist")
        self.assert_violation({"docs/other.md": "[a](page.md#none)\n"}, "#none")

    def test_comment_that_cites_no_page(self):
        self.assert_violation({"src/ops/add.cc": "// See docs/none.md.\n"}, "docs/none.md")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
