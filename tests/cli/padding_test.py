#!/usr/bin/env python3
"""Training on data with padding, which the routers' losses and loads can be without.

Usage: padding_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import shutil
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, metrics, run, write_config, write_corpus

IGNORE = "--moe-router-ignore-padding"
BATCH = 8
SEQUENCE = 32
TOP_K = 2


def tokenizer(folder):
    return ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", HERE.folder / folder)


def setUpModule():
    write_config(vocab_size=3072, max_position_embeddings=SEQUENCE)
    # A frequent token stands for padding.
    for folder, words in (("padding", {"pad_token": "Ġthe"}), ("none", {})):
        (HERE.folder / folder).mkdir()
        shutil.copy(HERE.source / "tests/fixtures/tokenizers/gpt2/tokenizer.json",
                    HERE.folder / folder)
        (HERE.folder / folder / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": "<|endoftext|>"} | words))
    write_corpus(60, 60, *tokenizer("padding"))


class Padding(unittest.TestCase):
    def train(self, name, *flags, tokens="padding"):
        return run("train", "--model", HERE.folder / "config.json", "--data-path",
                   HERE.folder / "corpus", *tokenizer(tokens), "--seq-length", SEQUENCE, "--lr",
                   "1e-3", "--lr-decay-style", "constant", "--global-batch-size", BATCH,
                   "--train-iters", 3, "--compute-dtype", "fp64", "--moe-z-loss-coeff", "0.001",
                   "--save", HERE.folder / name, "--quiet", *flags)

    def steps(self, name, *flags):
        """The lines of a run's steps."""
        done = self.train(name, *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [line for line in metrics(HERE.folder / name) if "loss" in line]

    def test_padding_is_in_losses_and_loads_unless_it_is_ignored(self):
        counted = self.steps("counted")[0]
        ignored = self.steps("ignored", IGNORE)[0]
        self.assertEqual(counted["loss"], ignored["loss"], "the model's loss never has padding")
        for loss in ("load_balancing_loss", "z_loss"):
            self.assertGreater(abs(counted[loss] - ignored[loss]), 1e-6, loss)
        everything = BATCH * SEQUENCE * TOP_K
        for layer in counted["experts"]:
            self.assertEqual(sum(layer["rows"]), everything)
        for layer in ignored["experts"]:
            self.assertLess(sum(layer["rows"]), everything)
            self.assertGreater(sum(layer["rows"]), everything / 2)
            self.assertEqual(sum(layer["rows"]), sum(ignored["experts"][0]["rows"]))
            self.assertEqual(layer["dropped"], 0, "padding is not dropped")

    def test_every_layout_leaves_out_the_same_tokens(self):
        bias = ("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid",
                "--micro-batch-size", 2)
        expected = self.steps("one", IGNORE, *bias)
        layouts = {
            "tp": ("--tensor-model-parallel-size", 2, "--sequence-parallel"),
            "cp": ("--context-parallel-size", 2),
            "pp": ("--pipeline-model-parallel-size", 2),
            "ep": ("--expert-model-parallel-size", 2),
        }
        for name, flags in layouts.items():
            with self.subTest(layout=name):
                steps = self.steps(name, IGNORE, *bias, "--ranks", 2, *flags)
                self.assertEqual(len(steps), len(expected))
                for one, ranks in zip(expected, steps):
                    for number in ("loss", "grad_norm", "load_balancing_loss", "z_loss"):
                        # The order of sums differs: rounding of f64, over three steps.
                        self.assertAlmostEqual(one[number], ranks[number], delta=1e-10)
                    for here, there in zip(one["experts"], ranks["experts"]):
                        self.assertEqual(here["rows"], there["rows"])
                        self.assertAlmostEqual(here["entropy"], there["entropy"], delta=1e-10)

    def test_without_a_token_for_padding_it_is_refused(self):
        done = self.train("refused", IGNORE, tokens="none")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        for part in (IGNORE, "HuggingFaceTokenizer", "pad_token"):
            self.assertIn(part, done.stderr)
        self.assertFalse((HERE.folder / "refused").exists())

    def test_a_model_without_experts_is_refused(self):
        done = run("plan", "--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 4,
                   "--max-position-embeddings", SEQUENCE, "--vocab-size", 1000, "--seq-length", SEQUENCE, IGNORE)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(f"{IGNORE}: this model has no experts", done.stderr)


if __name__ == "__main__":
    main()
