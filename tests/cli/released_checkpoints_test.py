#!/usr/bin/env python3
"""Runs of released versions (tests/fixtures/releases) go on in this one: their checkpoints load, with
every bit of the weights, and the next step has the loss that it had; their file of options is
taken, and their metrics are shown.

Usage: released_checkpoints_test.py TROUPE SOURCE_FOLDER
"""

import hashlib
import json
import pathlib
import shutil
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, metrics, run


class Released(unittest.TestCase):
    def each_release(self):
        folders = sorted((HERE.source / "tests/fixtures/releases").iterdir())
        self.assertTrue(folders)
        for folder in folders:
            with self.subTest(folder.name):
                yield folder, HERE.folder / f"{self.id().rsplit('.', 1)[-1]}-{folder.name}"

    def test_weights_are_those_that_were_saved(self):
        for folder, work in self.each_release():
            done = run("convert", "--load", folder, "--save", work)
            self.assertEqual(done.returncode, 0, done.stderr)
            weights = (work / "model.safetensors").read_bytes()
            expected = json.loads((folder / "expected.json").read_text())["exported_sha256"]
            self.assertEqual(hashlib.sha256(weights).hexdigest(), expected)

    def test_training_goes_on(self):
        for folder, work in self.each_release():
            # One rank instead of two reads other slices.
            for ranks in (2, 1):
                save = work / str(ranks)
                shutil.copytree(folder, save, ignore=shutil.ignore_patterns("metrics.jsonl"))
                done = run("train", "--config", save / "options.toml", "--load", save, "--save", save,
                           "--ranks", ranks, "--expert-model-parallel-size", ranks)
                self.assertEqual(done.returncode, 0, done.stderr)
                losses = {line["step"]: line["loss"] for line in metrics(save) if "loss" in line}
                self.assertEqual(sorted(losses), [4, 5])
                before = next(line["loss"] for line in metrics(folder) if line.get("step") == 4)
                # fp32 sums of about a hundred terms in another order: 100 x 2^-24 = 6e-6.
                self.assertLess(abs(losses[4] / before - 1), 6e-6)

    def test_metrics_are_shown(self):
        for folder, work in self.each_release():
            done = run("report", folder, "--output", work.with_suffix(".html"))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("5", done.stdout)


if __name__ == "__main__":
    main()
