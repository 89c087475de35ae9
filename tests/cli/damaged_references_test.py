#!/usr/bin/env python3
"""`troupe verify` with references that are damaged: one message that names the file and what is wrong
in it, and status 1; for numbers that another model would compute, status 1 with the largest difference.

Usage: damaged_references_test.py TROUPE SOURCE_FOLDER
"""

import array
import json
import math
import pathlib
import shutil
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, run
from safetensors_files import read_tensors, write_tensors


FIXTURE = "tests/fixtures/hf/mixtral"


def numbers(contents):
    return array.array("f", contents)


def scaled(contents, factor):
    return array.array("f", [factor * number for number in numbers(contents)]).tobytes()


def norm(*tensors):
    return math.sqrt(sum(number * number for _, _, contents in tensors
                         for number in numbers(contents)))


def with_first(number):
    """A tensor whose first integer is that number."""
    def change(dtype, shape, contents):
        width = len(contents) // math.prod(shape)
        return dtype, shape, number.to_bytes(width, "little", signed=True) + contents[width:]
    return change


class DamagedReferences(unittest.TestCase):
    def setUp(self):
        self.folder = HERE.folder / self.id()
        shutil.copytree(HERE.source / FIXTURE, self.folder)
        self.reference = self.folder / "reference.safetensors"

    def verify(self, *flags):
        return run("verify", self.folder, "--compute-dtype", "fp64", "--threads", 1, *flags)

    def expect(self, *parts, flags=(), status=1):
        done = self.verify(*flags)
        self.assertEqual(done.returncode, status, done.stderr)
        self.assertEqual(done.stderr.count("troupe: "), 1, done.stderr)
        for part in parts:
            self.assertIn(part, done.stderr)

    def change(self, name, change):
        """Of the undamaged file."""
        tensors = read_tensors(HERE.source / FIXTURE / "reference.safetensors")
        changed = change(*tensors.pop(name))
        if changed is not None:
            tensors[name] = changed
        write_tensors(self.reference, tensors)

    def test_an_undamaged_copy_passes(self):
        write_tensors(self.reference, read_tensors(self.reference))
        done = self.verify()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_tensors_that_are_missing(self):
        for name, what in (("logits", "the tensor logits is missing"),
                           ("labels", "the tensor labels is missing"),
                           ("input_ids", "input_ids of shape [batch, sequence] is missing")):
            self.change(name, lambda *tensor: None)
            self.expect("reference.safetensors", what)

    def test_a_tensor_of_another_shape(self):
        self.change("labels", lambda dtype, shape, contents: (dtype, shape[::-1], contents))
        self.expect("the tensor labels has the shape [", "], expected [")

    def test_input_ids_of_one_dimension(self):
        self.change("input_ids", lambda dtype, shape, contents: (dtype, [math.prod(shape)], contents))
        self.expect("input_ids of shape [batch, sequence] is missing")

    def test_tokens_outside_the_vocabulary(self):
        vocabulary = json.loads((self.folder / "config.json").read_text())["vocab_size"]
        for name, ids in (("input_ids", (-1, vocabulary)), ("labels", (vocabulary,))):
            for token in ids:
                self.change(name, with_first(token))
                self.expect("a token id lies outside the vocabulary")

    def test_numbers_that_are_missing_or_none(self):
        path = self.folder / "reference.json"
        document = json.loads(path.read_text())
        for changed in ({key: value for key, value in document.items() if key != "loss"},
                        document | {"loss": "1.5"},
                        document | {"adamw": document["adamw"] | {"betas": [0.9]}}):
            path.write_text(json.dumps(changed))
            self.expect("reference.json: ")
        path.write_text(json.dumps(document)[:-5])
        self.expect("reference.json")

    def test_other_numbers_fail(self):
        path = self.folder / "reference.json"
        document = json.loads(path.read_text())
        for changed in (document | {"loss": document["loss"] + 1e-3},
                        document | {"grad_norm": document["grad_norm"] * 1.01},
                        document | {"adamw": document["adamw"] | {"lr": 1e-2}}):
            path.write_text(json.dumps(changed))
            done = self.verify()
            self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
            self.assertIn("FAIL", done.stdout.upper())

    def test_gradients_that_are_longer_than_the_reference(self):
        """In bf16, 1.5 % of the whole gradient and 3 to 6 % of the worst tensor are roundings."""
        tensors = read_tensors(HERE.source / FIXTURE / "grads/model.safetensors")
        small = min(tensors, key=lambda name: norm(tensors[name]))
        self.assertLess(norm(tensors[small]), 0.1 * norm(*tensors.values()))

        def compare(dtype, factors):
            changed = {name: (dtype, shape, scaled(contents, factors.get(name, factors[""])))
                       for name, (dtype, shape, contents) in tensors.items()}
            write_tensors(self.folder / "grads/model.safetensors", changed)
            path = self.folder / "reference.json"
            document = json.loads((HERE.source / FIXTURE / "reference.json").read_text())
            path.write_text(json.dumps(document | {"grad_norm": norm(*changed.values())}))
            done = run("verify", self.folder, "--compute-dtype", dtype, "--threads", 1, "--json")
            result = json.loads(done.stdout)
            self.assertEqual(done.returncode, 0 if result["pass"] else 1, done.stderr)
            return result

        every = compare("fp64", {"": 1 / 1.03})
        self.assertAlmostEqual(every["grad_all_rel"], 0.03, places=5)
        self.assertAlmostEqual(every["grad_worst_rel"], 0.03, places=5)
        self.assertFalse(every["pass"])
        one = compare("fp64", {small: 1 / 1.08, "": 1})
        share = 0.08 / 1.08 * norm(tensors[small]) / norm(*tensors.values())
        self.assertAlmostEqual(one["grad_all_rel"], share, places=5)
        self.assertAlmostEqual(one["grad_worst_rel"], 0.08, places=5)
        self.assertEqual(one["grad_worst_name"], small)
        self.assertFalse(one["pass"])

        self.assertTrue(compare("bf16", {"": 1})["pass"])
        self.assertTrue(compare("bf16", {small: 1 / 1.06, "": 1})["pass"])
        of_one = compare("bf16", {small: 1 / 1.2, "": 1})
        self.assertLess(of_one["grad_all_rel"], 2.5e-2)
        self.assertFalse(of_one["pass"])
        of_all = compare("bf16", {"": 1 / 1.03})
        self.assertLess(of_all["grad_worst_rel"], 1e-1)
        self.assertGreater(of_all["grad_all_rel"], 2.5e-2)
        self.assertFalse(of_all["pass"])

    def test_ranks_whose_labels_count_otherwise(self):
        self.change("labels", with_first(-100))
        self.expect("have different numbers of counted labels", "Use --ranks 1.",
                    flags=("--ranks", 2), status=2)

    def test_micro_batches_whose_labels_count_otherwise(self):
        self.change("labels", with_first(-100))
        self.expect("have different numbers of counted labels", "which virtual stages need",
                    flags=("--ranks", 2, "--pipeline-model-parallel-size", 2,
                           "--pipeline-model-parallel-layout", "E|t|t|L"), status=2)


if __name__ == "__main__":
    main()
