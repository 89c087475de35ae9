#!/usr/bin/env python3
"""`train --hardware`: steps are compared with the time that `plan --gpus` plans for them, and a run that
is much slower says so once, with the operations that take longer.

On a CPU the figures of a GPU plan steps that are far too fast, those of a file as slow ones as one
likes, so neither case depends on this machine.

Usage: planned_time_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, run

STEP = ["--model", "mixtral-tiny", "--seq-length", 32, "--micro-batch-size", 1,
        "--global-batch-size", 4]
# Flags, and by how much the time may be off: a CPU's memory plan takes no heed of queues, so that
# operations may wait for those of others that use their memory.
LAYOUTS = {"one": ([], 1e-9), "pipeline": (["--pipeline-model-parallel-size", 2], 1e-9),
           "experts": (["--expert-model-parallel-size", 2], 0.1),
           "overlap": (["--expert-model-parallel-size", 2, "--use-megatron-fsdp",
                        "--overlap-param-gather", "--overlap-grad-reduce"], 0.1)}


class PlannedTime(unittest.TestCase):
    def train(self, name, *flags, steps=2):
        folder = HERE.folder / name
        result = run("train", *STEP, "--mock-data", "--train-iters", steps, "--lr", 1e-3,
                     "--save", folder, *flags)
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return result.stderr, [line for line in map(json.loads, lines) if "loss" in line]

    def write_part(self, ranks):
        """What a rank gets of an H200 that is shared as a CPU is."""
        text = (HERE.source / "configs/gpus/h200.toml").read_text()
        for key in ("bf16_tflops", "fp32_tflops", "fp64_tflops", "memory_gb_s", "host_gb_s"):
            text = re.sub(rf"{key} = ([\d.]+)", lambda found: f"{key} = {float(found[1]) / ranks}",
                          text)
        path = HERE.folder / f"part_of_{ranks}.toml"
        path.write_text(text)
        return path

    def test_the_planned_time_is_that_of_plan(self):
        for name, (layout, tolerance) in LAYOUTS.items():
            with self.subTest(name):
                ranks = 1 if name == "one" else 2
                part = self.write_part(ranks)
                plan = run("plan", *STEP, *layout, "--gpus", f"{ranks}x{part}", "--json",
                           "--moe-expert-rank-capacity-factor", 0)
                seconds = json.loads(plan.stdout)["time"]["seconds"]
                _, steps = self.train(name, *layout, "--ranks", ranks, "--hardware", "h200")
                for step in steps:
                    self.assertAlmostEqual(step["planned_step_time_s"], seconds,
                                           delta=tolerance * seconds)

    def test_a_slow_run_says_where_once(self):
        for name, ranks in (("slow", 1), ("slow_ranks", 2)):
            error, _ = self.train(name, "--ranks", ranks, "--hardware", "h100", steps=50)
            warnings = [line for line in error.splitlines() if "planned for" in line]
            self.assertEqual(len(warnings), 1, error)
            self.assertRegex(warnings[0], r"step 23: the last 20 steps took .* % more than the .* "
                                          r"planned for NVIDIA H100 SXM 80 GB. On rank 0: \w+ .* "
                                          r"instead of ")
            self.assertIn("x planned time", error)

    def test_a_run_as_fast_as_planned_says_nothing(self):
        text = (HERE.source / "configs/gpus/h100.toml").read_text()
        for key, value in {"bf16_tflops": 0.1, "fp32_tflops": 0.1, "memory_gb_s": 1,
                           "launch_us": 1e5}.items():
            text = re.sub(rf"{key} = [\d.]+", f"{key} = {value}", text)
        path = HERE.folder / "slow.toml"
        path.write_text(text)
        error, steps = self.train("fast", "--hardware", path, steps=30)
        self.assertNotIn("planned for", error)
        self.assertGreater(steps[-1]["planned_step_time_s"], 1)

    def test_nothing_is_planned_without_figures(self):
        for name, flags in (("default", []), ("none", ["--hardware", "none"]),
                            ("oracle", ["--hardware", "h100", "--oracle"])):
            error, steps = self.train(name, *flags)
            self.assertNotIn("planned time", error)
            self.assertNotIn("planned_step_time_s", steps[-1])

    def test_figures_may_change_when_a_run_goes_on(self):
        self.train("going_on", "--exit-interval", 1)
        error, steps = self.train("going_on", "--load", HERE.folder / "going_on", "--hardware",
                                  "h100")
        self.assertNotIn("changed since", error)
        self.assertNotIn("planned_step_time_s", steps[0])
        self.assertIn("planned_step_time_s", steps[1])

    def test_figures_that_are_not_there(self):
        for value, words in (("h10", ("Did you mean --hardware h100?",)),
                             ("none.toml", ("configs/gpus/h100.toml",))):
            result = run("train", *STEP, "--mock-data", "--train-iters", 1, "--lr", 1e-3,
                         "--hardware", value, "--no-save")
            self.assertEqual(result.returncode, 2, result.stderr)
            for word in ("--hardware", *words):
                self.assertIn(word, result.stderr)


if __name__ == "__main__":
    main()
