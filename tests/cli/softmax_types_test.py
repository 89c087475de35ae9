#!/usr/bin/env python3
"""--softmax-type off-by-one: a score of zero beside the keys gives other losses than none, and the same
ones in every layout.

Usage: softmax_types_test.py TROUPE SOURCE_FOLDER
"""

import sys
import pathlib
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, metrics, run, write_config, write_corpus

TP, CP = "--tensor-model-parallel-size", "--context-parallel-size"


def setUpModule():
    write_config()
    write_corpus(8, 60)


class SoftmaxTypes(unittest.TestCase):
    def losses(self, name, *flags):
        save = HERE.folder / name
        done = run("train", "--model", HERE.folder / "config.json", "--data-path",
                   HERE.folder / "corpus", "--seq-length", 32, "--lr", "1e-2", "--train-iters", 3,
                   "--global-batch-size", 2, "--compute-dtype", "fp64", "--threads", 1, "--save",
                   save, *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [line["loss"] for line in metrics(save) if "loss" in line]

    def test_off_by_one(self):
        one = self.losses("one", "--softmax-type", "off-by-one")
        vanilla = self.losses("vanilla")
        self.assertEqual(len(one), 3)
        self.assertNotAlmostEqual(one[0], vanilla[0], delta=1e-9)
        for name, ranks in (("tp", (TP, 2)), ("cp", (CP, 2)),
                            ("a2a", (CP, 2, "--cp-comm-type", "a2a"))):
            with self.subTest(layout=name):
                found = self.losses(name, "--softmax-type", "off-by-one", "--ranks", 2, *ranks)
                for expected, loss in zip(one, found, strict=True):
                    self.assertAlmostEqual(expected, loss, delta=1e-9)

    def test_with_latent_attention_it_is_refused(self):
        done = run("plan", "--num-layers", 1, "--hidden-size", 32, "--num-attention-heads", 4,
                   "--vocab-size", 64, "--seq-length", 8, "--max-position-embeddings", 8,
                   "--multi-latent-attention", "--disable-bias-linear", "--softmax-type", "off-by-one")
        self.assertEqual(done.returncode, 2, done.stdout)
        self.assertIn("zero_attention_sinks", done.stderr)


if __name__ == "__main__":
    main()
