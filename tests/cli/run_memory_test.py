#!/usr/bin/env python3
"""A run whose batch grows holds the memory of one step at a time: that of the batch before is freed
before the next is taken.

Usage: run_memory_test.py TROUPE SOURCE
"""
import pathlib
import re
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(sys.argv[2]) / "tests" / "support"))
from program_runs import command, main  # noqa: E402

# Of a step: 100 MiB of activations and more, of 0.1 million parameters.
TRAIN = ["train", "--quiet", "--no-save", "--mock-data", "--vocab-size", "264", "--num-layers", "2",
         "--hidden-size", "64", "--num-attention-heads", "4", "--num-experts", "4",
         "--max-position-embeddings", "2048", "--seq-length", "2048", "--micro-batch-size", "4",
         "--threads", "1", "--lr", "1e-3", "--train-samples", "12", "--global-batch-size", "8"]
STEP_MIB = 100


class RunMemory(unittest.TestCase):
    def most_reserved_mib(self, *flags):
        """Of address space: what is reserved counts, though nothing may have touched it yet."""
        process = subprocess.Popen(command(*TRAIN, *flags), stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        most = 0
        status = pathlib.Path(f"/proc/{process.pid}/status")
        while process.poll() is None:  # the last step takes a second: its peak is seen
            peak = re.search(r"VmPeak:\s*(\d+) kB", status.read_text())
            most = int(peak[1]) if peak else most
            time.sleep(0.01)
        self.assertEqual(process.returncode, 0, process.stderr.read())
        process.stderr.close()
        return most / 1024

    def test_a_larger_batch_takes_its_memory_after_the_smaller_has_freed_its(self):
        constant = self.most_reserved_mib()
        self.assertGreater(constant, STEP_MIB)
        ramped = self.most_reserved_mib("--rampup-batch-size", "4", "4", "4")
        self.assertLess(ramped, constant + STEP_MIB / 2)


main()
