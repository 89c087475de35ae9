#!/usr/bin/env python3
"""Fifty steps on a GPU end in the same bits: run twice, launched one by one instead of as a CUDA
graph, profiled, killed and resumed, and with activations computed again or kept on the host. The
same on several GPUs, where there are some.

The model is small, but large enough that its products and its attention take the kernels that large
models take.

Usage: repeat_gpu_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import (HERE, command, main, metrics, run, steps_done, write_config,
                          write_corpus)

STEPS = 50
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 192,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
# What a run computes, without what it measures.
STABLE_METRICS = ("step", "loss", "lr", "grad_norm", "tokens", "load_balancing_loss", "experts")


def train(save, *flags):
    return ["train", "--device", "cuda", "--bf16", "--quiet", "--model",
            HERE.folder / "config.json", "--data-path", HERE.folder / "corpus", "--train-iters",
            STEPS, "--lr", "1e-3", "--global-batch-size", 8, "--seq-length", 256, "--log-interval",
            1, "--split", "100,0,0", "--save", save, *flags]


def gpu_count():
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("UUID")


def outcome(save):
    """Losses, norms and loads of all steps, and the hash of every tensor in the end."""
    steps = [{key: line[key] for key in STABLE_METRICS if key in line} for line in metrics(save)]
    index = json.loads(
        (save / "checkpoints" / f"step_{STEPS:08d}" / "index.json").read_text())
    return steps, {tensor["name"]: tensor for tensor in index["tensors"]}


def setUpModule():
    write_config(**SHAPE)
    write_corpus(300, 400)


class Repeat:
    """What holds for each of the layouts below."""
    maxDiff = 4000
    layout = []

    @classmethod
    def setUpClass(cls):
        if gpu_count() == 0:
            raise unittest.SkipTest("nvidia-smi lists no GPU")
        cls.folder = HERE.folder / cls.__name__
        done = run(*train(cls.folder / "first", *cls.layout))
        assert done.returncode == 0, done.stderr

    def setUp(self):
        self.save = self.folder / self.id().rsplit(".", 1)[-1]

    def train(self, *flags):
        done = run(*train(self.save, *self.layout, *flags))
        self.assertEqual(done.returncode, 0, done.stderr)

    def expect_same(self):
        steps, tensors = outcome(self.save)
        first_steps, first_tensors = outcome(self.folder / "first")
        self.assertEqual(steps, first_steps)
        self.assertEqual(tensors, first_tensors)

    def test_first_run_learns(self):
        steps, _ = outcome(self.folder / "first")
        self.assertEqual(len(steps), STEPS)
        self.assertLess(steps[-1]["loss"], 0.8 * steps[0]["loss"])

    def test_second_run(self):
        self.train()
        self.expect_same()

    def test_launched_one_by_one(self):
        self.train("--cuda-graph-impl", "none")
        self.expect_same()

    def test_profiled(self):
        folder = self.save.with_suffix(".profile")
        self.train("--profile", "--profile-dir", str(folder))
        self.expect_same()
        self.assertEqual(sorted(path.name for path in folder.iterdir()),
                         ["rank0_step11.json", "rank0_step12.json"])
        events = json.loads((folder / "rank0_step11.json").read_text())["traceEvents"]
        names = {event["name"] for event in events}
        self.assertLessEqual({"attention", "grouped_linear", "adamw", "linear"}, names)
        unknown = [event for event in events
                   if event["ph"] == "X" and "args" not in event and event["name"] != "copy"]
        self.assertEqual(unknown, [], "kernels that no operation is known of")

    def test_killed_and_resumed(self):
        arguments = train(self.save, *self.layout, "--load", self.save, "--save-interval", 5)
        for kill_after in (7, 23, 36):
            process = subprocess.Popen(command(*arguments), stdin=subprocess.DEVNULL,
                                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while process.poll() is None and steps_done(self.save) < kill_after:
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
        done = run(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.expect_same()

    def test_recomputed(self):
        self.train("--recompute-granularity", "full", "--recompute-method", "uniform",
                   "--recompute-num-layers", 1)
        self.expect_same()

    def test_modules_recomputed(self):
        self.train("--recompute-granularity", "selective", "--recompute-modules", "layernorm",
                   "moe_act", "core_attn")
        self.expect_same()

    def test_activations_on_the_host(self):
        self.train("--fine-grained-activation-offloading", "--offload-modules", "expert_fc1",
                   "moe_act", "core_attn", "--min-offloaded-tensor-size", 1)
        self.expect_same()

    def test_optimizer_on_the_host(self):
        self.train("--optimizer-cpu-offload")
        self.expect_same()


class OneGpu(Repeat, unittest.TestCase):
    layout = ["--micro-batch-size", 2]


class SeveralGpus(Repeat, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        gpus = min(gpu_count() // 2 * 2, 4)
        if gpus < 2:
            raise unittest.SkipTest("there are fewer than two GPUs")
        cls.layout = ["--micro-batch-size", 1, "--ranks", gpus, "--expert-model-parallel-size",
                      gpus, "--moe-token-dispatcher-type", "flex", "--use-distributed-optimizer"]
        super().setUpClass()


if __name__ == "__main__":
    main()
