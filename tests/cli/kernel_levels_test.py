#!/usr/bin/env python3
"""cmake/link_kernel_levels.sh: functions of several processor levels under one name, none of whose code
is taken for another's, and what it refuses.

Usage: kernel_levels_test.py TROUPE SOURCE_FOLDER
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import unittest

SCRIPT = os.path.join(sys.argv[2], "cmake", "link_kernel_levels.sh")
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")

HEADER = """
#pragma once
// One for all levels and the program: its address names a type.
template <class T> struct Tag { static constexpr char id = 0; };
// Code of its own in each level: LEVEL is what the level was compiled with.
#ifndef LEVEL
#define LEVEL 0
#endif
struct Level {
  // Its two constructors are one function under two names.
  __attribute__((noinline)) explicit Level(int x) : value(x + LEVEL) {}
  static __attribute__((noinline)) int get() { return LEVEL; }
  int value;
};
int kernel_level_of_code();
const void* kernel_tag();
int other_kernel(int x);
"""
KERNEL = """
#include "kernel.h"
int kernel_level_of_code() { return Level::get(); }
const void* kernel_tag() { return &Tag<int>::id; }
"""
OTHER = """
#include "kernel.h"
int other_kernel(int x) { return x * 100 + kernel_level_of_code() + 10 * Level(0).value; }
"""
MAIN = """
#include "kernel.h"
#include <cstdint>
#include <cstdio>
extern "C" {
extern const uint64_t troupe_kernel_count;
extern void* troupe_kernel_slots[];
extern void* const troupe_kernel_functions[];
}
int main() {
  for (int level = -1; level < 2; ++level) {
    for (uint64_t i = 0; level >= 0 && i < troupe_kernel_count; ++i) {
      troupe_kernel_slots[i] = troupe_kernel_functions[level * troupe_kernel_count + i];
    }
    std::printf("%d %d %d %d\\n", Level::get(), kernel_level_of_code(), other_kernel(7),
                kernel_tag() == &Tag<int>::id);
  }
}
"""


@unittest.skipUnless(platform.machine() == "x86_64", "processor levels are those of x86-64")
class KernelLevelsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.write("kernel.h", HEADER)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)

    def compile(self, text, name, *flags):
        self.write(name + ".cc", text)
        subprocess.run([COMPILER, "-std=c++20", "-O2", "-fPIE", *flags, "-c", self.path(name + ".cc"),
                        "-o", self.path(name + ".o")], check=True)
        return self.path(name + ".o")

    def link(self, levels):
        arguments = []
        for name, objects in levels.items():
            arguments += ["--level", name, *objects]
        tools = {"CXX": COMPILER, "NM": "nm", "OBJCOPY": "objcopy", "OBJDUMP": "objdump"}
        return subprocess.run(["bash", SCRIPT, self.path("kernels.o"), *arguments],
                              env=os.environ | tools, capture_output=True, text=True, check=False)

    def level(self, number, march, sources):
        return [self.compile(text, f"{name}{number}", f"-march={march}", f"-DLEVEL={number}")
                for name, text in sources.items()]

    def test_each_level_has_its_own_code_and_all_share_variables(self):
        sources = {"kernel": KERNEL, "other": OTHER}
        done = self.link({"x86-64-v2": self.level(2, "x86-64-v2", sources),
                          "x86-64-v3": self.level(3, "x86-64-v3", sources)})
        self.assertEqual(done.returncode, 0, done.stderr)
        main = self.compile(MAIN, "main")
        program = self.path("program")
        subprocess.run([COMPILER, main, self.path("kernels.o"), "-o", program], check=True)
        lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout
        # Before a choice the first level's; the program's own inline function is its own throughout.
        self.assertEqual(lines.splitlines(), ["0 2 722 1", "0 2 722 1", "0 3 733 1"])

    def refusal(self, first, second=None):
        done = self.link({"x86-64-v2": self.level(2, "x86-64-v2", {"first": first}),
                          "x86-64-v3": self.level(3, "x86-64-v3", {"second": second or first})})
        self.assertEqual(done.returncode, 1)
        return done.stderr

    def test_levels_that_differ_are_refused(self):
        text = self.refusal("int a() { return 1; }", "int b() { return 1; }")
        self.assertIn("define different functions", text)
        self.assertIn("_Z1av", text)

    def test_variables_for_others_are_refused(self):
        self.assertIn("cannot define variables: counter", self.refusal("int counter = 3;"))

    def test_code_before_main_is_refused(self):
        text = self.refusal("int ask(); static int asked = ask(); int get() { return asked; }")
        self.assertIn("runs before main()", text)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
