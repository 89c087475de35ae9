#!/usr/bin/env python3
"""Tests of scripts/check_structure.py on small trees made for the purpose.

Usage: check_structure_test.py PROGRAM SOURCE_FOLDER     (the program is not used)
"""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SOURCE_FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).resolve().parents[2]
SCRIPT = SOURCE_FOLDER / "scripts" / "check_structure.py"

GOOD_TREE = {
    "base/error.h": "#pragma once\n// getenv is named in a comment only\n",
    "base/error.cc": '#include "base/error.h"\n',
    "program/op.h": '#pragma once\n#include "base/error.h"\nconst char* kText = "getenv(HOME)";\n',
    "passes/fuse.cc": '#include "program/op.h"\n// name.starts_with("router") would be wrong\n',
    "ops/names.cc": 'bool f(S s) { return s.starts_with("moe"); }\n',
    "cli/main.cc": '#include <cstdlib>\n#include "passes/fuse.h"\nauto h = getenv("HOME");\n',
    "passes/fuse.h": "#pragma once\n",
}


class CheckStructure(unittest.TestCase):
    def check(self, changes):
        """Runs the script over the good tree with `changes` laid over it."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in {**GOOD_TREE, **changes}.items():
                path = Path(folder) / "src" / name
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
        self.assertIn("7 files, core 9 of 9350 lines, 0 violations", result.stdout)

    def test_upward_include(self):
        self.assert_violation({"base/up.cc": '\n#include "program/op.h"\n'},
                              "src/base/up.cc:2", "program/op.h", "lies below")

    def test_include_in_a_comment_does_not_count(self):
        result = self.check({"base/up.cc": '/*\n#include "program/op.h"\n*/\n'})
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_unknown_include(self):
        self.assert_violation({"ops/add.cc": '#include "add.h"\n'}, "src/ops/add.cc:1",
                              "relative to src/")

    def test_unknown_room(self):
        self.assert_violation({"utils/misc.cc": "\n"}, "src/utils/misc.cc", "'utils' is not a room")

    def test_file_outside_every_room(self):
        self.assert_violation({"main.cc": "\n"}, "src/main.cc", "is not a room")

    def test_circle(self):
        self.assert_violation({"ops/a.h": '#pragma once\n#include "ops/b.h"\n',
                               "ops/b.h": '#pragma once\n#include "ops/a.h"\n'},
                              "include circle: ops/a.h -> ops/b.h -> ops/a.h")

    def test_file_that_includes_itself(self):
        self.assert_violation({"ops/a.h": '#pragma once\n#include "ops/a.h"\n'},
                              "include circle: ops/a.h -> ops/a.h")

    def test_circle_of_units(self):
        self.assert_violation({"train/a.h": '#pragma once\n#include "train/b.h"\n',
                               "train/b.h": "#pragma once\n",
                               "train/b.cc": '#include "train/b.h"\n#include "train/a.h"\n'},
                              "src/train/b.cc:2",
                              "circle of units: train/a -> train/b -> train/a")

    def test_kernels_belong_to_their_operation(self):
        result = self.check({"ops/g/x/x.h": "#pragma once\n",
                             "ops/g/x/x.cc": '#include "ops/g/x/x_cpu.h"\n#include "ops/g/x/cuda/y.h"\n',
                             "ops/g/x/x_cpu.h": '#pragma once\n#include "ops/g/x/x.h"\n',
                             "ops/g/x/cuda/y.h": '#pragma once\n#include "ops/g/x/x.h"\n'})
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_core_over_budget(self):
        # 9 lines of the good tree, 9,000 and 342: one line over.
        self.assert_violation({"base/long.cc": "\n" * 9000, "runtime/cpu/loop.cc": "\n" * 342},
                              "9351 lines", "9350")

    def test_kernels_and_other_rooms_are_outside_the_budget(self):
        result = self.check({"ops/long.cc": "\n" * 9000, "runtime/comm/long.cc": "\n" * 9000,
                             "base/long.cu": "\n" * 9000})
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_long_pass(self):
        self.assert_violation({"passes/long.cc": "\n" * 401}, "src/passes/long.cc", "401 lines")

    def test_pass_of_full_length(self):
        self.assertEqual(self.check({"passes/long.cc": "\n" * 400}).returncode, 0)

    def test_citations(self):
        self.assert_violation({"ops/add.cc": "int i;\n// See gone.h.\n"}, "src/ops/add.cc:2",
                              "names gone.h")
        self.assert_violation({"ops/add.cc": "// As base/gone.h says.\n"}, "names base/gone.h")
        self.assert_violation({"ops/add.cc": "// docs/gone.md says why.\n"}, "names docs/gone.md")
        page = {"../docs/page.md": "# Page\n\n## A part\n"}
        self.assert_violation({**page, "ops/add.cc": '\n// (docs/page.md, "Another")\n'},
                              "src/ops/add.cc:2", 'names "Another"', "no section of docs/page.md")
        result = self.check({**page, "ops/add.cc": '// error.h, base/error.h, other/system.h\n'
                                                   '// (docs/page.md, "A\n// part")\n'})
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_missing_pragma(self):
        self.assert_violation({"ops/a.h": "// #pragma once\nint a;\n"}, "src/ops/a.h",
                              "#pragma once")

    def test_getenv(self):
        self.assert_violation({"train/loop.cc": 'int a = 1\'000;\nauto h = std::getenv("HOME");\n'},
                              "src/train/loop.cc:2", "environment")

    def test_name_tests(self):
        for room in ("program", "passes", "runtime"):
            for call in ('name.find("gate")', 'op->name().starts_with("moe")', 'n.rfind("x", 0)',
                         "name.ends_with(suffix)"):
                with self.subTest(room=room, call=call):
                    self.assert_violation({f"{room}/pick.cc": f"\n\nbool b = {call};\n"},
                                          f"src/{room}/pick.cc:3", "names never decide")

    def test_lookup_by_variable_is_allowed(self):
        self.assertEqual(self.check({"passes/map.cc": "auto it = offsets.find(id);\n"}).returncode,
                         0)

    def test_flags_below_options(self):
        for text in ('"--ranks 3: too many"', '"use one rank (--ranks 1)"', 'R"(a\n--ranks)"'):
            with self.subTest(text=text):
                self.assert_violation({"parallel/layout.cc": f"\nauto t = {text};\n"},
                                      "src/parallel/layout.cc:2", "spells a flag")

    def test_flags_where_they_belong(self):
        changes = {"options/ranks.cc": 'auto t = "--ranks 3";\n',
                   "cli/run.cc": 'auto t = "--ranks 3";\n',
                   "model/count.cc": "// --ranks in a comment\nint f(int n) { return --n; }\n",
                   "ops/arrow.cc": 'auto t = "a -- b, c--d, ---x";\n'}
        result = self.check(changes)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_folder_without_sources(self):
        with tempfile.TemporaryDirectory() as folder:
            result = subprocess.run([sys.executable, str(SCRIPT), folder], capture_output=True,
                                    text=True, check=False)
        self.assertEqual(result.returncode, 2)
        self.assertIn("no folder src", result.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
