#!/usr/bin/env python3
"""Checkpoints as numpy tensors, by the Python package (python/troupe). numpy comes with the
transformers that the tests of readers use (scripts/install_dependencies.sh).

Usage: python_checkpoints_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import shutil
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python"))
sys.path.append(str(pathlib.Path(__file__).parents[2] / "build-dependencies/transformers-5"))
import troupe
from program_runs import HERE, main, write_config, write_corpus
from safetensors_files import read_tensors

try:
    import numpy
except ImportError:
    numpy = None


STEPS = 10


def training(name, **changes):
    return {"program": HERE.troupe, "model": HERE.folder / "config.json", "seq_length": 32,
            "micro_batch_size": 2, "global_batch_size": 4, "data_path": HERE.folder / "corpus",
            "split": "80,20,0", "lr": 1e-3, "lr_decay_style": "constant", "train_iters": STEPS,
            "save": HERE.folder / name} | changes


def safetensors(path):
    """Of f32, by name."""
    return {name: numpy.frombuffer(contents, "<f4").reshape(shape)
            for name, (_, shape, contents) in read_tensors(path).items()}


def setUpModule():
    if numpy is None:
        return
    write_config()
    write_corpus(200, 20)
    list(troupe.train(**training("run", ranks=2, expert_model_parallel_size=2)))


@unittest.skipIf(numpy is None, "numpy is not installed")
class Checkpoints(unittest.TestCase):
    def setUp(self):
        self.checkpoint = troupe.Run(HERE.folder / "run").checkpoint()

    def test_tensors_are_those_that_convert_writes(self):
        folder = troupe.convert(program=HERE.troupe, load=HERE.folder / "run",
                                save=HERE.folder / "hf", dtype="fp32")
        again = troupe.run_command("convert", program=HERE.troupe, load=HERE.folder / "run",
                                   save=HERE.folder / "hf_bf16", dtype="bf16")
        self.assertEqual(again["architecture"], "Qwen3MoeForCausalLM")
        self.assertEqual(again["save"], str(HERE.folder / "hf_bf16"))
        self.assertEqual(again["dtype"], "BF16")
        written = safetensors(folder / "model.safetensors")
        ours = self.checkpoint
        self.assertEqual(ours.step, STEPS)
        pairs = {"model.embed_tokens.weight": ours["embedding"],
                 "model.norm.weight": ours["final_norm"]}
        for layer in range(2):
            hf, own = f"model.layers.{layer}.", f"layers.{layer}."
            pairs[hf + "mlp.gate.weight"] = ours[own + "w_router"]
            pairs[hf + "self_attn.o_proj.weight"] = ours[own + "w_attention_out"]
            qkv = [written[f"{hf}self_attn.{each}_proj.weight"] for each in "qkv"]
            numpy.testing.assert_array_equal(numpy.concatenate(qkv), ours[own + "w_qkv"])
            for expert in range(4):
                experts = f"{hf}mlp.experts.{expert}."
                pairs[experts + "down_proj.weight"] = ours[own + "w_down"][expert]
                gate_up = [written[f"{experts}{each}_proj.weight"] for each in ("gate", "up")]
                numpy.testing.assert_array_equal(numpy.concatenate(gate_up),
                                                 ours[own + "w_gate_up"][expert])
        for name, tensor in pairs.items():
            numpy.testing.assert_array_equal(written[name], tensor, err_msg=name)

    def test_slices_of_all_ranks_are_joined(self):
        tensors = json.loads((self.checkpoint.path / "index.json").read_text())["tensors"]
        self.assertTrue(any(len({each["file"] for each in tensor["slices"]}) > 1
                            for tensor in tensors))
        for name in self.checkpoint.names("parameter"):
            self.assertEqual(self.checkpoint[name].shape, self.checkpoint.shape(name))

    def test_bf16_becomes_f32(self):
        list(troupe.train(**training("bf16", bf16=True, train_iters=1)))
        run = troupe.Run(HERE.folder / "bf16")
        checkpoint = run.checkpoint()
        name = "layers.0.w_router"
        names = [each for each in checkpoint.names("parameter") if checkpoint.dtype(each) == "bf16"]
        self.assertTrue(names, name)
        exact = troupe.load_checkpoint(checkpoint.path, exact=True)
        for each in names:
            values = checkpoint[each]
            self.assertEqual(values.dtype, numpy.float32)
            numpy.testing.assert_array_equal(values.view("<u4") >> 16, exact[each])

    def test_incomplete_checkpoints_do_not_count(self):
        folder = HERE.folder / "copied"
        shutil.copytree(HERE.folder / "run", folder)
        run = troupe.Run(folder)
        self.assertEqual(run.steps(), [STEPS])
        (folder / f"checkpoints/step_{STEPS:08d}/COMMIT").unlink()
        self.assertEqual(run.steps(), [])
        with self.assertRaises(troupe.CheckpointError):
            troupe.load_checkpoint(folder / f"checkpoints/step_{STEPS:08d}")


if __name__ == "__main__":
    main()
