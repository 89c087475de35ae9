#!/usr/bin/env python3
"""A command line of Megatron, every flag as it stands there, in a small size: trained, gone on with,
and looked at.

Usage: megatron_flags_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, metrics, run, write_corpus

# Megatron's published example of Mixtral 8x7B with other numbers and in one rank.
FLAGS = """
--disable-bias-linear --seq-length 32 --max-position-embeddings 64 --num-layers 2 --hidden-size 32
--ffn-hidden-size 64 --num-attention-heads 4 --init-method-std 0.01 --attention-dropout 0.0
--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
--no-masked-softmax-fusion --no-position-embedding --num-experts 8 --expert-model-parallel-size 1
--moe-router-load-balancing-type aux_loss --moe-router-topk 2 --moe-aux-loss-coeff 1e-2
--moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
--tokenizer-type Llama2Tokenizer --tokenizer-model {tokenizer} --data-path {data} --split 90,8,2
--micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --train-iters 2 --lr-decay-iters 8
--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 1 --clip-grad 1.0
--bf16 --overlap-grad-reduce --overlap-param-gather --tensor-model-parallel-size 1
--pipeline-model-parallel-size 1 --num-layers-per-virtual-pipeline-stage 2 --sequence-parallel
--use-distributed-optimizer --log-interval 1 --save-interval 10000 --eval-interval 1000
--eval-iters 1 --save {run} --load {load} --tensorboard-dir {run}/tensorboard
--ckpt-format torch_dist --auto-detect-ckpt-format
"""
ACCEPTED = ("--no-position-embedding",
            "--no-masked-softmax-fusion", "--moe-grouped-gemm", "--moe-permute-fusion",
            "--ckpt-format torch_dist", "--auto-detect-ckpt-format")


def tokenizer():
    return HERE.source / "tests/fixtures/tokenizers/bpe/tokenizer.model"


def flags(folder, load=None, steps=2):
    text = FLAGS.format(tokenizer=tokenizer(), data=HERE.folder / "corpus", run=folder,
                        load=load or folder)
    return text.replace("--train-iters 2", f"--train-iters {steps}").split()


def setUpModule():
    write_corpus(60, 40, "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model",
                 tokenizer())


class MegatronFlags(unittest.TestCase):
    def setUp(self):
        self.run_folder = HERE.folder / self.id().rsplit(".", 1)[-1]

    def expect_lines(self, errors):
        for flag in ACCEPTED:
            line = f"{flag} is accepted and changes nothing: "
            self.assertEqual(errors.count(line), 1, f"{flag}\n{errors}")
        self.assertEqual(errors.count("is accepted and changes nothing"), len(ACCEPTED), errors)
        self.assertEqual(errors.count("--sequence-parallel changes nothing: "), 1, errors)

    def test_the_first_start_trains_and_the_second_goes_on(self):
        # A slash more is the same folder.
        done = run("train", "--ranks", 1, *flags(self.run_folder, load=f"{self.run_folder}/"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.expect_lines(done.stderr)
        self.assertIn("yet: starting from the beginning", done.stderr)
        self.assertEqual([line["step"] for line in metrics(self.run_folder) if "loss" in line], [1, 2])
        self.assertTrue(any("val_loss" in line for line in metrics(self.run_folder)))
        self.assertTrue(list((self.run_folder / "tensorboard").iterdir()))

        step = self.run_folder / "checkpoints" / "step_00000002" / "index.json"
        training = json.loads(step.read_text())["training"]
        text = json.dumps(training)
        for part in ("SentencePieceTokenizer", "bf16"):
            self.assertIn(part, text)

        done = run("train", "--ranks", 1, *flags(self.run_folder, steps=3))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.expect_lines(done.stderr)
        self.assertEqual([line["step"] for line in metrics(self.run_folder) if "loss" in line], [1, 2, 3])

        done = run("convert", "--load", self.run_folder, "--save", self.run_folder / "hf")
        self.assertEqual(done.returncode, 0, done.stderr)
        config = json.loads((self.run_folder / "hf" / "config.json").read_text())
        self.assertEqual(config["architectures"], ["MixtralForCausalLM"])
        self.assertEqual(config["num_local_experts"], 8)
        self.assertEqual(config["num_experts_per_tok"], 2)
        self.assertEqual(config["intermediate_size"], 64)
        self.assertEqual(config["num_key_value_heads"], 2)
        self.assertFalse(config["tie_word_embeddings"])
        self.assertEqual(config["vocab_size"] % 128, 0)

    def test_the_options_of_a_run_repeat_it(self):
        done = run("train", *flags(self.run_folder))
        self.assertEqual(done.returncode, 0, done.stderr)
        again = self.run_folder.with_name("again")
        done = run("train", "--config", self.run_folder / "options.toml", "--save", again,
                   "--load", again)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("is accepted", done.stderr)
        first = [line["loss"] for line in metrics(self.run_folder) if "loss" in line]
        self.assertEqual([line["loss"] for line in metrics(again) if "loss" in line], first)

    def test_plan_and_inspect_take_the_same_flags(self):
        for command in ("plan", "inspect"):
            done = run(command, *flags(self.run_folder))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.expect_lines(done.stderr)
            self.assertIn(f"troupe {command} does not use --data-path, --split, --save",
                          done.stderr)
            done = run(command, "--json", "--quiet", *flags(self.run_folder))
            self.assertEqual(done.stderr, "")
            json.loads(done.stdout)
        self.assertFalse(self.run_folder.exists())

    def test_another_folder_to_load_from_must_hold_a_checkpoint(self):
        done = run("train", *flags(self.run_folder, load=HERE.folder / "missing"))
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("there is no such folder", done.stderr)
        (HERE.folder / "empty").mkdir()
        done = run("train", *flags(self.run_folder, load=HERE.folder / "empty"))
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("there is no complete checkpoint in it", done.stderr)
        done = run("train", *flags(self.run_folder), "--exit-on-missing-checkpoint")
        self.assertEqual(done.returncode, 2, done.stderr)


if __name__ == "__main__":
    main()
