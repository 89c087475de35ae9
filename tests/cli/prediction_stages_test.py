#!/usr/bin/env python3
"""Layers of multi-token prediction in several stages of a pipeline: runs go on from one layout to
another as one rank does, their checkpoints are evaluated and exported, plan shows the stages, and
what has no meaning is refused.

Usage: prediction_stages_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import CONFIG, GLM, HERE, main, metrics, run, write_corpus

PREDICTION = ("--mtp-num-layers", 2)


def setUpModule():
    config = CONFIG | GLM | {"num_nextn_predict_layers": 2}
    (HERE.folder / "config.json").write_text(json.dumps(config))
    write_corpus(60, 50)


def stages(text, ranks=2):
    return ("--ranks", ranks, "--pipeline-model-parallel-size", ranks,
            "--pipeline-model-parallel-layout", text)


def train(name, steps, *flags):
    return run("train", "--model", HERE.folder / "config.json", "--data-path",
               HERE.folder / "corpus", "--seq-length", 32, "--lr", "1e-2", "--lr-decay-style",
               "constant", "--micro-batch-size", 1, "--global-batch-size", 4, "--split",
               "90,10,0", "--moe-aux-loss-coeff", "0.01", "--compute-dtype", "fp64",
               "--train-iters", steps, "--threads", 1, "--save", HERE.folder / name, *flags)


def weights(name, step):
    """Of the checkpoint: name to the hashes of what is stored of it, whichever file has it."""
    folder = HERE.folder / name / "checkpoints" / f"step_{step:08d}"
    index = json.loads((folder / "index.json").read_text())
    return {tensor["name"]: [part["xxh3"] for part in tensor["slices"]]
            for tensor in index["tensors"] if tensor["role"] == "parameter"}


class PredictionStages(unittest.TestCase):
    def passes(self, done):
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def close(self, found, expected):
        # Sums of some thousand terms in fp64, over six steps.
        self.assertLess(abs(found - expected), 1e-10 * max(1, abs(expected)))

    def trained(self, name, steps, *flags):
        self.passes(train(name, steps, *PREDICTION, *flags))

    def test_runs_go_on_in_other_layouts(self):
        self.trained("one", 6)
        self.trained("moved", 2, *stages("Ettm|mL"))
        self.trained("moved", 4, *stages("Et|t|m|m||L"), "--load", HERE.folder / "moved")
        self.trained("moved", 5, "--load", HERE.folder / "moved")
        self.trained("moved", 6, *stages("Ett|m|mL", 3), "--load", HERE.folder / "moved")
        one, moved = metrics(HERE.folder / "one"), metrics(HERE.folder / "moved")
        one, moved = ([line for line in lines if "loss" in line] for lines in (one, moved))
        self.assertEqual(len(one), 6)
        for found, expected in zip(moved, one, strict=True):
            for key in ("loss", "mtp_1_loss", "mtp_2_loss", "grad_norm", "load_balancing_loss"):
                self.close(found[key], expected[key])
            self.assertEqual([(line["layer"], line["rows"]) for line in found["experts"]],
                             [(line["layer"], line["rows"]) for line in expected["experts"]])

    def test_checkpoints_are_evaluated_and_exported(self):
        self.trained("spread", 2, *stages("Ettm|mL"))
        evaluate = ("eval", "--load", HERE.folder / "spread", "--data-path",
                    HERE.folder / "corpus", "--split", "90,10,0", "--json")
        one, pipeline = (json.loads(self.passes(run(*evaluate, *flags)))["val_loss"]
                         for flags in ((), stages("Ettm|mL")))
        self.close(pipeline, one)
        self.passes(run("convert", "--load", HERE.folder / "spread", "--save", HERE.folder / "hf",
                        "--dtype", "fp32"))
        for name, flags in {"back": (), "back_spread": stages("Et|t|m|m||L")}.items():
            self.trained(name, 1, "--pretrained-checkpoint", HERE.folder / "hf", "--lr", 0, *flags)
        self.assertIn("layers.3.w_mtp", weights("back", 1))
        self.assertEqual(weights("back_spread", 1), weights("back", 1))

    def test_plan_shows_the_stages_of_each_rank(self):
        planned = self.passes(run("plan", "--model", HERE.folder / "config.json", "--seq-length",
                                  32, "--global-batch-size", 4, *PREDICTION,
                                  *stages("Et|t|m|m||L")))
        self.assertRegex(planned, r"\n +0 .* Et\|m\|\n +1 .* t\|m\|L\n")

    def test_what_has_no_meaning_is_refused(self):
        def refused(text, layout, *flags):
            done = train("refused", 1, *PREDICTION, *stages(layout), *flags)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(text, " ".join(done.stderr.split()))
        refused("MTP layers (m) must come after all decoder layers (t)", "Etm|tmL")
        refused("L (loss) must stand once, at the very end", "EttmL|m")
        refused("its m are on 2 ranks of the pipeline, and --mtp-use-repeated-layer makes them one "
                "layer", "Ettm|mL", "--mtp-use-repeated-layer")


if __name__ == "__main__":
    main()
