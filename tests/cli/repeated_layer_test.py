#!/usr/bin/env python3
"""Multi-token prediction with one layer for all depths: what the options refuse, what plan and runs
say of it, that runs go on after a checkpoint, with recomputation and on several ranks as they do
without, and that the layer leaves for a Hugging Face folder and comes back.

Usage: repeated_layer_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import CONFIG, GLM, HERE, main, metrics, run, write_corpus

DEPTHS = 2
REPEATED = ("--mtp-num-layers", DEPTHS, "--mtp-use-repeated-layer")
LAYERS, TOPK, BATCH, SEQUENCE = 2, 2, 4, 32


def setUpModule():
    (HERE.folder / "config.json").write_text(json.dumps(CONFIG | GLM))
    write_corpus(60, 50)


def train(name, *flags, steps=6):
    return run("train", "--model", HERE.folder / "config.json", "--data-path",
               HERE.folder / "corpus", "--seq-length", SEQUENCE, "--lr", "1e-2",
               "--lr-decay-style", "constant", "--micro-batch-size", 1, "--global-batch-size",
               BATCH, "--split", "100,0,0", "--moe-aux-loss-coeff", "0.01", "--train-iters", steps,
               "--threads", 1, "--save", HERE.folder / name, *flags)


def tensors(name, step=6):
    """Of the checkpoint: name to what is stored of it, its hash included."""
    folder = HERE.folder / name / "checkpoints" / f"step_{step:08d}"
    index = json.loads((folder / "index.json").read_text())
    return {tensor["name"]: tensor for tensor in index["tensors"]}


class RepeatedLayer(unittest.TestCase):
    maxDiff = 2000

    def trained(self, name, *flags, **options):
        done = train(name, *flags, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout + done.stderr

    def test_it_is_one_layer_in_all_that_is_said(self):
        said = self.trained("said", *REPEATED)
        self.assertIn("2 layers and 1 of multi-token prediction used 2 times", " ".join(said.split()))
        names = {name for name in tensors("said") if name.startswith("layers.")}
        self.assertIn("layers.2.w_mtp", names)
        self.assertIn("layers.2.expert_bias", names)
        self.assertFalse([name for name in names if name.startswith("layers.3.")])
        for line in metrics(HERE.folder / "said"):
            self.assertIn("mtp_2_loss", line)
            rows = {entry["layer"]: sum(entry["rows"]) for entry in line["experts"]}
            tokens = BATCH * SEQUENCE * TOPK
            self.assertEqual(rows, {1: tokens, LAYERS: DEPTHS * tokens})
            self.assertEqual({entry["dropped"] for entry in line["experts"]}, {0})

    def test_plan_counts_one_layer_that_works_for_each_depth(self):
        def planned(*flags):
            done = run("plan", "--model", HERE.folder / "config.json", "--seq-length", SEQUENCE,
                       "--ranks", 1, *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            text = " ".join(done.stdout.split())
            return (text.split(" step ")[0], re.search("parameters [0-9.]+ KiB gradients .* B inputs", text).group(),
                    re.search("flops ([0-9.]+ M) of the model", text).group(1))
        one = planned("--mtp-num-layers", 1)
        apart = planned("--mtp-num-layers", DEPTHS)
        repeated = planned(*REPEATED)
        self.assertIn("1 layer of multi-token prediction used 2 times", repeated[0])
        self.assertEqual(repeated[0].replace(" used 2 times", ""), one[0])
        self.assertEqual(repeated[1], one[1])
        self.assertEqual(repeated[2], apart[2])

    def test_a_checkpoint_between_changes_no_bit(self):
        self.trained("whole", *REPEATED)
        self.trained("cut", *REPEATED, steps=3)
        self.trained("cut", *REPEATED, "--load", HERE.folder / "cut")
        self.assertEqual(tensors("cut"), tensors("whole"))

    def test_recomputation_changes_no_bit(self):
        self.trained("plain", *REPEATED, "--hidden-dropout", "0.1")
        self.trained("recomputed", *REPEATED, "--hidden-dropout", "0.1", "--recompute-granularity",
                     "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
        self.assertEqual(tensors("recomputed"), tensors("plain"))

    def test_layouts_have_the_losses_of_one_rank(self):
        def losses(name, *flags):
            self.trained(name, *REPEATED, "--compute-dtype", "fp64", *flags)
            return [[line[key] for key in ("loss", "mtp_1_loss", "mtp_2_loss", "grad_norm",
                                           "load_balancing_loss")]
                    for line in metrics(HERE.folder / name)]
        one = losses("one")
        layouts = {
            "fsdp": ("--ranks", 2, "--use-megatron-fsdp"),
            "pp_ep": ("--ranks", 4, "--pipeline-model-parallel-size", 2,
                      "--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1,
                      "--pipeline-model-parallel-layout", "Ett|mmL"),
            "tp_cp": ("--ranks", 4, "--tensor-model-parallel-size", 2, "--context-parallel-size", 2,
                      "--sequence-parallel", "--expert-tensor-parallel-size", 1),
        }
        for name, flags in layouts.items():
            for found, expected in zip(losses(name, *flags), one, strict=True):
                for a, b in zip(found, expected, strict=True):
                    # Sums of some thousand terms in fp64, over six steps.
                    self.assertLess(abs(a - b), 1e-10 * max(1, abs(b)), name)

    def test_the_layer_leaves_and_comes_back(self):
        self.trained("exported", *REPEATED)
        done = run("convert", "--load", HERE.folder / "exported", "--save", HERE.folder / "hf")
        self.assertEqual(done.returncode, 0, done.stderr)
        config = json.loads((HERE.folder / "hf" / "config.json").read_text())
        self.assertEqual(config["num_nextn_predict_layers"], 1)
        index = (HERE.folder / "hf" / "model.safetensors").read_bytes()
        self.assertIn(b"model.layers.2.eh_proj.weight", index)
        self.assertNotIn(b"model.layers.3.", index)
        self.trained("again", *REPEATED, "--pretrained-checkpoint", HERE.folder / "hf", "--model",
                     HERE.folder / "hf", "--lr", 0, steps=1)
        before, after = tensors("exported"), tensors("again", 1)
        for name, tensor in before.items():
            if not name.startswith(("exp_", "master.")) and "expert_bias" not in name:
                self.assertEqual(after[name], tensor, name)

    def refused(self, text, *flags):
        done = train("refused", *flags)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(text, " ".join(done.stderr.split()))

    def test_what_does_not_go_together_is_refused(self):
        self.refused("--mtp-use-repeated-layer: it belongs to --mtp-num-layers",
                     "--mtp-use-repeated-layer")
        self.refused("it has 1 MTP layers (m), the model has 2", *REPEATED, "--ranks", 2,
                     "--pipeline-model-parallel-size", 2, "--pipeline-model-parallel-layout",
                     "Ett|mL")
        self.trained("shared", *REPEATED, steps=1)
        self.refused("mtp_use_repeated_layer: true saved, false now", "--mtp-num-layers", DEPTHS,
                     "--load", HERE.folder / "shared")


if __name__ == "__main__":
    main()
