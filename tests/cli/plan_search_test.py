#!/usr/bin/env python3
"""`troupe plan --gpus ... --search`: the winner's figures are those that plan gives of the file that it
writes, pinned flags stay, and what cannot be is answered with the nearest that can.

Usage: plan_search_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import re
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, interrupt, main, run

CASE = ["--model", "quickstart", "--seq-length", 128, "--bf16"]
BATCH = ["--global-batch-size", 64]


def search(*flags, gpus="8xh100"):
    return run("plan", *CASE, "--gpus", gpus, "--search", *flags)


class PlanSearch(unittest.TestCase):
    def check_winner(self, *flags):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "best.toml"
            result = search(*BATCH, "--json", "--search-output", path, *flags)
            self.assertEqual(result.returncode, 0, result.stderr)
            found = json.loads(result.stdout)
            planned = run("plan", "--gpus", "8xh100", "--config", path, "--json")
            self.assertEqual(planned.returncode, 0, planned.stderr)
            document = json.loads(planned.stdout)
            trained = run("train", "--config", path, "--mock-data", "--train-iters", 1,
                          "--lr", 1e-3, "--device", "cpu", "--ranks", 8, "--no-save")
            self.assertEqual(trained.returncode, 0, trained.stderr)
        best = found["best"][0]
        self.assertEqual(best["bytes"], document["needed_bytes"])
        self.assertAlmostEqual(best["tokens_per_s_per_gpu"],
                               document["verdict"]["tokens_per_s_per_gpu"],
                               delta=1e-9 * best["tokens_per_s_per_gpu"])
        self.assertEqual(best["limit"], document["verdict"]["limit"])
        return found

    def test_the_winner_is_what_plan_says_of_its_file(self):
        self.check_winner()

    def test_so_is_one_of_a_long_pipeline_with_many_micro_batches(self):
        found = self.check_winner("--pipeline-model-parallel-size", 4, "--micro-batch-size", 1)
        for entry in found["best"]:
            self.assertNotIn("pipeline-model-parallel-size", entry["flags"])
            self.assertNotIn("micro-batch-size", entry["flags"])

    def test_a_table_of_80_columns_and_what_loses(self):
        result = search(*BATCH, "--search-top", 2)
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stdout.splitlines()
        self.assertLessEqual(max(map(len, lines)), 80, result.stdout)
        ranks = [line[:2] for line in lines if re.match(r" \d (TP|CP|PP|EP|DP)", line)]
        self.assertEqual(ranks, [" 1", " 2"])
        self.assertIn("Instead of the first, all else the same", lines)
        self.assertIn("TP instead of EP", result.stdout)

    def test_nothing_fits(self):
        h100 = (HERE.source / "configs/gpus/h100.toml").read_text()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "small.toml"
            path.write_text(re.sub(r"memory_gib = [\d.]+", "memory_gib = 1", h100))
            large = [*BATCH, "--num-experts", 64, "--moe-ffn-hidden-size", 16384]
            result = search(*large, gpus=f"8x{path}")
            as_json = search(*large, "--json", gpus=f"8x{path}")
        self.assertEqual(as_json.returncode, 3, as_json.stderr)
        found = json.loads(as_json.stdout)
        self.assertGreater(found["nearest"]["bytes"], 1 << 30)
        self.assertTrue(found["nearest"]["flags"])
        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
        for words in ("Nothing fits. The nearest, ", "What makes the"):
            self.assertIn(words, re.sub(r"\s+", " ", result.stdout))

    def test_what_it_must_be_told(self):
        for flags, words in ((["--search"], "--gpus"),
                             (["--search", "--gpus", "8xh100"], "--global-batch-size N: 64")):
            result = run("plan", *CASE, *flags)
            self.assertEqual(result.returncode, 2, result.stdout)
            self.assertIn(words, result.stderr)

    def test_an_interrupt_ends_the_search_with_what_it_has(self):
        ended = interrupt("plan", *CASE, *BATCH, "--gpus", "64xh100", "--search", "--json")
        self.assertEqual(ended.returncode, 130, ended.stderr)
        self.assertTrue(json.loads(ended.stdout)["interrupted"])

    def test_files_that_are_not_replaced(self):
        with tempfile.TemporaryDirectory() as folder:
            mine = pathlib.Path(folder) / "mine.toml"
            mine.write_text("bf16 = true\n")
            for path, words in ((mine, "no result of a search"),
                                (pathlib.Path(folder) / "best.txt", "ends with .toml"),
                                (pathlib.Path(folder) / "no" / "best.toml", "no such folder")):
                result = search(*BATCH, "--search-output", path)
                self.assertEqual(result.returncode, 2, result.stdout)
                self.assertIn(words, re.sub(r"\s+", " ", result.stderr))
            self.assertEqual(mine.read_text(), "bf16 = true\n")


if __name__ == "__main__":
    main()
