#!/usr/bin/env python3
"""`troupe convert` needs memory for some tensors, however many layers the model has.

Usage: convert_memory_test.py TROUPE SOURCE
"""
import json
import os
import pathlib
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(sys.argv[2]) / "tests" / "support"))
from program_runs import CONFIG, HERE, command, main, run, write_config  # noqa: E402
from safetensors_files import write_zeros  # noqa: E402

MIB = 1 << 20
WIDTH, EXPERTS, LAYERS = 512, 4, 10
MATRIX = 4 * WIDTH * WIDTH  # bytes of an expert's matrix in fp32
# A layer's largest parameter, which a checkpoint has as one: gate and up of all experts.
LARGEST = 2 * EXPERTS * MATRIX
# Its pages of the source, and as much again for all else: buffers of a matrix, pages of the file of
# which others were read.
ALLOWED = 2 * LARGEST


def write_large_model(folder):
    """126 MB in fp32, nearly all of it experts; random bytes would do nothing for this."""
    folder.mkdir()
    config = CONFIG | {"hidden_size": WIDTH, "moe_intermediate_size": WIDTH,
                       "num_hidden_layers": LAYERS, "num_experts": EXPERTS}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": [272, WIDTH], "lm_head.weight": [272, WIDTH],
               "model.norm.weight": [WIDTH]}
    for number in range(LAYERS):
        layer = f"model.layers.{number}."
        tensors |= {
            layer + "input_layernorm.weight": [WIDTH],
            layer + "post_attention_layernorm.weight": [WIDTH],
            layer + "self_attn.q_proj.weight": [32, WIDTH],
            layer + "self_attn.k_proj.weight": [16, WIDTH],
            layer + "self_attn.v_proj.weight": [16, WIDTH],
            layer + "self_attn.o_proj.weight": [WIDTH, 32],
            layer + "self_attn.q_norm.weight": [8], layer + "self_attn.k_norm.weight": [8],
            layer + "mlp.gate.weight": [EXPERTS, WIDTH]}
        tensors |= {f"{layer}mlp.experts.{expert}.{name}_proj.weight": [WIDTH, WIDTH]
                    for expert in range(EXPERTS) for name in ("gate", "up", "down")}
    write_zeros(folder / "model.safetensors", tensors)


class ConvertMemory(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        write_config()
        write_large_model(HERE.folder / "large")
        done = cls.train("tiny_run", HERE.folder / "config.json")
        assert done.returncode == 0, done.stderr
        done = run("convert", "--load", HERE.folder / "tiny_run", "--save", HERE.folder / "tiny")
        assert done.returncode == 0, done.stderr

    @staticmethod
    def train(save, model, *flags):
        return run("train", "--model", model, *flags, "--mock-data", "--lr", "1e-3",
                   "--train-iters", 1, "--seq-length", 8, "--micro-batch-size", 1,
                   "--global-batch-size", 1, "--threads", 1, "--no-save-optim", "--quiet", "--save",
                   HERE.folder / save)

    def peak(self, source, name, *flags):
        """The most memory that convert has, in bytes, pages of mapped files included."""
        process = subprocess.Popen(command("convert", "--load", HERE.folder / source, "--save",
                                           HERE.folder / name, *flags),
                                   stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.assertEqual(process.returncode, 0)
        return usage.ru_maxrss * 1024

    def compare(self, large, tiny, name, *flags):
        base = self.peak(tiny, f"{name}_base", *flags)
        peak = self.peak(large, name, *flags)
        self.assertLess(peak, base + ALLOWED,
                        f"{peak / MIB:.0f} MiB; a tiny model takes {base / MIB:.0f}")

    def test_the_bound_can_fail(self):
        bytes_of_model = (HERE.folder / "large" / "model.safetensors").stat().st_size
        self.assertLess(ALLOWED, bytes_of_model / 4)

    def test_a_folder(self):
        self.compare("large", "tiny", "same")

    def test_a_folder_in_another_dtype(self):
        self.compare("large", "tiny", "narrow", "--dtype", "bf16")

    def test_a_checkpoint(self):
        large = HERE.folder / "large"
        done = self.train("large_run", large, "--pretrained-checkpoint", large)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.compare("large_run", "tiny_run", "exported")


main()
