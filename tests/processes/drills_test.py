#!/usr/bin/env python3
"""Faults on purpose (drills.cc): each ends all processes, with the right message and status."""

import os
import pathlib
import re
import signal
import time
import unittest

from processes_test_support import HERE, left_behind, main, marked

FIRST = "operation 0 (prefix_sum), layer 2, micro-batch 1"
LAST = "operation 2 (all_reduce), layer 2, micro-batch 1"
PLACE = r" \[[^],]+, process \d+\]"  # of a rank: the host's name, and the process


def waited_for(state):
    """A message about rank 1. The rank that waits longest says it; on a busy machine others may be late,
    too, and are named beside it."""
    return re.compile(re.escape(f"in {FIRST}, waiting for: ") +
                      r"(rank \d [^(]*\([^)]*\)[^)]*\), )*rank 1" + PLACE +
                      re.escape(f" ({state}, last seen in {LAST})"))


class Drills(unittest.TestCase):
    def check(self, fault, status, *messages, absent=()):
        result = HERE.launcher.run(3, HERE.programs / "processes_drills", fault)
        errors = result.stderr_text
        self.assertEqual(left_behind(result.mark), [], "processes are left behind")
        self.assertEqual(result.returncode, status, errors)
        for message in messages:
            if isinstance(message, str):
                self.assertIn(message, errors)
            else:
                self.assertRegex(errors, message)
        for message in absent:
            self.assertNotIn(message, errors)
        ours = [line for line in errors.splitlines() if line.startswith("troupe: ")]
        self.assertEqual(len(ours), 1 if messages else 0, errors)

    def test_none(self):
        self.check("none", 0)

    def test_delayed_rank(self):  # only torchrun
        self.check("delayed", 1, "timed out (3 s)", waited_for("is missing"))

    def test_stopped_rank(self):
        self.check("stopped", 1, waited_for("is missing"))

    def test_stopped_rank_behind_another(self):
        self.check("stopped_behind_another", 1, re.compile(
            rf"Rank (0 .* for: rank 2{PLACE} \(waits itself in no operation, for rank 1\), "
            rf"rank 1{PLACE}|2 .* for: rank 1{PLACE}) \(is missing, last seen in operation 2 "))

    def test_rank_that_is_stopped_between_steps(self):
        self.check("stopped_between_steps", 1,
                   re.compile(f"in no operation, waiting for: rank 1{PLACE} " +
                              re.escape(f"(does not answer, last seen in {LAST})")))

    def test_rank_with_a_slow_disk_is_waited_for(self):
        self.check("slow_between_steps", 0)

    def test_killed_rank(self):
        # mpirun notices before anybody can speak.
        self.check("killed", HERE.launcher.killed_status, *([] if HERE.launcher.is_mpi else [
            re.compile(f"troupe: Rank 1{PLACE} has ended without a word, last seen in " +
                       re.escape(LAST))]))

    def test_killed_first_rank(self):
        self.check("first_killed", HERE.launcher.killed_status, *([] if HERE.launcher.is_mpi else [
            re.compile(f"troupe: Rank 0{PLACE} has ended without a word, last seen in " +
                       re.escape(LAST))]))

    def test_rank_that_exits(self):
        result = HERE.launcher.run(3, HERE.programs / "processes_drills", "gone")
        # MPICH's launcher ends the others, then at times with the status 0 of the one that left (its
        # issue 7057).
        if HERE.launcher.name != "mpirun.mpich":
            self.assertNotEqual(result.returncode, 0)
        if not HERE.launcher.is_mpi:
            self.assertRegex(result.stderr_text, f"Rank 1{PLACE} has ended without a word")
        self.assertEqual(left_behind(result.mark), [])

    def test_rank_that_throws(self):
        self.check("throws", 1, "troupe: the disk of rank 1 is full.")

    def test_rank_that_refuses(self):
        self.check("refuses", 2, "troupe: rank 1 has no such file.")

    def test_all_refuse(self):
        self.check("all_refuse", 2, "troupe: no rank has such a file.")

    def test_rank_that_ends_early(self):
        self.check("ends_early", 1, waited_for("has ended"))

    def test_mismatched_size(self):
        self.check("other_size", 1, "do not run the same collective",
                   re.compile(f"rank 0{PLACE} is in {re.escape(LAST)} of f64 .7., "
                              f"rank 1{PLACE} in {re.escape(LAST)} of f64 .8."))

    def test_collective_left_out(self):
        self.check("left_out", 1, "do not run the same collective",
                   re.compile(f"rank 0{PLACE} is in {re.escape(FIRST)}"),
                   re.compile(rf"rank 1{PLACE} in operation 0 \(all_reduce\)"))

    def test_step_that_ends_earlier(self):
        self.check("step_ends_earlier", 1,
                   re.compile(f"rank 0{PLACE} is in no operation, rank 1{PLACE} in " +
                              re.escape(FIRST)))

    def test_verifier_refuses_what_is_left_out_before_launch(self):
        self.check("left_out_and_verified", 3, "do not fit together", "rank 1 has no collective 0",
                   absent=["launched"])

    def test_verifier_refuses_mismatched_size_before_launch(self):
        self.check("other_size_and_verified", 3, "do not fit together", "f64 [7]", "f64 [8]",
                   absent=["launched"])

    def test_message_that_is_not_sent(self):  # only torchrun
        self.check("message_not_sent", 1, "timed out")

    def test_message_reaches_a_launcher_that_is_late(self):  # only mpich
        # It reads nothing while the message is written; some rank asks it then to end all.
        process = HERE.launcher.start(3, HERE.programs / "processes_drills", "message_not_sent")
        time.sleep(1)
        late = [pid for pid in marked(process.mark)
                if "proxy" in pathlib.Path(f"/proc/{pid}/comm").read_text()]
        for pid in late:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3.5)  # the ranks' limit is 3 s
        for pid in late:
            os.kill(pid, signal.SIGCONT)
        errors = process.communicate(timeout=60)[1]
        self.assertNotEqual(late, [])
        self.assertEqual(process.returncode, 1, errors)
        self.assertIn("timed out (3 s)", errors)
        self.assertEqual(left_behind(process.mark), [])

    def test_message_of_other_size(self):
        self.check("message_of_other_size", 1,
                   re.compile(rf"Rank 1{PLACE} sends f64 \[1\] in no operation, but "
                              rf"rank 0{PLACE} receives f64 \[2\]"))


if __name__ == "__main__":
    main()
