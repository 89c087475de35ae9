#!/usr/bin/env python3
"""Training with products in 8 bits: what the options refuse, and that runs in every recipe learn,
go on after a checkpoint with the same bits, and do not depend on the number of threads.

Usage: low_precision_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, metrics, run
from rank_runs import make_corpus

RECIPES = {"delayed": ("--fp8-format", "hybrid", "--fp8-amax-history-len", 2,
                       "--fp8-amax-compute-algo", "max"),
           "tensorwise": ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
           "blockwise": ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise"),
           "mxfp8": ("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8")}
FP4 = {"nvfp4": ("--fp4-format", "e2m1")}
MESSAGES = {"messages": ("--moe-dispatch-fwd-dtype", "mxfp8", "--moe-combine-bwd-dtype", "mxfp8")}
STORED = {"stored": ("--activation-func-fp8-input-store",)}


def setUpModule():
    make_corpus()


def train(name, *flags, steps=6, threads=2):
    return run("train", "--model", HERE.folder / "config.json", "--data-path",
               HERE.folder / "corpus", "--bf16", "--lr", "1e-2", "--lr-decay-style", "constant",
               "--micro-batch-size", 2, "--global-batch-size", 8, "--split", "100,0,0",
               "--train-iters", steps, "--threads", threads, "--quiet", "--save",
               HERE.folder / name, *flags)


class LowPrecision(unittest.TestCase):
    def losses(self, name, *flags, **options):
        done = train(name, *flags, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [line["loss"] for line in metrics(HERE.folder / name) if "loss" in line]

    def test_every_recipe_learns(self):
        plain = self.losses("bf16")
        for name, flags in (RECIPES | FP4 | MESSAGES | STORED).items():
            losses = self.losses(name, *flags)
            self.assertNotEqual(losses, plain, name)
            self.assertLess(losses[-1], losses[0] - 0.3, name)
            # Quantisation moves a product by some 4 % of its size, and the loss by far less. (In so
            # small a model blocks of 32 and 128 are the same.)
            self.assertLess(abs(losses[-1] - plain[-1]), 0.05 * plain[-1], name)

    def test_threads_and_a_checkpoint_between_change_no_bit(self):
        for name, flags in (RECIPES | FP4 | MESSAGES | STORED).items():
            whole = self.losses(f"{name}_whole", *flags)
            self.assertEqual(whole, self.losses(f"{name}_one", *flags, threads=1), name)
            self.losses(f"{name}_cut", *flags, steps=3)
            resumed = self.losses(f"{name}_cut", *flags, "--load", HERE.folder / f"{name}_cut")
            self.assertEqual(resumed[-3:], whole[-3:], name)

    def test_a_run_goes_on_with_another_recipe(self):
        self.losses("changes", *RECIPES["blockwise"], steps=3)
        done = train("changes", *RECIPES["mxfp8"], "--load", HERE.folder / "changes")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("--fp8-recipe", done.stdout + done.stderr)

    # As the training step has them, and with the same histories when the run is over.
    def test_evaluation_multiplies_codes(self):
        def evaluated(name, *flags):
            done = run("eval", "--load", HERE.folder / name, "--data-path", HERE.folder / "corpus",
                       *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            return re.search(r"validation loss ([0-9.]+)", done.stdout)[1]

        for recipe, flags in (RECIPES | FP4 | MESSAGES).items():
            name = f"{recipe}_evaluated"
            self.losses(name, *flags, "--split", "90,10,0", "--eval-iters", 2, "--eval-interval", 6)
            found = [line["val_loss"] for line in metrics(HERE.folder / name)
                     if "val_loss" in line]
            self.assertEqual(evaluated(name), f"{found[-1]:.4f}", recipe)
        # Another recipe is asked for.
        every = {evaluated("tensorwise_evaluated", *flags)
                 for flags in (RECIPES | FP4).values()}
        self.assertGreater(len(every), 1, every)

    # Histories that a checkpoint does not have, or has for other numbers of steps, begin anew.
    def test_histories_come_and_go(self):
        for before, after in ((("--fp8-amax-history-len", 3), ("--fp8-amax-history-len", 2)),
                              (("--fp8-recipe", "tensorwise"), ()),
                              ((), ("--fp8-recipe", "tensorwise"))):
            name = "_".join(map(str, ("histories", *before, "then", *after)))
            self.losses(name, "--fp8-format", "hybrid", *before, steps=3)
            losses = self.losses(name, "--fp8-format", "hybrid", *after, "--load",
                                 HERE.folder / name)
            self.assertLess(losses[-1], losses[0], name)

    # Without a bf16 copy of the weights: the codes are those of what it would be, to the bit. So a
    # checkpoint goes on with and without it as if nothing had changed.
    def test_weights_are_kept_as_masters_alone(self):
        flag = ("--fp8-param-gather",)
        for recipe, flags in RECIPES.items():
            plain = self.losses(f"{recipe}_with_copies", *flags)
            whole = self.losses(f"{recipe}_masters", *flags, *flag)
            self.assertEqual(whole, plain, recipe)
            for before, after in ((flag, flag), (flag, ()), ((), flag)):
                name = "_".join((recipe, "from", *before, "to", *after))
                self.losses(name, *flags, *before, steps=3)
                self.losses(f"{name}_weights", *flags, *after, "--no-load-optim", "--load",
                            HERE.folder / name, steps=3)
                losses = self.losses(name, *flags, *after, "--load", HERE.folder / name)
                self.assertEqual(losses, whole, name)

    # Ranks gather codes of shards. Losses part by the order of sums alone, as in bf16.
    def test_masters_are_the_same_in_other_layouts(self):
        for recipe, flags in RECIPES.items():
            flags = (*flags, "--fp8-param-gather")
            one = self.losses(f"{recipe}_masters_one_rank", *flags)
            for layout in (("--use-distributed-optimizer",),
                           ("--use-distributed-optimizer", "--overlap-param-gather",
                            "--overlap-grad-reduce"),
                           ("--use-megatron-fsdp",), ("--tensor-model-parallel-size", 2),
                           ("--optimizer", "dist_muon")):
                if layout[0] == "--optimizer":
                    one = self.losses(f"{recipe}_muon", *flags, "--optimizer", "muon")
                name = "_".join(map(str, (recipe, "masters", *layout)))
                losses = self.losses(name, *flags, "--ranks", 2, *layout)
                for other, own in zip(losses, one, strict=True):
                    self.assertLess(abs(other - own), 0.01 * own, name)

    # What leaves a checkpoint is its masters, whatever the run that reads it keeps.
    def test_masters_are_exported(self):
        flags = (*RECIPES["blockwise"], "--fp8-param-gather")
        self.losses("exported", *flags, steps=3)
        for dtype in ("bf16", "fp32"):
            done = run("convert", "--load", HERE.folder / "exported", "--save",
                       HERE.folder / f"exported_{dtype}", "--dtype", dtype)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.losses("copied", *RECIPES["blockwise"], steps=3)
        done = run("convert", "--load", HERE.folder / "copied", "--save",
                   HERE.folder / "copied_bf16", "--dtype", "bf16")
        self.assertEqual(done.returncode, 0, done.stderr)
        for path in sorted((HERE.folder / "copied_bf16").glob("*.safetensors")):
            self.assertEqual((HERE.folder / "exported_bf16" / path.name).read_bytes(),
                             path.read_bytes())
        losses = []
        for name in ("exported", "copied"):
            done = run("eval", "--load", HERE.folder / name, "--data-path",
                       HERE.folder / "corpus", "--split", "90,10,0")
            self.assertEqual(done.returncode, 0, done.stderr)
            losses.append(re.search(r"validation loss ([0-9.]+)", done.stdout)[1])
        self.assertEqual(losses[0], losses[1])

    def test_gpus_compute_4_bits_in_fp32(self):
        done = run("plan", "--model", "olmoe-1b-7b", "--gpus", "1xh100", "--bf16", "--num-layers",
                   2, "--fp4-format", "e2m1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("no products in 4 bits, and they are computed in fp32",
                      " ".join(done.stderr.split()))
        in_8 = run("plan", "--model", "olmoe-1b-7b", "--gpus", "1xh100", "--bf16", "--num-layers",
                   2, "--fp8-format", "e4m3")

        def speed(plan):
            return float(re.search(r"speed: (\d+) tokens/s", plan.stdout)[1])

        self.assertLess(speed(done), 0.5 * speed(in_8))

    # The scales are the same, so the losses part by their rounding alone, as in bf16.
    def test_histories_are_the_same_in_other_layouts(self):
        self.losses("one_rank", *RECIPES["delayed"], steps=3)
        one = self.losses("one_rank", *RECIPES["delayed"], "--load", HERE.folder / "one_rank")
        for layout in (("--expert-model-parallel-size", 2, "--moe-token-dispatcher-type",
                        "alltoall"), ("--tensor-model-parallel-size", 2),
                       ("--use-distributed-optimizer",)):
            name = "_".join(map(str, ("ranks", *layout)))
            self.losses(name, *RECIPES["delayed"], "--ranks", 2, *layout, steps=3)
            losses = self.losses(name, *RECIPES["delayed"], "--load", HERE.folder / name)
            for other, own in zip(losses[-3:], one[-3:], strict=True):
                self.assertLess(abs(other - own), 0.01 * own, name)

    def test_rows_in_8_bits_are_the_same_in_other_layouts(self):
        one = self.losses("rows_one_rank", *MESSAGES["messages"])
        for dispatcher in ("allgather", "alltoall", "flex"):
            losses = self.losses(f"rows_{dispatcher}", *MESSAGES["messages"], "--ranks", 2,
                                 "--expert-model-parallel-size", 2,
                                 "--moe-token-dispatcher-type", dispatcher)
            for other, own in zip(losses, one, strict=True):
                self.assertLess(abs(other - own), 0.01 * own, dispatcher)

    # The rows take half as many bytes and a scale for each 32; those that are summed on the way back
    # stay as they are.
    def test_a_plan_counts_fewer_bytes_between_ranks(self):
        def exchanged(*flags):
            done = run("plan", "--model", "olmoe-1b-7b", "--bf16", "--gpus", "8xh100",
                       "--expert-model-parallel-size", 8, "--moe-token-dispatcher-type",
                       "alltoall", "--json", *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            links = json.loads(done.stdout)["rank_classes"][0]["links"]
            return next(link["bytes"] for link in links if link["group"] == "etp-ep")

        # Of four exchanges of rows, and one in a hundred for weights and experts of tokens.
        expected = (1 - 2112 / 4096) / 4
        whole = exchanged()
        one = exchanged(*MESSAGES["messages"][:2])
        both = exchanged(*MESSAGES["messages"])
        self.assertAlmostEqual((whole - one) / whole, expected, delta=0.02 * expected)
        self.assertAlmostEqual((one - both) / whole, expected, delta=0.02 * expected)

    # Where experts have few rows and weights are quantised for them alone.
    def test_a_plan_leaves_products_that_8_bits_make_slower(self):
        def planned(*flags):
            done = run("plan", "--model", "olmoe-1b-7b", "--num-layers", 1, "--bf16", "--gpus",
                       "1xh100", "--seq-length", 512, *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            return " ".join(done.stderr.split()), done.stdout

        note, text = planned(*RECIPES["tensorwise"])
        self.assertIn("Note: no product is in 8 bits: by the plan of this step all are faster in "
                      "bf16 (--fp8-modules).", note)
        self.assertNotIn("quantized", text)
        note, text = planned(*RECIPES["tensorwise"], "--fp8-modules", "experts")
        self.assertEqual(note, "")
        self.assertIn("quantized_grouped_linear", text)
        self.assertNotIn("quantized_linear", text)

    # Of each map's operands, and of a tensor with a scale of its own at least the largest element.
    def test_shares_of_codes_are_logged(self):
        for recipe, flags in RECIPES.items():
            plain = self.losses(f"{recipe}_not_counted", *flags)
            self.assertFalse([key for line in metrics(HERE.folder / f"{recipe}_not_counted")
                              for key in line if key.startswith("fp8")])
            name = f"{recipe}_counted"
            self.assertEqual(self.losses(name, *flags, "--log-fp8-saturation"), plain, recipe)
            for line in metrics(HERE.folder / name):
                if "loss" not in line:
                    continue
                places = [(entry["layer"], entry["map"]) for entry in line["fp8"]]
                self.assertEqual(len(set(places)), len(places))
                for layer in (0, 1):
                    self.assertLessEqual({(layer, "w_qkv"), (layer, "w_down")}, set(places))
                self.assertFalse([place for place in places if "router" in place[1]])
                for operand in ("input", "weight", "gradient"):
                    for what in ("saturated", "zero"):
                        shares = [entry[operand][what] for entry in line["fp8"]]
                        self.assertGreaterEqual(min(shares), 0)
                        self.assertLessEqual(max(shares), 1)
                        self.assertEqual(line[f"fp8_{operand}_{what}"], max(shares))
                        if recipe == "tensorwise" and what == "saturated":
                            self.assertGreater(min(shares), 0, line)

    def refused(self, text, *flags, command="plan"):
        done = run(command, "--model", HERE.folder / "config.json", *flags)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(text, " ".join(done.stderr.split()))

    def test_what_does_not_go_together_is_refused(self):
        self.refused("--fp8-recipe: it belongs to --fp8-format", "--fp8-recipe", "blockwise")
        self.refused("--fp8-recipe takes delayed, tensorwise, blockwise or mxfp8, not 'custom'",
                     "--fp8-format", "e4m3", "--fp8-recipe", "custom")
        self.refused("--fp8-margin: it belongs to --fp8-recipe delayed", *RECIPES["mxfp8"],
                     "--fp8-margin", 1)
        self.refused("--log-fp8-saturation: it belongs to --fp8-format", "--log-fp8-saturation")
        self.refused("--no-fp8-wgrad: it belongs to --fp8-format", "--no-fp8-wgrad")
        self.refused("--fp8-amax-history-len: it belongs to --fp8-recipe delayed",
                     "--fp8-amax-history-len", 16)
        self.refused("--fp8-format hybrid: scales of blocks are for e4m3", "--fp8-format",
                     "hybrid", "--fp8-recipe", "mxfp8")
        self.refused("--first-last-layers-bf16: it belongs to --fp8-format",
                     "--first-last-layers-bf16")
        self.refused("--num-layers-at-end-in-bf16: it belongs to --first-last-layers-bf16",
                     *RECIPES["mxfp8"], "--num-layers-at-end-in-bf16", 1)
        self.refused("--moe-dispatch-fwd-dtype takes bf16 or mxfp8, not 'fp8'",
                     "--moe-dispatch-fwd-dtype", "fp8")
        self.refused("1 layers at the start and 2 at the end are more than the 2",
                     *RECIPES["mxfp8"], "--first-last-layers-bf16", "--num-layers-at-end-in-bf16",
                     2)

    def test_gpus_multiply_codes_or_say_that_they_do_not(self):
        for recipe, kernel in (("tensorwise", "sm90 codes"), ("blockwise", "sm90 code blocks"),
                               ("mxfp8", "widened")):
            done = run("plan", "--model", "olmoe-1b-7b", "--num-layers", 1, "--bf16",
                       "--seq-length", 512, *RECIPES[recipe], "--fp8-modules", "all", "--gpus",
                       "1xh100")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stdout, f"quantized_grouped_linear +{kernel} 2")
            self.assertEqual("Use --fp8-recipe tensorwise" in " ".join(done.stderr.split()),
                             recipe == "mxfp8", done.stderr)

    # Transposed codes are counted by the rows that are expected, not by those that there is room for.
    def test_room_for_experts_takes_no_time(self):
        seconds = []
        for room in (1.5, 6):
            done = run("plan", "--model", "qwen3-30b-a3b", "--num-layers", 1, "--bf16",
                       "--seq-length", 1024, "--global-batch-size", 8,
                       "--expert-model-parallel-size", 8, "--moe-expert-rank-capacity-factor", room,
                       *RECIPES["blockwise"], "--gpus", "8xh100")
            self.assertEqual(done.returncode, 0, done.stderr)
            seconds.append(re.search(r"expert products +(.*?) +[0-9.]+ %", done.stdout)[1])
        self.assertEqual(seconds[0], seconds[1])

    def test_inspect_shows_codes_and_scales(self):
        done = run("inspect", "--model", HERE.folder / "config.json", *RECIPES["blockwise"])
        self.assertEqual(done.returncode, 0, done.stderr)
        for part in ("quantize", "quantized_grouped_linear_weight_gradient", "f8e4m3"):
            self.assertIn(part, done.stdout)


if __name__ == "__main__":
    main()
