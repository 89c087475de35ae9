#!/usr/bin/env python3
"""What a build with TROUPE_BUNDLE installs (cmake/TroupeInstall.cmake), for a small program in place of
troupe: the libraries that it needs, and neither glibc's nor the GPU's driver, which are each machine's
own.

Usage: bundle_test.py TROUPE SOURCE_FOLDER
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).parents[2]
PROJECT = """
cmake_minimum_required(VERSION 3.22)
project(Troupe VERSION 0.1.0 LANGUAGES CXX)
list(APPEND CMAKE_MODULE_PATH "${PROJECT_SOURCE_DIR}/cmake")
set(TROUPE_BUNDLE ON)
add_executable(troupe main.cc)
target_link_libraries(troupe PRIVATE "${LIBRARIES}/libcompiler.so")
include(TroupeInstall)
"""
MAIN = "int compiler(); int main() { return compiler(); }"
COMPILER = "int driver(); int terminal(); int compiler() { return driver() + terminal(); }"
OF_THE_MACHINE = {"libcuda.so.1": "int driver() { return 0; }",
                  "libutil.so.1": "int terminal() { return 0; }"}


def call(*command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_library(path, source, *needed):
    path.with_suffix(".cc").write_text(source)
    call("c++", "-shared", "-fPIC", "-o", path, path.with_suffix(".cc"), f"-Wl,-soname,{path.name}",
         f"-Wl,-rpath,{path.parent}", *needed)


class Bundle(unittest.TestCase):
    def test_what_is_the_machines_own_is_not_taken_along(self):
        with tempfile.TemporaryDirectory() as name:
            project, build, tree, libraries = (
                pathlib.Path(name) / part for part in ("project", "build", "tree", "libraries"))
            project.mkdir()
            libraries.mkdir()
            for file, text in OF_THE_MACHINE.items():
                make_library(libraries / file, text)
            make_library(libraries / "libcompiler.so", COMPILER,
                         *(libraries / file for file in OF_THE_MACHINE))
            for file in ("configs", "LICENSE", "cmake"):
                (project / file).symlink_to(SOURCE.resolve() / file)
            (project / "CMakeLists.txt").write_text(PROJECT)
            (project / "main.cc").write_text(MAIN)
            call("cmake", "-S", project, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                 f"-DLIBRARIES={libraries}")
            call("cmake", "--build", build)
            call("cmake", "--install", build, "--prefix", tree)
            self.assertEqual([path.name for path in (tree / "lib/troupe").iterdir()],
                             ["libcompiler.so"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
