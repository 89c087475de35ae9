#!/usr/bin/env python3
"""What the environment says of other processes: where a process cannot join them, it is refused, as
each would believe to be the whole run. (tests/processes has those that join.)

Usage: launchers_test.py TROUPE SOURCE_FOLDER
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

TROUPE = ""
SHAPE = ["--model", "quickstart", "--seq-length", "16", "--num-layers", "1"]


def run(environment, *arguments, program=None):
    clean = {name: value for name, value in os.environ.items()
             if not name.startswith(("OMPI_", "PMI", "SLURM_", "MASTER_", "TORCHELASTIC_"))}
    return subprocess.run([program or TROUPE, *arguments], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, check=False, env={**clean, **environment})


class Launchers(unittest.TestCase):
    def check_refused(self, environment, *phrases, arguments=("bench", *SHAPE)):
        result = run(environment, *arguments)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertEqual(result.stdout, "")
        self.assertEqual(result.stderr.count("troupe: "), 1, result.stderr)
        for phrase in phrases:
            self.assertIn(phrase, result.stderr)

    def check_runs(self, environment, *arguments):
        result = run(environment, *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_ranks_without_a_place_to_meet(self):
        torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}
        self.check_refused(torchrun, "RANK=3 of WORLD_SIZE=4 is set", "MASTER_ADDR and MASTER_PORT")
        # Also where the ranks are to be threads: there would be four such runs.
        self.check_refused(torchrun, "RANK=3 of WORLD_SIZE=4",
                           arguments=("bench", *SHAPE, "--ranks", "4"))
        self.check_refused({**torchrun, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
                           "MASTER_PORT")
        self.check_refused({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost",
                            "MASTER_PORT": "29500"},
                           "RANK=4 is set", "WORLD_SIZE=4, a rank is a number from 0 to 3")
        # One process is what it believes to be.
        self.check_runs({"RANK": "0", "WORLD_SIZE": "1"}, "bench", *SHAPE)
        # Commands that have no ranks work anywhere.
        self.check_runs(torchrun, "plan", *SHAPE)
        self.check_runs(torchrun, "doctor")
        self.check_runs({**torchrun, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, "train",
                        "--help")

    def test_srun(self):
        step = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2",
                "SLURM_STEP_NUM_TASKS": "2"}
        self.check_refused(step, "SLURM_PROCID=1 of SLURM_STEP_NUM_TASKS=2 is set",
                           "SLURM_STEP_NODELIST")
        # In the script of a job of two tasks, outside of a step.
        self.check_runs({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "bench", *SHAPE)
        # mpirun says itself that it has started one process.
        self.check_runs({**step, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, "bench",
                        *SHAPE)

    def test_mpirun_without_mpi(self):
        # The libraries that know MPI lie beside the program, and are not there.
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "bin", "troupe")
            program.parent.mkdir()
            shutil.copy(TROUPE, program)
            result = run({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "bench", *SHAPE,
                         program=program)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn("MPI cannot be loaded: this build has none", " ".join(result.stderr.split()))
            found = run({}, "doctor", "--json", program=program)
            self.assertIsNone(json.loads(found.stdout)["mpi"], found.stdout)


def main():
    global TROUPE
    TROUPE = sys.argv[1]
    unittest.main(argv=[sys.argv[0]])


if __name__ == "__main__":
    main()
