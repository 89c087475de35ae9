#!/usr/bin/env python3
"""Which GPU architectures builds with CUDA take: cmake/TroupeCuda.cmake looks at TROUPE_CUDA_ARCH
before it looks for a compiler, so this needs none.

Usage: cuda_architectures_test.py PROGRAM SOURCE_FOLDER     (the program is not used)
"""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SOURCE_FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).resolve().parents[2]

# With a compiler that is not there, what passes the first look ends soon after it.
PROJECT = """cmake_minimum_required(VERSION 3.22)
project(architectures NONE)
set(CMAKE_CUDA_COMPILER /nonexistent/nvcc)
include({script})
"""


class CudaArchitectures(unittest.TestCase):
    def configure(self, architectures):
        """What cmake says."""
        with tempfile.TemporaryDirectory() as folder:
            script = SOURCE_FOLDER / "cmake" / "TroupeCuda.cmake"
            Path(folder, "CMakeLists.txt").write_text(PROJECT.format(script=script))
            result = subprocess.run(
                ["cmake", "-S", folder, "-B", f"{folder}/build",
                 f"-DTROUPE_CUDA_ARCH={architectures}"],
                capture_output=True, text=True, check=False)
            self.assertNotEqual(result.returncode, 0)
            return " ".join(result.stderr.split())

    def test_plain_90_is_refused(self):
        # It would build, and the products of experts would compute nothing.
        for architectures in ("90", "90,100a", "100a,90"):
            with self.subTest(architectures):
                self.assertIn("Hopper GPUs need 90a, with the a", self.configure(architectures))

    def test_what_is_no_architecture_is_refused(self):
        for architectures in ("sm_90a", "90a;x", "hopper", "90A"):
            with self.subTest(architectures):
                self.assertIn("is no architecture", self.configure(architectures))
        self.assertIn("TROUPE_CUDA_ARCH is empty", self.configure(""))

    def test_others_are_taken(self):
        for architectures in ("90a", "90a,100a", "100f", "80"):
            with self.subTest(architectures):
                errors = self.configure(architectures)
                self.assertNotIn("TROUPE_CUDA_ARCH", errors)
                self.assertIn("/nonexistent/nvcc", errors)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
