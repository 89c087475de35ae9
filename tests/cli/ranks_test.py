#!/usr/bin/env python3
"""Runs of several ranks, through the program: what they write, how they stop, what they refuse.

Usage: ranks_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, metrics, run
from rank_runs import make_corpus, train_arguments


def setUpModule():
    make_corpus()


class Ranks(unittest.TestCase):
    def test_train_as_one_rank_does(self):
        losses = []
        for ranks in (1, 2, 4):
            save = HERE.folder / f"ranks_{ranks}"
            result = run(*train_arguments(save, "--ranks", ranks, "--train-iters", 4,
                                          "--eval-interval", 2, "--eval-iters", 1))
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(result.stdout, "")
            self.assertEqual(result.stderr.count("Options of troupe train"), 1, "one rank speaks")
            losses.append([line.get("loss", line.get("val_loss")) for line in metrics(save)])
        for other in losses[1:]:
            self.assertEqual(len(other), len(losses[0]))
            for one, several in zip(losses[0], other):
                # The order of sums differs: rounding of f64, over four steps.
                self.assertAlmostEqual(one, several, delta=1e-10)

    def test_a_loss_that_megatron_divides_by_its_replicas_is_noted(self):
        for ranks, loss, notes in ((2, "global_aux_loss", 1), (1, "global_aux_loss", 0),
                                   (2, "aux_loss", 0)):
            result = run(*train_arguments(HERE.folder / f"{loss}_{ranks}", "--ranks", ranks,
                                          "--train-iters", 1, "--moe-aux-loss-coeff", 0.01,
                                          "--moe-router-load-balancing-type", loss))
            self.assertEqual(result.returncode, 0, result.stderr)
            text = " ".join(result.stderr.split())
            self.assertEqual(text.count("In Megatron it is about 1/2 of this with 2 of them: for its "
                                        "strength divide --moe-aux-loss-coeff by 2."), notes, text)

    def test_interrupted_ranks_save_and_end(self):
        save = HERE.folder / "interrupted"
        arguments = train_arguments(save, "--ranks", 2, "--train-iters", 1000000)
        process = subprocess.Popen([HERE.troupe, *map(str, arguments)], stdin=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not (save / "metrics.jsonl").exists() or not metrics(save):
            self.assertLess(time.monotonic(), deadline, "no step was done")
            time.sleep(0.05)
        # Where OpenBLAS does not know the processor, the program has started itself again.
        self.assertEqual(pathlib.Path(f"/proc/{process.pid}/comm").read_text(), "troupe\n")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, errors)
        last = metrics(save)[-1]["step"]
        self.assertTrue((save / "checkpoints" / f"step_{last:08}").is_dir(), errors)
        # It goes on, with another number of ranks.
        result = run(*train_arguments(save, "--load", save, "--ranks", 4, "--train-iters", 1000000,
                                      "--exit-after-step", last + 2))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(metrics(save)[-1]["step"], last + 2)

    def test_a_failing_rank_ends_the_run_with_one_message(self):
        # A token outside of the vocabulary, in some sample: whichever rank reads it fails.
        data = bytearray((HERE.folder / "corpus.bin").read_bytes())
        half = len(data) // 4 * 2
        data[half:] = b"\xff\x7f" * ((len(data) - half) // 2)
        (HERE.folder / "broken.bin").write_bytes(bytes(data))
        (HERE.folder / "broken.idx").write_bytes((HERE.folder / "corpus.idx").read_bytes())
        arguments = train_arguments(HERE.folder / "broken_run", "--ranks", 4, "--train-iters", 50,
                                    "--quiet")
        arguments[arguments.index("--data-path") + 1] = HERE.folder / "broken"
        result = run(*arguments)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        self.assertIn("broken", result.stderr)

    def test_programs_show_their_collectives(self):
        shape = ["--model", HERE.folder / "config.json", "--seq-length", 16, "--ranks", 2,
                 "--micro-batch-size", 1, "--json"]
        for rank in (0, 1):
            result = run("inspect", *shape, "--rank", rank)
            self.assertEqual(result.returncode, 0, result.stderr)
            kinds = [op["kind"] for op in json.loads(result.stdout)["operations"]
                     if op["queue"] not in ("compute", "copy")]
            # Two layers, what is before and after them, metrics; the squared norm.
            self.assertEqual(kinds, ["all_reduce"] * 5 + ["sum_over_ranks"])
        self.assertEqual(run("inspect", *shape, "--rank", 2).returncode, 2)
        plan = json.loads(run("plan", *shape).stdout)
        self.assertEqual((plan["ranks"], plan["micro_batches"]), (2, 2))

    def test_references_on_two_ranks(self):
        fixture = HERE.source / "tests/fixtures/hf/mixtral"
        result = run("verify", fixture, "--ranks", 2, "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertTrue(json.loads(result.stdout)["pass"])
        result = run("verify", fixture, "--ranks", 3)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("--ranks 3: the 2 sequences", result.stderr)

    # EP exceeds DP in the first of them.
    def test_references_in_layouts(self):
        mixtral = HERE.source / "tests/fixtures/hf/mixtral"
        folded = ["--ranks", 8, "--tensor-model-parallel-size", 2,
                  "--pipeline-model-parallel-size", 2, "--expert-model-parallel-size", 4]
        for dispatcher in ("allgather", "alltoall", "flex"):
            with self.subTest(dispatcher=dispatcher):
                result = run("verify", mixtral, *folded, "--moe-token-dispatcher-type", dispatcher,
                             "--json")
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertTrue(json.loads(result.stdout)["pass"])

    def test_references_in_chunks_and_shards(self):
        qwen = HERE.source / "tests/fixtures/hf/qwen2_moe"
        for flags in (["--ranks", 4, "--context-parallel-size", 2,
                       "--expert-model-parallel-size", 4],
                      ["--ranks", 4, "--context-parallel-size", 2,
                       "--tensor-model-parallel-size", 2],
                      ["--ranks", 2, "--use-megatron-fsdp", "--expert-model-parallel-size", 2],
                      # The reference's 48 tokens can be cut in 6 chunks, the model's 256 positions
                      # cannot.
                      ["--ranks", 3, "--context-parallel-size", 3],
                      # More replicas than sequences.
                      ["--ranks", 4, "--expert-model-parallel-size", 4]):
            with self.subTest(flags=flags):
                result = run("verify", qwen, *flags, "--json")
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertTrue(json.loads(result.stdout)["pass"])

    def test_training_in_layouts_has_the_curve_of_one_rank(self):
        def curve(name, *flags):
            save = HERE.folder / f"layout_{name}"
            result = run(*train_arguments(save, *flags, "--train-iters", 4))
            self.assertEqual(result.returncode, 0, result.stderr)
            return [line["loss"] for line in metrics(save) if "loss" in line]

        one = curve("one")
        layouts = {
            "tp_pp": ["--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2],
            "ep": ["--expert-model-parallel-size", 4, "--moe-token-dispatcher-type", "flex"],
            "sharded": ["--use-distributed-optimizer"],
            "all_sharded": ["--use-megatron-fsdp", "--expert-model-parallel-size", 2,
                            "--overlap-param-gather", "--overlap-grad-reduce"],
        }
        for name, flags in layouts.items():
            with self.subTest(layout=name):
                found = curve(name, "--ranks", 4, *flags)
                self.assertEqual(len(found), len(one))
                for expected, loss in zip(one, found):
                    # The order of sums differs: rounding of f64, over four steps.
                    self.assertAlmostEqual(loss, expected, delta=1e-10)


if __name__ == "__main__":
    main()
