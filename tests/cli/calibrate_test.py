#!/usr/bin/env python3
"""`bench --calibrate`: the file that it writes is one for `plan --gpus` and `train --hardware`; it is
written whole or not at all, and replaces nothing but an earlier one.

Usage: calibrate_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import re
import sys
import tomllib
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, interrupt, json_in_form, main, run

MODEL = ["--model", "mixtral-tiny", "--seq-length", 32]


class Calibrate(unittest.TestCase):
    def test_the_file_is_one_for_plan_and_train(self):
        path = HERE.folder / "mine.toml"
        measured = run("bench", "--calibrate", path, "--threads", 2)
        self.assertEqual(measured.returncode, 0, measured.stderr)
        self.assertIn("2048 x 2048", measured.stdout)
        self.assertLess(max(map(len, measured.stdout.splitlines()[:-1])), 80)
        written = tomllib.loads(path.read_text())
        shown = re.search(r"between operations ([0-9.]+) us", measured.stdout)[1]
        # Two digits after the point there, four digits in the file.
        self.assertAlmostEqual(float(shown), written["launch_us"],
                               delta=0.005 + 5e-4 * written["launch_us"])
        plan = run("plan", *MODEL, "--gpus", f"2x{path}", "--json")
        self.assertEqual(plan.returncode, 0, plan.stderr)
        self.assertEqual(plan.stderr, "", "a CPU has no kernels to be warned of")
        self.assertGreater(json.loads(plan.stdout)["time"]["seconds"], 0)
        folder = HERE.folder / "run"
        train = run("train", *MODEL, "--mock-data", "--train-iters", 2, "--lr", 1e-3, "--save",
                    folder, "--hardware", path, "--threads", 2)
        self.assertEqual(train.returncode, 0, train.stderr)
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        planned = [line["planned_step_time_s"] for line in lines if "loss" in line]
        self.assertEqual(len(planned), 2)
        self.assertGreater(planned[0], 0)

        self.assertNotIn("collectives", path.read_text(), "one rank has no links")
        again = run("bench", "--calibrate", path, "--threads", 2, "--ranks", 2, "--json")
        self.assertEqual(again.returncode, 0, "an earlier result is replaced: " + again.stderr)
        document, plain, formed = json_in_form(again.stdout, indent=2)
        self.assertEqual(plain, formed)
        self.assertEqual(len(document["products"]), 12)
        self.assertEqual(len(document["within_machine"]["collectives"]), 9)
        self.assertNotIn("across_machines", document)
        self.assertEqual(document["file"], str(path))
        self.assertEqual(path.read_text().count("# measured: collectives of 2 ranks"), 2)
        self.assertGreater(tomllib.loads(path.read_text())["nvlink_gb_s"], 0.1)

    def test_an_interrupt_leaves_nothing(self):
        path = HERE.folder / "interrupted.toml"
        ended = interrupt("bench", "--calibrate", path)
        self.assertEqual(ended.returncode, 130, ended.stderr)
        self.assertIn("Interrupted; nothing was written.", ended.stderr)
        self.assertEqual(list(HERE.folder.glob("interrupted*")), [])

    def test_files_that_it_must_not_write(self):
        other = HERE.folder / "other.toml"
        other.write_text("name = 1\n")
        for path, word in ((other, "no result of a calibration"),
                           (HERE.folder / "mine.txt", ".toml"),
                           (HERE.folder / "none" / "mine.toml", "no such folder")):
            refused = run("bench", "--calibrate", path)
            self.assertEqual(refused.returncode, 2, refused.stderr)
            self.assertIn(word, refused.stderr)
        self.assertEqual(other.read_text(), "name = 1\n")


if __name__ == "__main__":
    main()
