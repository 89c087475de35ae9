#!/usr/bin/env python3
"""Training on samples of several documents with attention within each: the same in every layout, in
evaluations and after going on.

Usage: documents_test.py TROUPE SOURCE_FOLDER
"""

import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, metrics, run, write_config, write_corpus

WITHIN = "--reset-attention-mask"
SEQUENCE = 32


def setUpModule():
    write_config(max_position_embeddings=SEQUENCE)
    write_corpus(400, 2)  # most samples have several documents


class Documents(unittest.TestCase):
    def train(self, name, *flags):
        return run("train", "--model", HERE.folder / "config.json", "--data-path",
                   HERE.folder / "corpus", "--seq-length", SEQUENCE, "--lr", "1e-3",
                   "--lr-decay-style", "constant", "--global-batch-size", 8, "--micro-batch-size",
                   2, "--train-iters", 3, "--compute-dtype", "fp64", "--split", "80,20,0",
                   "--eval-interval", 3, "--eval-iters", 2, "--save", HERE.folder / name, "--quiet",
                   *flags)

    def lines(self, name, *flags):
        done = self.train(name, *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return metrics(HERE.folder / name)

    def test_every_layout_sees_the_same_documents(self):
        one = self.lines("one", WITHIN)
        across = self.lines("across")
        self.assertGreater(abs(across[1]["loss"] - one[1]["loss"]), 1e-6)
        layouts = {
            "tp": ("--tensor-model-parallel-size", 2, "--sequence-parallel"),
            "p2p": ("--context-parallel-size", 2, "--cp-comm-type", "p2p"),
            "a2a": ("--context-parallel-size", 2, "--cp-comm-type", "a2a"),
            "allgather": ("--context-parallel-size", 2, "--cp-comm-type", "allgather"),
            "pp": ("--pipeline-model-parallel-size", 2, "--recompute-granularity", "full",
                   "--recompute-method", "uniform", "--recompute-num-layers", 1),
        }
        for name, flags in layouts.items():
            with self.subTest(layout=name):
                ranks = self.lines(name, WITHIN, "--ranks", 2, *flags)
                self.assertEqual(len(one), len(ranks))
                for here, there in zip(one, ranks):
                    for number in ("loss", "grad_norm", "val_loss"):
                        self.assertEqual(number in here, number in there)
                        if number in here:
                            # The order of sums differs: rounding of f64, over three steps.
                            self.assertAlmostEqual(here[number], there[number], delta=1e-10)

    def test_eval_does_as_the_run_did(self):
        trained = [line["val_loss"] for line in self.lines("evaluated", WITHIN) if "val_loss" in line]
        done = run("eval", "--load", HERE.folder / "evaluated", "--data-path",
                   HERE.folder / "corpus", "--compute-dtype", "fp64")
        self.assertEqual(done.returncode, 0, done.stderr)
        printed = re.search(r"validation loss ([0-9.]+)", done.stdout)[1]
        self.assertEqual(printed, f"{trained[-1]:.4f}")

    def test_going_on_without_it_is_another_run(self):
        self.lines("resumed", WITHIN)
        done = self.train("resumed", "--load", HERE.folder / "resumed", "--train-iters", 4)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Warning: changed since the checkpoint: --reset-attention-mask true -> false",
                      done.stderr)

    def test_every_command_that_builds_the_step_takes_it(self):
        shape = ("--model", HERE.folder / "config.json", "--seq-length", SEQUENCE, WITHIN)
        for command in ("plan", "inspect", "bench"):
            with self.subTest(command=command):
                done = run(command, *shape)
                self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(run("inspect", *shape, "--layer", 0).stdout,
                         r"attention\(qkv_rotated, qkv_rotated, -, starts\)")
        done = run("train", *shape, "--mock-data", "--lr", "1e-3", "--train-iters", 2,
                   "--lr-decay-style", "constant")
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    main()
