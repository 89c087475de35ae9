#!/usr/bin/env python3
"""Training with sparse attention whose indexer learns: metrics.jsonl has the indexer's loss of each layer
and its mean, the same on one rank and on two.

Usage: sparse_attention_test.py TROUPE SOURCE
"""
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, metrics, run

MODEL = ["--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 4, "--vocab-size", 272,
         "--multi-latent-attention", "--q-lora-rank", 16, "--kv-lora-rank", 16, "--qk-head-dim", 8,
         "--qk-pos-emb-head-dim", 8, "--v-head-dim", 8, "--num-experts", 4, "--moe-router-topk", 2,
         "--moe-ffn-hidden-size", 32, "--swiglu", "--disable-bias-linear", "--normalization",
         "RMSNorm", "--position-embedding-type", "rope", "--max-position-embeddings", 64,
         "--experimental-attention-variant", "dsa", "--dsa-indexer-topk", 8,
         "--dsa-indexer-n-heads", 2, "--dsa-indexer-head-dim", 16, "--attention-dropout", 0,
         "--hidden-dropout", 0, "--init-method-std", 0.3]
STEPS = 3


class SparseAttention(unittest.TestCase):
    def train(self, name, *flags):
        folder = HERE.folder / name
        done = run("train", *MODEL, "--mock-data", "--seq-length", 32, "--micro-batch-size", 2,
                   "--global-batch-size", 4, "--compute-dtype", "fp64", "--lr", "1e-3",
                   "--train-iters", STEPS, "--threads", 2, "--quiet", "--save", folder, *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [line for line in metrics(folder) if "loss" in line]

    def test_the_indexers_loss_is_logged_in_every_layout(self):
        learning = ["--dsa-indexer-loss-coeff", 0.1]
        one = self.train("one", *learning)
        self.assertEqual(len(one), STEPS)
        for line in one:
            layers = [each["indexer_loss"] for each in line["indexers"]]
            self.assertEqual([each["layer"] for each in line["indexers"]], [0, 1])
            self.assertGreater(min(layers), 0)
            self.assertAlmostEqual(line["indexer_loss"], sum(layers) / 2, places=12)
        for name, flags in (("data", ["--ranks", 2]),
                            ("tensors", ["--ranks", 2, "--tensor-model-parallel-size", 2,
                                         "--sequence-parallel"]),
                            ("stages", ["--ranks", 2, "--pipeline-model-parallel-size", 2])):
            with self.subTest(layout=name):
                for line, expected in zip(self.train(name, *learning, *flags), one, strict=True):
                    # fp64 sums in another order.
                    self.assertAlmostEqual(line["indexer_loss"], expected["indexer_loss"], 
                                           delta=1e-9 * expected["indexer_loss"])
                    self.assertEqual(len(line["indexers"]), 2)

    def test_without_a_coefficient_there_is_none(self):
        for line in self.train("plain"):
            self.assertNotIn("indexers", line)
            self.assertNotIn("indexer_loss", line)


if __name__ == "__main__":
    main()
