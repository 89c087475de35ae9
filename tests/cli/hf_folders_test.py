#!/usr/bin/env python3
"""Hugging Face folders that are converted to Hugging Face folders: layers of multi-token
prediction are kept, left out with a word, or missed by name.

Usage: hf_folders_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, run
from safetensors_files import read_tensors, write_tensors

LEFT_OUT = "layers of multi-token prediction are left out"


def reference(name):
    return HERE.source / "tests/fixtures/hf" / name


class HfFolders(unittest.TestCase):
    def setUp(self):
        self.out = HERE.folder / self.id().rsplit(".", 1)[-1]
        self.out.mkdir()

    def convert(self, source, name, *flags, status=0):
        done = run("convert", "--load", source, "--save", self.out / name, *flags)
        self.assertEqual(done.returncode, status, done.stderr)
        self.assertEqual((self.out / name).exists(), status == 0)
        return self.out / name, " ".join(done.stderr.split())

    def train_from(self, folder, name, *flags, status=0):
        return self.train(folder, name, "--pretrained-checkpoint", folder, *flags, status=status)

    def train(self, folder, name, *flags, status=0):
        done = run("train", "--model", folder, "--mock-data", "--seq-length", 16, "--lr", "1e-3",
                   "--global-batch-size", 2, "--train-iters", 1, "--threads", 1, "--tokenizer-type",
                   "NullTokenizer", "--vocab-size", 160, "--save", self.out / name, *flags)
        self.assertEqual(done.returncode, status, done.stderr)
        return " ".join(done.stderr.split())

    def write(self, name, tensors, config):
        folder = self.out / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        write_tensors(folder / "model.safetensors", tensors)
        return folder

    def config(self, folder):
        return json.loads((folder / "config.json").read_text())

    def assert_same(self, folder, other):
        for file in ("config.json", "model.safetensors"):
            self.assertEqual((folder / file).read_bytes(), (other / file).read_bytes(), file)

    def test_announced_layers_may_be_none(self):
        folder = reference("deepseek_v3")
        copy, said = self.convert(folder, "copy")
        self.assertIn("config.json announces layers of multi-token prediction, and the folder has "
                      "no tensor of theirs. They are left out.", said)
        self.assertEqual(self.config(copy)["num_nextn_predict_layers"], 0)
        _, said = self.convert(copy, "again")
        self.assertNotIn("multi-token", said)
        self.assertIn("the folder has no tensor of theirs", self.train_from(folder, "run"))

    def test_a_missing_tensor_is_named(self):
        for name, tensor in (("deepseek_v3", "model.layers.2.eh_proj.weight"),
                             ("qwen3_next", "mtp.fc.weight")):
            with self.subTest(name):
                self.train(reference(name) / "config.json", f"{name}_run", "--mtp-num-layers", 1)
                whole, _ = self.convert(self.out / f"{name}_run", f"{name}_whole")
                tensors = read_tensors(whole / "model.safetensors")
                copy, said = self.convert(whole, f"{name}_copy")
                self.assert_same(whole, copy)
                self.assertNotIn(LEFT_OUT, said)
                del tensors[tensor]
                folder = self.write(f"{name}_part", tensors, self.config(whole))
                missing = f"{folder}: the tensor {tensor} is missing"
                _, said = self.convert(folder, f"{name}_refused", status=2)
                self.assertIn(missing, said)
                self.assertIn(missing, self.train_from(folder, f"{name}_trained", status=2))
                said = self.train_from(folder, f"{name}_asked", "--mtp-num-layers", 1, status=2)
                self.assertIn(missing, said)
                # Who leaves them out needs none of them.
                bare, said = self.convert(folder, f"{name}_bare", "--mtp-num-layers", 0)
                self.assertIn(LEFT_OUT, said)
                theirs = ("mtp.", "model.layers.2.") if name == "deepseek_v3" else ("mtp.",)
                self.assertEqual(set(read_tensors(bare / "model.safetensors")),
                                 {other for other in tensors if not other.startswith(theirs)})
                self.train_from(folder, f"{name}_without", "--mtp-num-layers", 0)

    def test_layers_of_other_families_are_left_out(self):
        for name in ("deepseek_v32", "ling_v2"):
            with self.subTest(name):
                before = read_tensors(reference(name) / "model.safetensors")
                config = self.config(reference(name))
                layers = config["num_hidden_layers"]
                last = f"model.layers.{layers - 1}."
                tensors = before | {
                    tensor.replace(last, f"model.layers.{layers}."): contents
                    for tensor, contents in before.items() if tensor.startswith(last)}
                tensors[f"model.layers.{layers}.final_layernorm.weight"] = ("F32", [1], bytes(4))
                source = self.write(name, tensors, config | {"num_nextn_predict_layers": 1})
                for flags in ((), ("--mtp-num-layers", 0)):
                    copy, said = self.convert(source, f"{name}_{len(flags)}", *flags)
                    architecture, = config["architectures"]
                    self.assertIn(f"{LEFT_OUT}: those of {architecture} are not read.", said)
                    self.assertEqual(read_tensors(copy / "model.safetensors"), before)
                    self.assertEqual(self.config(copy)["num_nextn_predict_layers"], 0)
                said = self.train_from(source, f"{name}_run")
                self.assertIn("multi-token prediction are left out", said)
                said = self.train_from(source, f"{name}_asked", "--mtp-num-layers", 1, status=2)
                self.assertIn("are not read, so the model can have none.", said)


if __name__ == "__main__":
    main()
