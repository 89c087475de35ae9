#!/usr/bin/env python3
"""`troupe doctor` on machines of all kinds: a library that is loaded before all others answers in the
place of this one, and the whole text and the whole JSON document must say what it answered. The same
library holds the choice of BLAS's kernels at the start of the program.

Usage: doctor_test.py TROUPE SOURCE_FOLDER
"""

import json
import os
import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from faked_machine import memory_of, run_on_faked_machine
from program_runs import HERE, main

NO_MEMORY = ("/proc/meminfo does not say how much memory is available, so runs that do not fit cannot "
             "be refused")
WRONG_PRODUCT = ("a matrix product comes out wrong: BLAS is broken on this processor. Install another "
                 "version of it")
BLAS = {"FAKED_BLAS": "OpenBLAS 9.8.7 ODD  MAX_THREADS=3", "FAKED_CORE": "Odd core"}


def of_processor():
    """The processor for which OpenBLAS has kernels that suit this one best; none: it has no AVX."""
    flags = set(re.search(r"(?m)^flags\s*:(.*)$", pathlib.Path("/proc/cpuinfo").read_text())[1].split())
    if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
        return "SkylakeX"
    return "Haswell" if {"avx2", "fma", "bmi1", "bmi2", "f16c"} <= flags else None


class Doctor(unittest.TestCase):
    def doctor(self, *flags, memory=memory_of(3 << 20), **changes):
        """The status and what is printed, on such a machine."""
        done = run_on_faked_machine("doctor", *flags, memory=memory, **changes)
        self.assertEqual(done.stderr, "")
        return done.returncode, done.stdout

    def document(self, *flags, **changes):
        status, printed = self.doctor("--json", *flags, **changes)
        found = json.loads(printed)
        self.assertEqual(status, 0 if found["healthy"] else 1)
        return found

    def text(self, **changes):
        """The lines, as they were before they were wrapped."""
        status, printed = self.doctor(**changes)
        self.assertLessEqual(max(map(len, printed.splitlines())), 80)
        return status, re.sub(r"\n {25}|\n {4}(?=\S)", " ", printed).splitlines()

    def test_the_document_says_all_that_the_machine_answers(self):
        found = self.document(**BLAS)
        cmake = (HERE.source / "CMakeLists.txt").read_text()
        build, kernels = found["build"], found["cpu_kernels"]
        self.assertRegex(build.pop("commit"), r"^([0-9a-f]{12}(-dirty)?|unknown)$")
        self.assertRegex(build.pop("compiler"), r"^(GNU|Clang) [0-9.]+$")
        self.assertEqual(build.pop("cuda_compiler") is not None, found["cuda"])
        self.assertEqual(build, {"processor": kernels["built"][0]})
        # The highest that this processor has is used.
        self.assertEqual(kernels["usable"], kernels["built"][:len(kernels["usable"])])
        self.assertEqual(kernels["used"], kernels["usable"][-1])
        mpi = found.pop("mpi")
        for name in ("build", "cpu_kernels", "cuda", "cuda_libraries"):
            found.pop(name, None)
        self.assertEqual(found, {
            "healthy": True, "problems": [],
            "version": re.search(r"project\(Troupe VERSION ([0-9.]+)", cmake)[1],
            "processes": ["tcp"] + ["mpi"] * (mpi is not None),
            "cores": len(os.sched_getaffinity(0)),
            "available_memory_bytes": 3 << 30, "page_size_bytes": os.sysconf("SC_PAGESIZE"),
            "transparent_huge_pages": "never",
            "blas": {"library": "OpenBLAS 9.8.7 ODD", "core": "Odd core"}})

    def test_the_text_says_the_same(self):
        found = self.document(**BLAS)
        status, lines = self.text(**BLAS)
        build, kernels = found["build"], found["cpu_kernels"]
        expected = {
            "version": found["version"],
            "build": f"commit {build['commit']}, {build['compiler']}, for processor {build['processor']}",
            "mpi": found["mpi"],
            "processes": "over TCP (torchrun, srun, by hand)"
                         + ", through MPI (mpirun, srun --mpi=pmix)" * (found["mpi"] is not None),
            "cores": f"{found['cores']} of {os.sysconf('SC_NPROCESSORS_ONLN')} usable",
            "cpu_kernels": f"{kernels['used']} (of {', '.join(kernels['built'])} in this build)",
            "available_memory_bytes": "3.00 GiB",
            "page_size_bytes": f"{found['page_size_bytes'] / 1024:.2f} KiB",
            "transparent_huge_pages": "never", "blas": "OpenBLAS 9.8.7 ODD; kernels for Odd core"}
        if found["mpi"] is None:
            expected["mpi"] = next(line for line in lines if line.startswith("mpi "))[25:]
            self.assertRegex(expected["mpi"], r"^none: .+")
        lines = [line for line in lines if not line.startswith("cuda")]
        self.assertEqual(lines, [f"{name:<24} {text}" for name, text in expected.items()]
                         + ["All is well."])
        self.assertEqual(status, 0)

    def test_problems_are_named_with_what_to_do(self):
        wrong = {"memory": "MemTotal: 9 kB\n", "WRONG_FLOATS": "0", **BLAS}
        found = self.document(**wrong)
        self.assertEqual((found["healthy"], found["available_memory_bytes"], found["problems"]),
                         (False, 0, [f"available_memory_bytes: {NO_MEMORY}", f"blas: {WRONG_PRODUCT}"]))
        status, lines = self.text(**wrong)
        self.assertEqual(status, 1)
        memory = lines.index("available_memory_bytes   unknown")
        self.assertEqual(lines[memory + 1], f"  PROBLEM: {NO_MEMORY}.")
        self.assertEqual(lines[-3:], ["blas                     OpenBLAS 9.8.7 ODD; kernels for Odd core",
                                      f"  PROBLEM: {WRONG_PRODUCT}.", "Troupe will not work well here."])
        self.assertEqual(sum("PROBLEM" in line for line in lines), 2)

    def test_one_problem_is_enough_wherever_it_is(self):
        self.assertEqual(self.document(memory="")["problems"], [f"available_memory_bytes: {NO_MEMORY}"])
        for variable in ("WRONG_FLOATS", "WRONG_DOUBLES"):
            for element in ("0", "-1"):
                self.assertEqual(self.document(**{variable: element})["problems"],
                                 [f"blas: {WRONG_PRODUCT}"], (variable, element))

    def test_huge_pages_are_the_word_in_brackets(self):
        for pages, mode in (("[always] madvise never\n", "always"), ("always madvise never", None),
                            ("[] [x] [y]", "x"), ("a] [b", None), ("", None)):
            found = self.document(pages=pages)
            self.assertEqual(found["transparent_huge_pages"], mode, pages)
            line = f"transparent_huge_pages   {mode or 'unknown'}"
            self.assertIn(line, self.text(pages=pages)[1])

    def test_a_blas_that_says_nothing_of_itself(self):
        unnamed = {"FAKED_BLAS": "", "FAKED_CORE": ""}
        self.assertEqual(self.document(**unnamed)["blas"], {"library": "unnamed", "core": None})
        self.assertEqual(self.text(**unnamed)[1][-2], "blas                     unnamed")

    @unittest.skipUnless(of_processor(), "OpenBLAS's kernels are chosen on processors with AVX2")
    def test_a_processor_that_blas_does_not_know_gets_its_kernels(self):
        def core(*flags, **variables):
            return self.document(*flags, **variables)["blas"]["core"]

        self.assertEqual(core(FAKED_CORE="Prescott"), of_processor())
        self.assertEqual(core(FAKED_CORE="Zen"), "Zen", "it knows what that is")
        self.assertEqual(core(FAKED_CORE="Prescott", OPENBLAS_CORETYPE="Nehalem"), "Nehalem")
        # A level that is asked for says it by itself.
        lowest = self.document()["cpu_kernels"]["built"][0]
        self.assertEqual(core("--cpu-kernels", lowest, FAKED_CORE="Prescott"),
                         "Nehalem" if lowest == "x86-64-v2" else "Prescott")


if __name__ == "__main__":
    main()
