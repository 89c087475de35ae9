#!/usr/bin/env python3
"""Hugging Face folders that are converted to Hugging Face folders: every tensor keeps its type, and
layers of multi-token prediction are kept, left out with a word, or missed by name.

Usage: hf_folders_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import struct
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, run
from safetensors_files import read_tensors, write_tensors

LEFT_OUT = "layers of multi-token prediction are left out"


def reference(name):
    return HERE.source / "tests/fixtures/hf" / name


def to_16_bits(contents, letter):
    """The nearest numbers of F16, or those of BF16 that are next to zero."""
    values = struct.unpack(f"<{len(contents) // 4}f", contents)
    if letter == "F16":
        return struct.pack(f"<{len(values)}e", *values)
    return b"".join(contents[i + 2:i + 4] for i in range(0, len(contents), 4))


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

    # ---- Types ----

    def typed(self, name, letter, dtype, wide):
        """A reference in 16 bits, except tensors whose names have one of the parts `wide`."""
        tensors = {}
        source = read_tensors(reference(name) / "model.safetensors")
        for tensor, (was, shape, contents) in sorted(source.items()):
            if any(part in tensor for part in wide):
                tensors[tensor] = (was, shape, contents)
            else:
                tensors[tensor] = (letter, shape, to_16_bits(contents, letter))
        config = self.config(reference(name)) | {"dtype": dtype}
        return self.write(f"{name}_{letter}", tensors, config)

    def test_every_tensor_keeps_its_type(self):
        for name, wide in (("minimax_m2", ("gate.weight", "e_score")),
                           ("qwen3_next", ("A_log", "linear_attn.norm.weight")),
                           ("mixtral", ())):
            for letter, dtype in (("BF16", "bfloat16"), ("F16", "float16")):
                with self.subTest(name=name, letter=letter):
                    source = self.typed(name, letter, dtype, wide)
                    copy, said = self.convert(source, f"copy_{name}_{letter}")
                    before = read_tensors(source / "model.safetensors")
                    after = read_tensors(copy / "model.safetensors")
                    self.assertEqual({n: t[0] for n, t in after.items()},
                                     {n: t[0] for n, t in before.items()})
                    self.assertEqual(before, after)
                    self.assertEqual(self.config(copy), self.config(source))
                    self.assertIn(f" in {letter}, ", said)

    def test_the_type_that_is_stated_is_that_of_most_weights(self):
        source = self.typed("mixtral", "BF16", "float32", ("gate.weight",))
        copy, _ = self.convert(source, "copy")
        self.assertEqual(self.config(copy), self.config(source) | {"dtype": "bfloat16"})
        # That of a quantised folder says in which type to compute.
        codes, _ = self.convert(source, "codes", "--dtype", "fp8-block")
        stated = self.config(codes) | {"dtype": "float16"}
        (codes / "config.json").write_text(json.dumps(stated))
        again, _ = self.convert(codes, "again")
        self.assertEqual(self.config(again), stated)

    def test_a_type_that_is_asked_for_is_that_of_all(self):
        source = self.typed("minimax_m2", "BF16", "bfloat16", ("gate.weight", "e_score"))
        copy, _ = self.convert(source, "copy", "--dtype", "fp16")
        types = {dtype for name, (dtype, _, _) in read_tensors(copy / "model.safetensors").items()
                 if "e_score" not in name}
        self.assertEqual(types, {"F16"})
        self.assertEqual(self.config(copy)["dtype"], "float16")

    def test_what_is_not_quantised_keeps_its_type(self):
        source = self.typed("minimax_m2", "BF16", "bfloat16", ("gate.weight", "e_score"))
        codes, _ = self.convert(source, "codes", "--dtype", "fp8-block")
        before = read_tensors(source / "model.safetensors")
        after = read_tensors(codes / "model.safetensors")
        self.assertEqual({after[name][0] for name in before}, {"BF16", "F32", "F8_E4M3"})
        for name, tensor in before.items():
            if after[name][0] != "F8_E4M3":
                self.assertEqual(after[name], tensor, name)
        self.assertEqual(self.config(codes)["dtype"], "bfloat16")
        # As it is published: the other name of the format, and scales in fewer bits.
        config = self.config(codes)
        config["quantization_config"]["fmt"] = "float8_e4m3fn"
        for name, (_, shape, contents) in after.items():
            if name.endswith("_scale_inv"):
                after[name] = ("BF16", shape, to_16_bits(contents, "BF16"))
        published = self.write("published", after, config)
        again, _ = self.convert(published, "again")
        self.assertEqual(read_tensors(again / "model.safetensors"), after)
        self.assertEqual(self.config(again), config)

    # ---- Layers of multi-token prediction ----

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
