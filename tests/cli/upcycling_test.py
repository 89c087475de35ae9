#!/usr/bin/env python3
"""Upcycling with the whole program: what is saved before the first step, that the first loss is the
dense model's, in several layouts, from Hugging Face folders and from runs; that such a run goes on
like any other; and what is refused.

Usage: upcycling_test.py TROUPE SOURCE_FOLDER
"""

import json
import sys
import pathlib
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, metrics, run, write_corpus

DENSE_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
# A dense model of flags alone: biases, and an activation without a linear half.
DENSE_FLAGS = ("--num-layers", 2, "--hidden-size", 32, "--ffn-hidden-size", 64,
               "--num-attention-heads", 4, "--max-position-embeddings", 64,
               "--normalization", "LayerNorm", "--vocab-size", 272, "--add-qkv-bias")
GRANULAR = ("--moe-use-upcycling", "--num-experts", 8, "--moe-router-topk", 4,
            "--moe-upcycling-granularity", 2)
LAYOUTS = {
    "one": ("--threads", 1),
    "ep4_tp2": ("--ranks", 8, "--tensor-model-parallel-size", 2, "--expert-model-parallel-size", 4,
                "--expert-tensor-parallel-size", 1),
    "ep2_pp2_fsdp": ("--ranks", 8, "--pipeline-model-parallel-size", 2,
                     "--expert-model-parallel-size", 2, "--use-megatron-fsdp"),
}


def train(save, *flags, steps=1):
    return run("train", "--data-path", HERE.folder / "corpus", "--seq-length", 32, "--lr", "1e-3",
               "--train-iters", steps, "--global-batch-size", 8, "--split", "1,0,0",
               "--compute-dtype", "fp64", "--save", save, *flags)


def first_loss(save):
    return next(line["loss"] for line in metrics(save) if "loss" in line)


def setUpModule():
    write_corpus(30, 40)
    folder = HERE.folder / "dense_config"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DENSE_CONFIG))
    for name, model in (("dense", ("--model", folder)), ("biased", DENSE_FLAGS)):
        done = train(HERE.folder / name, *model, "--threads", 1, steps=3)
        assert done.returncode == 0, done.stderr
    done = run("convert", "--load", HERE.folder / "dense", "--save", HERE.folder / "dense_hf")
    assert done.returncode == 0, done.stderr


class Upcycling(unittest.TestCase):
    def done(self, process):
        self.assertEqual(process.returncode, 0, process.stderr)
        return process

    def from_folder(self):
        folder = HERE.folder / "dense_hf"
        return ("--model", folder / "config.json", "--pretrained-checkpoint", folder)

    def test_every_layout_starts_as_the_dense_model(self):
        self.done(train(HERE.folder / "goes_on", *self.from_folder(), "--threads", 1))
        dense = first_loss(HERE.folder / "goes_on")
        exported = {}
        for name, layout in LAYOUTS.items():
            save = HERE.folder / f"moe_{name}"
            done = self.done(train(save, *self.from_folder(), *GRANULAR, *layout))
            self.assertIn("8 experts of inner size 32 from each network of 64", done.stderr)
            self.assertNotIn("no fixed sum", done.stderr)
            # The same terms in another order.
            self.assertAlmostEqual(first_loss(save), dense, delta=1e-12, msg=name)
            out = HERE.folder / f"hf_{name}"
            self.done(run("convert", "--load", save, "--ckpt-step", 0, "--save", out))
            exported[name] = (out / "model.safetensors").read_bytes()
        self.assertEqual(len(set(exported.values())), 1, "step 0 has the same bits in every layout")
        config = json.loads((HERE.folder / "hf_one" / "config.json").read_text())
        self.assertEqual(config["architectures"], ["Qwen3MoeForCausalLM"])
        self.assertEqual(config["moe_intermediate_size"], 32)

    def test_a_run_is_upcycled_and_goes_on(self):
        for name, flags in (("by_load", ("--load", HERE.folder / "biased")),
                            ("by_pretrained",
                             ("--pretrained-checkpoint", HERE.folder / "biased"))):
            save = HERE.folder / name
            start = (*DENSE_FLAGS, *GRANULAR,
                     "--threads", 1)
            done = self.done(train(save, *start, *flags))
            self.assertIn("Upcycled", done.stderr)
            plain = HERE.folder / f"plain_{name}"
            self.done(train(plain, *DENSE_FLAGS, "--threads", 1,
                            "--pretrained-checkpoint", HERE.folder / "biased"))
            self.assertAlmostEqual(first_loss(save), first_loss(plain), delta=1e-12)
            # The same flags go on from the run's own checkpoints, once --load names them.
            done = self.done(train(save, *start, "--pretrained-checkpoint", HERE.folder / "biased",
                                   "--load", save, "--override-opt_param-scheduler", steps=2))
            self.assertIn("(step 1)", done.stderr)
            self.assertNotIn("Upcycled", done.stderr)

    def test_expert_biases_begin_with_zeros(self):
        # A dense run has none to load.
        save = HERE.folder / "biases"
        self.done(train(save, *DENSE_FLAGS, *GRANULAR, "--moe-router-score-function", "sigmoid",
                        "--moe-router-enable-expert-bias", "--pretrained-checkpoint",
                        HERE.folder / "biased", "--threads", 1))
        plain = HERE.folder / "no_biases"
        self.done(train(plain, *DENSE_FLAGS, "--threads", 1, "--pretrained-checkpoint",
                        HERE.folder / "biased"))
        self.assertAlmostEqual(first_loss(save), first_loss(plain), delta=1e-12)

    def test_a_router_without_a_fixed_sum_is_announced(self):
        done = self.done(train(HERE.folder / "before", *self.from_folder(), *GRANULAR,
                               "--moe-router-pre-softmax", "--threads", 1))
        self.assertIn("no fixed sum", done.stderr)

    def test_what_cannot_be_is_refused(self):
        moe = HERE.folder / "moe_source"
        self.done(train(moe, *self.from_folder(), *GRANULAR, "--threads", 1))
        wide = ("--model", HERE.folder / "dense_config", "--hidden-size", 48)
        for flags, phrase in (
                ((*self.from_folder(), "--moe-upcycling-granularity", 2),
                 "--moe-upcycling-granularity needs --moe-use-upcycling"),
                (("--model", HERE.folder / "dense_config", *GRANULAR),
                 "Give --pretrained-checkpoint DIR"),
                ((*self.from_folder(), "--moe-use-upcycling"), "--num-experts"),
                ((*self.from_folder(), *GRANULAR, "--moe-router-topk", 3), "must be multiples of"),
                ((*self.from_folder(), *GRANULAR, "--moe-ffn-hidden-size", 40),
                 "2 x --moe-ffn-hidden-size 40 is 80"),
                ((*wide, *GRANULAR, "--pretrained-checkpoint", HERE.folder / "dense_hf"),
                 "has the shape"),
                ((*self.from_folder(), *GRANULAR, "--pretrained-checkpoint", moe),
                 "has experts already"),
                ((*self.from_folder(), *GRANULAR, "--moe-shared-expert-intermediate-size", 32),
                 "Leave --moe-shared-expert-intermediate-size out")):
            save = HERE.folder / "refused"
            done = train(save, *flags, "--threads", 1)
            self.assertEqual(done.returncode, 2, f"{phrase}: {done.stderr}")
            self.assertIn(phrase, " ".join(done.stderr.split()))
            self.assertFalse(save.exists(), phrase)


if __name__ == "__main__":
    main()
