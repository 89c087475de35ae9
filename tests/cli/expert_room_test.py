#!/usr/bin/env python3
"""Training with limited room for the experts of a rank (--moe-expert-rank-capacity-factor): some
steps lack it and run again in rounds of tokens. The run is that without a limit up to rounding, has
the same bits when it is repeated, and when it is stopped and goes on. With copies of hot experts
(--moe-expert-clones) a room suffices that is too small without.

Usage: expert_room_test.py TROUPE SOURCE
"""
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(sys.argv[2]) / "tests" / "support"))
from program_runs import HERE, main, metrics, run  # noqa: E402

STEPS = 30
MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4",
         "--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--swiglu",
         "--disable-bias-linear", "--normalization", "RMSNorm", "--vocab-size", "272",
         "--seq-length", "64", "--micro-batch-size", "1", "--global-batch-size", "4", "--mock-data",
         "--tokenizer-type", "NullTokenizer", "--max-position-embeddings", "64",
         "--ranks", "4", "--expert-model-parallel-size", "4", "--moe-token-dispatcher-type",
         "alltoall", "--lr", "1e-3", "--train-iters", str(STEPS), "--quiet"]


class ExpertRoom(unittest.TestCase):
    def train(self, name, *flags):
        done = run("train", *MODEL, "--save", HERE.folder / name, *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def weights(self, name):
        folder = HERE.folder / name / "checkpoints" / f"step_{STEPS:08d}"
        return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}

    def test_steps_that_lack_room_run_again_with_the_same_numbers(self):
        self.train("whole")
        whole = metrics(HERE.folder / "whole")
        self.assertFalse(any("expert_rooms_lacked" in line for line in whole))
        # Room that some steps lack: less than the most that any of them needed.
        self.train("limited", "--moe-expert-rank-capacity-factor", "1.3")
        limited = metrics(HERE.folder / "limited")
        lacked = [line for line in limited if "expert_rooms_lacked" in line]
        self.assertTrue(0 < len(lacked), "no step lacked room")
        self.assertTrue(all(line["expert_room_needed"] > 1.3 for line in lacked))
        self.assertEqual([line["step"] for line in limited], list(range(1, STEPS + 1)))
        for one, other in zip(whole, limited):
            # fp32: rounding in another order, which 30 updates carry on.
            self.assertAlmostEqual(one["loss"], other["loss"], delta=1e-4, msg=one["step"])
            self.assertEqual(one["tokens"], other["tokens"])
        self.train("again", "--moe-expert-rank-capacity-factor", "1.3")
        self.assertEqual(self.weights("limited"), self.weights("again"))
        stopped = ["--moe-expert-rank-capacity-factor", "1.3", "--exit-after-step"]
        self.train("resumed", *stopped, str(STEPS // 2))
        self.train("resumed", *stopped, str(STEPS), "--load", HERE.folder / "resumed")
        self.assertEqual(self.weights("limited"), self.weights("resumed"))

    # Two experts of each of four ranks; one micro-batch, so one placement of copies.
    def expect_loads_of_ranks(self, even, copied):
        self.assertTrue(even and copied)
        for one, other in zip(even, copied):
            for layer, after in zip(one["experts"], other["experts"]):
                rows = layer["rows"]
                self.assertEqual(layer["rank_rows"], [sum(rows[i:i + 2]) for i in range(0, 8, 2)])
                self.assertEqual(layer["rank_imbalance"], 4 * max(layer["rank_rows"]) / sum(rows))
                # The first step has the same weights. Copies move rows until each of the three
                # other ranks lacks less than 1/32 of the mean.
                self.assertEqual(after["rows"], rows)
                self.assertEqual(sum(after["rank_rows"]), sum(rows))
                self.assertLessEqual(after["rank_imbalance"], layer["rank_imbalance"])
                self.assertLess(after["rank_imbalance"], 1 + 3 / 32)
            self.assertEqual(one["rank_load_imbalance"],
                             max(layer["rank_imbalance"] for layer in one["experts"]))

    def test_copies_of_hot_experts_need_less_room_for_the_same_numbers(self):
        self.train("even")
        copied = ["--moe-expert-rank-capacity-factor", "1.3", "--moe-expert-clones", "2"]
        self.train("copied", *copied)
        lines = metrics(HERE.folder / "copied")
        self.assertFalse(any("expert_rooms_lacked" in line for line in lines))
        even = metrics(HERE.folder / "even")
        for one, other in zip(even, lines):
            self.assertAlmostEqual(one["loss"], other["loss"], delta=1e-4, msg=one["step"])
        self.expect_loads_of_ranks(even[:1], lines[:1])
        self.train("continued", *copied, "--exit-after-step", str(STEPS // 2))
        self.train("continued", *copied, "--load", HERE.folder / "continued")
        self.assertEqual(self.weights("copied"), self.weights("continued"))

    # Room for the most that may come, in which layers work one after the other, and a stash for
    # what they keep that is too small for some steps.
    def test_a_stash_changes_no_bit_where_it_suffices_and_is_made_up_for_where_not(self):
        self.train("kept")
        self.train("packed", "--moe-paged-stash", "--moe-paged-stash-buffer-size-factor-cuda", "4",
                   "--moe-paged-stash-page-size", "2")
        self.assertFalse(any("expert_rooms_lacked" in line for line in
                             metrics(HERE.folder / "packed")))
        self.assertEqual(self.weights("kept"), self.weights("packed"))

        flags = ["--moe-paged-stash", "--moe-paged-stash-page-size", "2",
                 "--moe-paged-stash-buffer-size-factor-cuda", "1.15"]
        self.train("small", *flags)
        small = metrics(HERE.folder / "small")
        lacked = [line for line in small if "expert_rooms_lacked" in line]
        self.assertTrue(0 < len(lacked) < STEPS, f"{len(lacked)} steps lacked pages")
        self.assertTrue(all(line["expert_stash_needed"] > 1.15 for line in lacked))
        self.assertFalse(any("expert_room_needed" in line for line in lacked))
        for one, other in zip(metrics(HERE.folder / "kept"), small):
            self.assertAlmostEqual(one["loss"], other["loss"], delta=1e-4, msg=one["step"])
        stopped = [*flags, "--exit-after-step"]
        self.train("stopped", *stopped, str(STEPS // 2))
        self.train("stopped", *stopped, str(STEPS), "--load", HERE.folder / "stopped")
        self.assertEqual(self.weights("small"), self.weights("stopped"))

    def test_says_which_room_would_have_sufficed(self):
        flags = [flag for flag in MODEL if flag != "--quiet"]
        done = run("train", *flags, "--no-save", "--moe-expert-rank-capacity-factor", "1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("ran a second time, in rounds", " ".join(done.stderr.split()))
        self.assertIn("--moe-expert-rank-capacity-factor 1.", done.stderr)


main()
