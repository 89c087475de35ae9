#!/usr/bin/env python3
"""Commands other than train and verify on several processes: they print once, and what they
compute is what threads compute."""

import json

from mpi_test_support import (FOLDED, HERE, PROCESSES, ProcessesTest, main, metrics,
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
        errors = self.launch(3, *self.bench("--hidden-size", 1 << 18, "--num-layers", 8),
                             processes=2).stderr_text
        self.assertEqual(errors.count("troupe: The run needs"), 1, errors)
        self.assertIn("for 2 ranks", errors)
        self.assertIn("  parameters", errors)

    def test_train_writes_timelines(self):
        save, folder = HERE.folder / "profiled", HERE.folder / "train_profile"
        result = self.launch(0, *train_arguments(
            save, *FOLDED, "--train-iters", 3, "--profile", "--profile-step-start", 1,
            "--profile-step-end", 2, "--profile-ranks", 3, 0, "--profile-dir", folder))
        self.assertEqual(sorted(path.name for path in folder.iterdir()),
                         ["rank0_step2.json", "rank3_step2.json", "ranks_step2.json"])
        self.assertEqual(result.stderr_text.count("operation kind"), 2, "a table of each rank")
        self.assertEqual(metrics(save)[-1]["step"], 3)


if __name__ == "__main__":
    main()
