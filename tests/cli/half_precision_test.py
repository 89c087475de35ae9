#!/usr/bin/env python3
"""Training in fp16: that the loss scale finds its place, that runs learn as in bf16, go on after a
checkpoint with the same bits, under several layouts, and what the options refuse.

Usage: half_precision_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, metrics, run
from rank_runs import make_corpus


def setUpModule():
    make_corpus()


def train(name, *flags, steps=30, threads=2):
    return run("train", "--model", HERE.folder / "config.json", "--data-path",
               HERE.folder / "corpus", "--lr", "1e-2", "--lr-decay-style", "constant",
               "--micro-batch-size", 2, "--global-batch-size", 8, "--split", "100,0,0",
               "--train-iters", steps, "--threads", threads, "--log-interval", 1, "--save",
               HERE.folder / name, *flags)


def scale_of(name, step):
    index = HERE.folder / name / "checkpoints" / f"step_{step:08d}" / "index.json"
    return json.loads(index.read_text())["training"]["loss_scale"]


class HalfPrecision(unittest.TestCase):
    def steps(self, name, *flags, **options):
        done = train(name, *flags, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.said = done.stdout + done.stderr
        return [line for line in metrics(HERE.folder / name) if "loss" in line]

    def test_the_scale_falls_until_gradients_are_finite_and_the_run_learns(self):
        bf16 = self.steps("bf16", "--bf16")
        # Overflows that a lower scale ends are not those that end a run.
        half = self.steps("half", "--fp16", "--max-skipped-steps", 3)
        self.assertNotIn("loss_scale", bf16[0])
        self.assertEqual(half[0]["loss_scale"], 2.0**32)
        skipped = [line.get("skipped", False) for line in half]
        first = skipped.index(False)
        self.assertGreater(first, 3)
        # The first overflow is let pass; each later one halves the scale.
        self.assertEqual([line["loss_scale"] for line in half[:first + 1]],
                         [2.0**32] + [2.0**(32 - i) for i in range(first)])
        self.assertIn("step 2: update skipped; gradients overflow at loss scale 2^32; "
                      "that of the next step is 2^31", self.said)
        # The norm is that of the gradients without the scale.
        self.assertLess(abs(half[first]["grad_norm"] - bf16[0]["grad_norm"]),
                        0.1 * bf16[0]["grad_norm"])
        self.assertLess(half[-1]["loss"], half[0]["loss"] - 0.3)
        # Without skipped steps it is where bf16 is, which rounds more coarsely.
        constant = self.steps("constant", "--fp16", "--loss-scale", 1024)
        self.assertLess(abs(constant[-1]["loss"] - bf16[-1]["loss"]), 0.05 * bf16[-1]["loss"])

    def test_a_checkpoint_between_and_threads_change_no_bit(self):
        flags = ("--fp16", "--initial-loss-scale", 2**20, "--loss-scale-window", 4)
        whole = self.steps("whole", *flags)
        scales = [line["loss_scale"] for line in whole]
        self.assertGreater(max(scales), scales[0], "a clean window doubles the scale")
        self.assertEqual([line["loss"] for line in whole],
                         [line["loss"] for line in self.steps("one", *flags, threads=1)])
        self.steps("cut", *flags, steps=13)
        self.assertEqual(scale_of("cut", 13)["value"], scales[13])
        cut = self.steps("cut", *flags, "--load", HERE.folder / "cut")
        for name in ("loss", "grad_norm", "loss_scale"):
            self.assertEqual([line[name] for line in whole], [line[name] for line in cut], name)
        self.assertEqual(scale_of("whole", 30), scale_of("cut", 30))

    def test_layouts_agree(self):
        flags = ("--fp16", "--loss-scale", 1024)
        one = self.steps("one_rank", *flags, steps=8)
        self.assertEqual({line["loss_scale"] for line in one}, {1024})
        self.assertNotIn("skipped", one[-1])
        for name, layout in {
                "ep2": ("--expert-model-parallel-size", 2),
                "tp2": ("--tensor-model-parallel-size", 2, "--sequence-parallel"),
                "pp2": ("--pipeline-model-parallel-size", 2),
                "cp2": ("--context-parallel-size", 2),
                "fsdp2": ("--use-megatron-fsdp",)}.items():
            other = self.steps(name, *flags, "--ranks", 2, *layout, steps=8)
            for a, b in zip(one, other):
                # Sums in other orders round at 2^-11; so small a model moves with that little.
                self.assertLess(abs(a["loss"] - b["loss"]), 2e-3 * a["loss"], name)

    def test_what_was_trained_is_evaluated_exported_and_generates(self):
        self.steps("trained", "--fp16", "--loss-scale", 1024, steps=4)
        folder = HERE.folder / "trained"
        for arguments in (("eval", "--load", folder, "--data-path", HERE.folder / "corpus",
                           "--split", "50,50,0", "--eval-iters", 1),
                          ("convert", "--load", folder, "--save", HERE.folder / "hf"),
                          ("generate", "--load", folder, "--prompt", "1 2", "--max-new-tokens", 2)):
            done = run(*arguments)
            self.assertEqual(done.returncode, 0, done.stderr)
        config = json.loads((HERE.folder / "hf" / "config.json").read_text())
        self.assertEqual(config["torch_dtype"], "float16")

    def test_a_diverged_run_ends_once_the_scale_is_least(self):
        done = train("diverged", "--fp16", "--lr", "1e8", "--initial-loss-scale", 4,
                     "--max-skipped-steps", 3)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("--max-skipped-steps ends", done.stderr)

    def test_refusals(self):
        for flags, said in {
                ("--fp16", "--fp8-format", "e4m3"): "products in 8 or 4 bits are for --bf16",
                ("--fp16", "--grad-reduce-in-bf16"): "its main gradients are fp32",
                ("--bf16", "--loss-scale", 8): "--loss-scale: it belongs to --fp16",
                ("--fp16", "--initial-loss-scale", 1, "--min-loss-scale", 2):
                    "--min-loss-scale 2 is above --initial-loss-scale 1",
                ("--fp16", "--loss-scale", 0): "--loss-scale"}.items():
            done = train("refused", *flags)
            self.assertEqual(done.returncode, 2, flags)
            self.assertIn(said, done.stderr)

    def test_plans_of_gpus(self):
        """Attention and experts have fast kernels, the router's gradients slow ones; gradients of
        attention those of cuDNN."""
        variants, slow = {}, {}
        for dtype in "bf16", "fp16":
            done = run("plan", "--model", "quickstart", "--" + dtype, "--gpus", "1xh100", "--json")
            self.assertEqual(done.returncode, 0, done.stderr)
            kernels = json.loads(done.stdout)["rank_classes"][0]["kernels"]
            variants[dtype] = {(k["kind"], k["variant"]) for k in kernels if not k["slow"]}
            slow[dtype] = {k["kind"] for k in kernels if k["slow"]}
        self.assertEqual(slow, {"bf16": set(),
                                "fp16": {"linear_data_gradient", "linear_weight_gradient"}})
        self.assertIn(("attention", "cudnn"), variants["fp16"])
        self.assertIn(("grouped_linear", "sm90"), variants["fp16"])
        self.assertIn(("attention_gradient", "cudnn"), variants["fp16"])
        self.assertEqual({kind for kind, _ in variants["bf16"] - variants["fp16"]},
                         slow["fp16"] | {"attention_gradient"})
        self.assertIn("Use --bf16 to get fast ones", done.stderr)


if __name__ == "__main__":
    main()
