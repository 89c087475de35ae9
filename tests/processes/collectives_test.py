#!/usr/bin/env python3
"""Every collective between processes against threads (collectives.cc)."""

import unittest

from processes_test_support import HERE, Launcher, left_behind, main


class Collectives(unittest.TestCase):
    def check(self, processes, launcher=None):
        launcher = launcher or HERE.launcher
        result = launcher.run(processes, HERE.programs / "processes_collectives")
        self.assertEqual(result.returncode, 0, result.stderr_text)
        self.assertEqual(result.stderr_text, "")
        self.assertEqual(left_behind(result.mark), [], "processes are left behind")

    def test_two(self):
        self.check(2)

    def test_three(self):
        self.check(3)

    def test_four(self):
        self.check(4)

    def test_started_by_srun(self):  # only torchrun
        self.check(3, Launcher("srun"))

    def test_started_by_hand(self):  # only torchrun
        self.check(3, Launcher("hand"))


if __name__ == "__main__":
    main()
