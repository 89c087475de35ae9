#!/usr/bin/env python3
"""Which cuDNN builds with CUDA take: cmake/TroupeCudaLibraries.cmake over folders made for the
purpose, which are all that it sees.

Usage: cuda_libraries_test.py PROGRAM SOURCE_FOLDER     (the program is not used)
"""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SOURCE_FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).resolve().parents[2]
SCRIPT = SOURCE_FOLDER / "cmake" / "TroupeCudaLibraries.cmake"


class CudaLibraries(unittest.TestCase):
    def missing(self, system="", packages="", cached=""):
        """What the script says is missing. Each argument: the version of cuDNN in that place, if it
        has one; `cached` is where an earlier configuration has found it."""
        with tempfile.TemporaryDirectory() as folder:
            places = {
                "system": Path(folder) / "usr",
                "packages": Path(folder) / "packages" / "nvidia" / "cudnn",
                "cached": Path(folder) / "opt",
            }
            for name, version in {"system": system, "packages": packages, "cached": cached}.items():
                if version:
                    self.install(places[name], version)
            command = ["cmake", f"-DCMAKE_FIND_ROOT_PATH={folder}",
                       "-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY",
                       "-DCMAKE_FIND_ROOT_PATH_MODE_LIBRARY=ONLY",
                       f"-DTROUPE_PYTHON_PACKAGES={folder}/packages"]
            if cached:
                command += [f"-DTROUPE_CUDNN_INCLUDE={places['cached']}/include",
                            f"-DTROUPE_CUDNN_LIBRARY={places['cached']}/lib/libcudnn.so.9"]
            result = subprocess.run([*command, "-P", str(SCRIPT)], capture_output=True, text=True,
                                    check=False)
            self.assertEqual((result.returncode, result.stderr), (0, ""))
            return result.stdout.split()

    @staticmethod
    def install(place, version):
        (place / "include").mkdir(parents=True)
        (place / "lib").mkdir()
        (place / "lib" / "libcudnn.so.9").touch()
        (place / "include" / "cudnn.h").touch()
        lines = [f"#define CUDNN_{name} {number}" for name, number in
                 zip(("MAJOR", "MINOR", "PATCHLEVEL"), version.split("."))]
        lines.append("#define CUDNN_VERSION (CUDNN_MAJOR * 10000 + CUDNN_MINOR * 100)")
        (place / "include" / "cudnn_version.h").write_text("\n".join(lines) + "\n")

    def assert_is_missing(self, is_missing, **places):
        names = [name.split("==")[0] for name in self.missing(**places)]
        self.assertEqual(names.count("nvidia-cudnn-cu13"), 1 if is_missing else 0, names)

    def test_all_are_missing_where_there_is_nothing(self):
        names = [name.split("==")[0] for name in self.missing()]
        self.assertEqual(names, ["nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "nvidia-nccl-cu13"])

    def test_the_oldest_that_can_be_used_is_found_in_each_place(self):
        self.assert_is_missing(False, system="9.15.1")
        self.assert_is_missing(False, packages="9.15.1")
        self.assert_is_missing(False, cached="9.15.1")

    def test_an_older_one_counts_as_none(self):
        self.assert_is_missing(True, system="9.15.0")
        self.assert_is_missing(True, packages="9.9.9")
        self.assert_is_missing(True, cached="9.13.0")

    def test_an_older_one_does_not_hide_a_newer_one(self):
        self.assert_is_missing(False, system="9.13.0", packages="9.19.0")
        self.assert_is_missing(False, cached="9.13.0", packages="9.19.0")
        self.assert_is_missing(False, packages="9.13.0", system="10.0.0")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
