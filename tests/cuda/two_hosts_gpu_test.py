#!/usr/bin/env python3
"""Ranks with a GPU each on two hosts, which are network namespaces (tests/support/two_hosts.py), so
that NCCL goes over sockets: the bits of threads on two GPUs, and how both end when the cable between
them is pulled. One run at a time: kernels of several runs on one GPU take turns, and those that wait
for another GPU wait for the turn of their own run there.

Usage: two_hosts_gpu_test.py TROUPE SOURCE_FOLDER
"""

import pathlib
import shutil
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, command, main, metrics, write_config, write_corpus
from two_hosts import CABLES, Hosts, NoHosts, Ranks

LIMIT_S = 10
STEPS = 5
LAYOUTS = {
    "ep2": ["--expert-model-parallel-size", 2],
    "pp2": ["--pipeline-model-parallel-size", 2],
    "fsdp2": ["--use-megatron-fsdp"],
}
# Both models and both types, each in some layout.
REFERENCES = {
    "ep2": ("qwen3_moe", "bf16"),
    "pp2": ("mixtral", "fp32"),
    "fsdp2": ("mixtral", "bf16"),
}
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 192,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}


def gpu_count():
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("UUID")


def train(save, *flags):
    return ["train", "--device", "cuda", "--bf16", "--quiet", "--model",
            HERE.folder / "config.json", "--data-path", HERE.folder / "corpus", "--lr", "1e-3",
            "--micro-batch-size", 1, "--global-batch-size", 8, "--seq-length", 256,
            "--log-interval", 1, "--split", "100,0,0", "--save", save, *flags]


def variables(rank):
    """A GPU for each host, and NCCL as if there were nothing but the cable."""
    return {"CUDA_VISIBLE_DEVICES": str(rank), "NCCL_SOCKET_IFNAME": CABLES[rank],
            "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1",
            "TROUPE_RENDEZVOUS_SECRET": "of the test's own, and long enough"}


def tensors(save, step):
    folder = save / "checkpoints" / f"step_{step:08}"
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


def setUpModule():
    write_config(**SHAPE)
    write_corpus(300, 400)


class TwoHosts(unittest.TestCase):
    ports = iter(range(29500, 29600))

    def setUp(self):
        if gpu_count() < 2:
            self.skipTest("there are fewer than two GPUs")
        try:
            self.hosts = Hosts(HERE.source)
        except NoHosts as error:
            self.skipTest(str(error))
        self.addCleanup(self.hosts.close)

    def start(self, *arguments):
        return Ranks(self.hosts, 1, next(self.ports), [HERE.troupe, *arguments], HERE.folder,
                     variables)

    def output_of_threads(self, *arguments):
        """What the run prints with two ranks in one process."""
        run = subprocess.run(command(*arguments, "--ranks", 2), stdin=subprocess.DEVNULL,
                             capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(run.returncode, 0, run.stderr)
        return run.stdout

    def ended_ranks(self, *arguments):
        """The ranks of the run on both hosts, when they have ended well."""
        ranks = self.start(*arguments)
        self.assertEqual(ranks.wait(60), [0, 0], ranks.all_errors())
        return ranks

    def test_references(self):
        for layout, (model, dtype) in REFERENCES.items():
            with self.subTest(layout=layout):
                run = ["verify", HERE.source / "tests/fixtures/hf" / model, "--device", "cuda",
                       "--compute-dtype", dtype, *LAYOUTS[layout], "--json"]
                self.assertEqual(self.ended_ranks(*run).out(0), self.output_of_threads(*run))

    def test_training(self):
        for layout, flags in LAYOUTS.items():
            with self.subTest(layout=layout):
                threads, hosts = (HERE.folder / f"{layout}_{kind}" for kind in ("threads", "hosts"))
                self.output_of_threads(*train(threads, *flags, "--train-iters", STEPS))
                ranks = self.ended_ranks(*train(hosts, *flags, "--train-iters", STEPS))
                self.assertNotIn("without a secret", ranks.all_errors())
                losses = [line["loss"] for line in metrics(threads) if "loss" in line]
                self.assertEqual(len(losses), STEPS)
                self.assertEqual([line["loss"] for line in metrics(hosts) if "loss" in line], losses)
                self.assertTrue(tensors(threads, STEPS))
                self.assertEqual(tensors(hosts, STEPS), tensors(threads, STEPS))

    def test_a_pulled_cable(self):
        for layout, flags in LAYOUTS.items():
            with self.subTest(layout=layout):
                self.hosts.plug_in_cable()
                save = HERE.folder / f"pulled_{layout}"
                ranks = self.start(*train(save, *flags, "--train-iters", 1000000,
                                          "--collective-timeout-s", LIMIT_S))
                self.addCleanup(ranks.kill)
                deadline = time.monotonic() + 60
                while len(metrics(save)) < 3:
                    self.assertTrue(ranks.all_run(), ranks.all_errors())
                    self.assertLess(time.monotonic(), deadline, ranks.all_errors())
                    time.sleep(0.05)
                self.hosts.pull_cable()
                self.assertEqual(ranks.wait(60), [1, 1], ranks.all_errors())
                for rank in range(2):
                    self.assertEqual(len(ranks.messages(rank)), 1, ranks.all_errors())


if __name__ == "__main__":
    main()
