#!/usr/bin/env python3
"""Training on several data sets, and runs that go on with another length.

Usage: data_sets_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import shutil
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, run, write_config, write_corpus


def setUpModule():
    write_config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                 max_position_embeddings=32, moe_intermediate_size=16, router_aux_loss_coef=0.0)
    write_corpus(60, 20, name="books")
    write_corpus(20, 20, name="code")


class DataSets(unittest.TestCase):
    def setUp(self):
        self.save = HERE.folder / self.id().rsplit(".", 1)[-1]

    def train(self, steps, *flags, data=None, split="9,1"):
        if data is None:
            data = (HERE.folder / "books",)
        data = ("--data-path", *data) if data else ()
        return run("train", "--model", HERE.folder / "config.json", "--lr", "1e-3", "--lr-decay-style",
                   "constant", "--threads", 1,
                   "--global-batch-size", 2, "--train-iters", steps, "--split", split, *data,
                   *(() if "--save" in flags else ("--no-save",)), *flags)

    def saved(self, *flags, data=None):
        """Trains with --save and --load."""
        done = self.train(*flags, "--save", self.save, "--load", self.save,
                          data=data)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stderr

    def index(self, step):
        path = self.save / "checkpoints" / f"step_{step:08d}" / "index.json"
        index = json.loads(path.read_text())
        return index["training"], {tensor["name"]: tensor for tensor in index["tensors"]}

    def refused(self, done, *parts):
        self.assertEqual(done.returncode, 2, done.stderr)
        last = done.stderr.splitlines()[-1]
        self.assertTrue(last.startswith("troupe: "), done.stderr)
        for part in parts:
            self.assertIn(part, last)

    def test_a_run_says_what_it_reads(self):
        blend = ("0.75", HERE.folder / "books", "0.25", HERE.folder / "code")
        done = self.train(10, "--eval-interval", 5, "--eval-iters", 1, data=blend)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Training data: 20 samples of 32 tokens", done.stderr)
        self.assertRegex(done.stderr, r"books: 54 documents, .* tokens; 75.00 % of the samples")
        self.assertRegex(done.stderr, r"code: 18 documents, .* tokens; 25.00 % of the samples")
        self.assertIn("Validation data: 2 samples for each evaluation", done.stderr)

    def test_the_result_has_the_loss_of_each_set(self):
        sets = ("--train-data-path", HERE.folder / "books", "--multiple-validation-sets",
                "--valid-data-path", f"books={HERE.folder / 'books'}",
                f"code={HERE.folder / 'code'}")
        done = self.train(2, "--eval-interval", 2, "--eval-iters", 1, "--json", *sets, data=())
        self.assertEqual(done.returncode, 0, done.stderr)
        result = json.loads(done.stdout)
        self.assertEqual([name for name in result if name.startswith("val_loss")],
                         ["val_loss", "val_loss/books", "val_loss/code"])
        self.assertEqual(result["val_loss"], result["val_loss/books"])
        self.assertNotEqual(result["val_loss"], result["val_loss/code"])

    def test_a_run_says_what_a_step_is(self):
        done = self.train(2, "--global-batch-size", 12, "--micro-batch-size", 2)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, r"\nStep: \d+ operations, 12 sequences in 6 micro-batches\n")

    def test_a_file_gives_the_same_run(self):
        (HERE.folder / "args").write_text(f"3 {HERE.folder / 'books'}\n1 {HERE.folder / 'code'}\n")
        self.saved(4, data=("3", HERE.folder / "books", "1", HERE.folder / "code"))
        expected = self.index(4)[1]
        shutil.rmtree(self.save)
        done = self.train(4, "--data-args-path", HERE.folder / "args", "--save", self.save, data=())
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.index(4)[1], expected)

    def test_wrong_data_paths_are_refused(self):
        books, code = HERE.folder / "books", HERE.folder / "code"
        self.refused(self.train(4, data=("0.5", books, "-0.5", code)), "weight", "-0.5", str(code))
        self.refused(self.train(4, data=("0.5", books, "nan", code)), "weight", "nan")
        self.refused(self.train(4, data=("0", books, "1", code)), "weight", "is 0")
        self.refused(self.train(4, data=("0.5", books, code)), "'0.5' is a number")
        self.refused(self.train(4, data=(books, HERE.folder / "none")), "none.idx does not exist")
        self.refused(self.train(100000, data=(books, code)), "give each a weight")
        self.refused(self.train(4, "--eval-interval", 2, split="1,0"), "validation split", "books")
        self.refused(self.train(4, split="1,x"), "--split '1,x'")

    def test_a_shorter_or_slightly_longer_run_keeps_its_order(self):
        # 54 documents of training data hold far more than these samples in one epoch.
        self.saved(20)
        whole = self.index(20)
        self.assertEqual(whole[0]["ordered_samples"], 40)
        shutil.rmtree(self.save)
        self.saved(10)
        errors = self.saved(20)
        self.assertIn("ends after 40 samples instead of 20. The order of its data is kept", errors)
        training, tensors = self.index(20)
        self.assertEqual(training["ordered_samples"], 20)
        self.assertEqual(training["position"]["consumed_samples"], 40)
        self.assertEqual(tensors, whole[1], "both lengths are within one epoch")

    def test_a_much_longer_run_gets_another_order_and_says_so(self):
        self.saved(4, "--quiet")
        warning = self.saved(1000, "--quiet", "--exit-after-step", 6)
        self.assertEqual(len(warning.splitlines()), 1, warning)
        self.assertRegex(warning, "^Warning: the run now takes 2000 samples, and the order of its data, "
                         "made for 8, holds [0-9]+. It goes on in an order made for 2000, from sample 8 on: ")
        self.assertEqual(self.index(6)[0]["ordered_samples"], 2000)
        self.assertEqual(self.saved(1000, "--quiet", "--exit-after-step", 7), "")

    def test_other_data_are_warned_of(self):
        self.saved(4, "--quiet", "--exit-after-step", 2)
        warning = self.saved(4, "--quiet", data=(HERE.folder / "code",))
        self.assertIn("Warning: the run goes on with other data. Until now: 60 sequences", warning)


if __name__ == "__main__":
    main()
