#!/usr/bin/env python3
"""Commands other than train and verify on several processes: they print once, and what they
compute is what threads compute."""

import json
import os
import subprocess

from processes_test_support import (FOLDED, HERE, PROCESSES, ProcessesTest, main, metrics, run,
                              train_arguments)


class Commands(ProcessesTest):
    def bench(self, *flags):
        return ["bench", "--model", HERE.folder / "config.json", "--seq-length", 16, "--threads", 2,
                *flags]

    def test_bench(self):
        folder = HERE.folder / "bench_profile"
        result = self.launch(0, *self.bench(*FOLDED, "--json", "--profile", "--profile-dir",
                                            folder))
        found = json.loads(result.stdout_text)  # one document: one rank speaks
        self.assertEqual(found["ranks"], PROCESSES)
        self.assertEqual(found["allocated_bytes_of_ranks"], found["planned_bytes_of_ranks"])
        self.assertGreater(found["communication_s"], 0)
        self.assertEqual(sorted(path.name for path in folder.iterdir()),
                         [*(f"rank{rank}_step1.json" for rank in range(PROCESSES)),
                          "ranks_step1.json"])
        events = json.loads((folder / "ranks_step1.json").read_text())["traceEvents"]
        self.assertEqual({event["pid"] for event in events}, set(range(PROCESSES)))

    def test_bench_refuses_what_does_not_fit(self):
        errors = self.launch(3, *self.bench("--hidden-size", 1 << 18, "--num-layers", 99),
                             processes=2).stderr_text
        self.assertEqual(errors.count("troupe: The run needs"), 1, errors)
        self.assertIn("for 2 ranks", errors)
        self.assertIn("  parameters", errors)

    def check_same(self, *arguments):
        threads = run(*arguments, "--ranks", PROCESSES)
        self.assertEqual(threads.returncode, 0, threads.stderr)
        self.assertEqual(self.launch(0, *arguments).stdout_text, threads.stdout)

    def test_eval_and_generate(self):  # only torchrun
        save = HERE.folder / "trained"
        result = run(*train_arguments(save, "--train-iters", 2))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.check_same("eval", "--load", save, "--data-path", HERE.folder / "corpus", "--split",
                        "90,10,0", "--eval-iters", 6, "--threads", 2, "--json", *FOLDED)
        self.check_same("generate", "--load", save, "--prompt", "the river", "--max-new-tokens", 8,
                        "--seed", 3, "--threads", 2, "--json", "--tensor-model-parallel-size", 2,
                        "--expert-model-parallel-size", 4, "--expert-tensor-parallel-size", 1)

    # As another MPI's launcher than this build's would leave it.
    def test_processes_that_mpi_does_not_join_are_refused(self):  # only mpirun
        environment = {**os.environ, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
        result = subprocess.run([HERE.troupe, *map(str, self.bench())], stdin=subprocess.DEVNULL,
                                capture_output=True, text=True, check=False, env=environment)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("OMPI_COMM_WORLD_RANK=1 of OMPI_COMM_WORLD_SIZE=2 is set", result.stderr)

    def test_train_writes_timelines(self):  # only torchrun
        save, folder = HERE.folder / "profiled", HERE.folder / "train_profile"
        result = self.launch(0, *train_arguments(
            save, *FOLDED, "--train-iters", 3, "--profile", "--profile-step-start", 1,
            "--profile-step-end", 2, "--profile-ranks", 3, 0, "--profile-dir", folder))
        self.assertEqual(sorted(path.name for path in folder.iterdir()),
                         ["rank0_step2.json", "rank3_step2.json", "ranks_step2.json"])
        self.assertEqual(result.stderr_text.count("operation kind"), 2, "a table of each rank")
        self.assertEqual(metrics(save)[-1]["step"], 3)

    def test_a_timeline_that_one_rank_cannot_write_ends_nothing(self):  # only torchrun
        folder = HERE.folder / "blocked"
        (folder / "rank2_step2.json").mkdir(parents=True)
        save = HERE.folder / "blocked_run"
        errors = self.launch(0, *train_arguments(
            save, "--quiet", "--train-iters", 4, "--profile", "--profile-step-start", 1,
            "--profile-step-end", 2, "--profile-ranks", 0, 2, "--profile-dir",
            folder)).stderr_text
        warning = "Warning: the timeline of step 2 could not be written: "
        self.assertEqual(errors.count(warning), 1, errors)
        self.assertRegex(errors, f"{warning}.*rank2_step2.json")
        # Rank 0 has written its own, and all have trained on.
        self.assertTrue(json.loads((folder / "rank0_step2.json").read_text())["traceEvents"])
        self.assertEqual(metrics(save)[-1]["step"], 4)
        # Who asks bench for timelines and gets none has been told so by the status.
        (folder / "rank1_step1.json").mkdir()
        errors = self.launch(1, *self.bench("--profile", "--profile-dir", folder)).stderr_text
        self.assertEqual(errors.count("troupe: "), 1, errors)
        self.assertIn("rank1_step1.json", errors)


if __name__ == "__main__":
    main()
