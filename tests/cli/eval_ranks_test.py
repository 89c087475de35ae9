#!/usr/bin/env python3
"""`troupe eval` and `troupe generate` on several ranks: the loss and the text of one.

Usage: eval_ranks_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, run, write_config, write_corpus

LAYOUTS = {
    "tensors": ["--ranks", 2, "--tensor-model-parallel-size", 2],
    "experts": ["--ranks", 4, "--expert-model-parallel-size", 4],
    "folded": ["--ranks", 8, "--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2,
               "--expert-model-parallel-size", 4],
    "pipeline": ["--ranks", 2, "--pipeline-model-parallel-size", 2],
    "interleaved": ["--ranks", 2, "--pipeline-model-parallel-size", 2,
                    "--pipeline-model-parallel-layout", "E|t|t|L"],
}


class Evaluation(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        write_config()
        write_corpus(100, 60)
        write_corpus(3, 60, name="small")
        cls.runs = {}
        for name, flags in {"one": [], "sharded": ["--ranks", 4, "--tensor-model-parallel-size", 2,
                                                   "--use-distributed-optimizer"]}.items():
            cls.runs[name] = HERE.folder / name
            done = run("train", "--model", HERE.folder / "config.json", "--data-path",
                       HERE.folder / "corpus", "--lr", "1e-2", "--compute-dtype", "fp64",
                       "--micro-batch-size", 2, "--global-batch-size", 8, "--split", "70,30,0",
                       "--train-iters", 3, "--threads", 2, "--save", cls.runs[name], "--quiet",
                       *flags)
            assert done.returncode == 0, done.stderr

    def evaluate(self, *flags, load=None):
        done = run("eval", "--load", load or self.runs["one"], "--data-path",
                   HERE.folder / "corpus", "--split", "70,30,0", "--micro-batch-size", 3,
                   "--eval-iters", 7, "--threads", 2, "--json", *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def generate(self, *flags, load=None):
        done = run("generate", "--load", load or self.runs["one"], "--prompt", "the river",
                   "--max-new-tokens", 12, "--temperature", 0, "--threads", 2, "--json", *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)["tokens"]

    def test_any_number_of_replicas_has_the_same_bits(self):
        for run_name in self.runs:
            one = self.evaluate(load=self.runs[run_name])
            self.assertGreater(one["tokens"], 0)
            for ranks in (2, 3, 4):  # 7 batches: not all have as many
                self.assertEqual(self.evaluate("--ranks", ranks, load=self.runs[run_name]), one)

    def test_layouts_have_the_loss_of_one_rank(self):
        one = self.evaluate()
        layouts = {**LAYOUTS, "context": ["--ranks", 2, "--context-parallel-size", 2],
                   "all_sharded": ["--ranks", 4, "--use-megatron-fsdp",
                                   "--expert-model-parallel-size", 2]}
        for name, flags in layouts.items():
            with self.subTest(layout=name):
                found = self.evaluate(*flags)
                self.assertEqual((found["tokens"], found["step"]), (one["tokens"], one["step"]))
                # The order of sums differs: rounding of f64.
                self.assertAlmostEqual(found["val_loss"], one["val_loss"], delta=1e-10)

    def test_checkpoints_of_layouts_and_several_sets(self):
        sets = ["--valid-data-path", f"a={HERE.folder}/corpus", f"b={HERE.folder}/corpus"]
        one = self.evaluate(*sets, load=self.runs["sharded"])
        found = self.evaluate(*sets, *LAYOUTS["folded"], load=self.runs["sharded"])
        self.assertEqual(list(found), list(one))
        for name, value in one.items():
            self.assertAlmostEqual(found[name], value, delta=1e-10)

    def test_each_set_has_tokens_of_its_own(self):
        found = self.evaluate("--valid-data-path", f"a={HERE.folder}/corpus",
                              f"b={HERE.folder}/small")
        self.assertEqual(found["tokens"], found["tokens/a"])
        self.assertEqual(found["val_loss"], found["val_loss/a"])
        self.assertLess(0, found["tokens/b"])
        self.assertLess(found["tokens/b"], found["tokens/a"])
        self.assertNotEqual(found["val_loss/b"], found["val_loss/a"])

    def test_sampling_follows_its_flags(self):
        greedy = self.generate()
        self.assertEqual(self.generate("--seed", 2), greedy)
        drawn = self.generate("--temperature", 1)
        self.assertNotEqual(drawn, greedy)
        self.assertEqual(self.generate("--temperature", 1), drawn)
        self.assertNotEqual(self.generate("--temperature", 1, "--seed", 2), drawn)
        for only_the_likeliest in (["--top-k", 1], ["--top-p", 1e-9]):
            self.assertEqual(self.generate("--temperature", 1, *only_the_likeliest), greedy)
        self.assertEqual(self.generate("--max-new-tokens", 3), greedy[:3])
        # Whatever is still to come, a token follows from all of the text before it.
        for tokens in (3, 8, 9):
            self.assertEqual(self.generate("--temperature", 1, "--max-new-tokens", tokens),
                             drawn[:tokens])

    def test_texts_may_be_longer_than_the_model_sees(self):
        # The 32 positions of the model, also where its ranks share the tokens among them.
        one = self.generate("--max-new-tokens", 40)
        self.assertEqual(len(one), 40)
        self.assertEqual(self.generate("--max-new-tokens", 40, "--ranks", 2,
                                       "--tensor-model-parallel-size", 2), one)

    def test_text_of_one_rank(self):
        # In fp64, and in fp32, in which the order of sums shows: a Hugging Face folder.
        folder = HERE.folder / "exported"
        done = run("convert", "--load", self.runs["one"], "--save", folder, "--quiet")
        self.assertEqual(done.returncode, 0, done.stderr)
        for load in (self.runs["one"], folder):
            one = self.generate(load=load)
            self.assertEqual(len(one), 12)
            for name, flags in LAYOUTS.items():
                with self.subTest(layout=name, load=load):
                    self.assertEqual(self.generate(*flags, load=load), one)

    def test_layouts_that_a_text_has_no_use_for_are_refused(self):
        cases = {
            "--ranks 2: 2 ranks would hold the same part of the model": ["--ranks", 2],
            "--ranks 4: 2 ranks would hold the same": ["--ranks", 4, "--expert-model-parallel-size",
                                                      2],
            "--context-parallel-size 2: troupe generate does not cut a text": [
                "--ranks", 2, "--context-parallel-size", 2],
        }
        for message, flags in cases.items():
            with self.subTest(message=message):
                done = run("generate", "--load", self.runs["one"], "--prompt", "x", *flags)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertEqual((done.stdout, done.stderr.count("troupe: ")), ("", 1))
                self.assertIn(message, done.stderr)


if __name__ == "__main__":
    main()
