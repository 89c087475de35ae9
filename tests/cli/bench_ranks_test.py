#!/usr/bin/env python3
"""Figures of several ranks: `troupe bench` in layouts, and --profile.

Usage: bench_ranks_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

WORDS = "tin copper river of the a runs over stone and under bridge slow light mill wheel".split()
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 272,
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "moe_intermediate_size": 32, "num_experts": 4,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "router_aux_loss_coef": 0.01,
}

TROUPE = ""
SOURCE = pathlib.Path()
FOLDER = pathlib.Path()


def run(*arguments):
    return subprocess.run([TROUPE, *map(str, arguments)], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, check=False)


def train_arguments(save, *flags):
    return ["train", "--model", FOLDER / "config.json", "--data-path", FOLDER / "corpus", "--lr",
            "1e-3", "--compute-dtype", "fp64", "--micro-batch-size", "2", "--global-batch-size",
            "8", "--split", "90,10,0", "--threads", "2", "--save", save, *flags]


def metrics(save):
    return [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]


class BenchRanks(unittest.TestCase):
    def bench(self, *flags):
        result = run("bench", "--model", FOLDER / "config.json", "--seq-length", 16, "--threads", 2,
                     *flags)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result

    def test_bench_in_layouts(self):
        shape = ["--model", FOLDER / "config.json", "--seq-length", 16]
        layouts = {
            "data": ["--use-distributed-optimizer", "--overlap-grad-reduce"],
            "experts": ["--expert-model-parallel-size", 4, "--moe-token-dispatcher-type", "flex"],
            "pipeline": ["--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2,
                         "--global-batch-size", 4],
            "context": ["--context-parallel-size", 2, "--expert-model-parallel-size", 4],
            "sharded": ["--use-megatron-fsdp", "--expert-model-parallel-size", 2,
                        "--overlap-param-gather"],
        }
        for name, flags in layouts.items():
            with self.subTest(layout=name):
                found = json.loads(self.bench("--ranks", 4, *flags, "--json").stdout)
                plan = json.loads(run("plan", *shape, "--ranks", 4, "--threads", 2, *flags,
                                      "--json").stdout)
                planned = ([each["bytes"]["total"] for each in plan["rank_classes"]]
                           if "rank_classes" in plan else [plan["bytes"]["total"]])
                self.assertEqual(found["planned_bytes"], max(planned))
                self.assertEqual(found["planned_bytes_of_ranks"]["least"], min(planned))
                self.assertEqual(found["allocated_bytes_of_ranks"], found["planned_bytes_of_ranks"])
                self.assertEqual((found["ranks"], found["rank"]), (4, 0))
                self.assertAlmostEqual(found["tokens_per_s"], 4 * found["tokens_per_s_per_rank"],
                                       delta=1e-6 * found["tokens_per_s"])
                self.assertGreater(found["communication_s"], 0)
                # Operations of a CPU run one after the other.
                self.assertAlmostEqual(found["communication_s"], found["exposed_communication_s"])
                self.assertIn("adamw", [kind["kind"] for kind in found["kinds"]])

    def test_bench_counts_the_tokens_of_all_replicas(self):
        flags = ["--ranks", 4, "--tensor-model-parallel-size", 2, "--micro-batch-size", 3,
                 "--global-batch-size", 12, "--json"]
        found = json.loads(self.bench(*flags).stdout)
        self.assertAlmostEqual(found["tokens_per_s"] * found["step_time_s"], 12 * 16, delta=1e-6)

    def test_bench_writes_timelines_that_open_together(self):
        folder = FOLDER / "bench_profile"
        result = self.bench("--ranks", 2, "--expert-model-parallel-size", 2, "--profile",
                            "--profile-dir", folder)
        self.assertEqual(sorted(path.name for path in folder.iterdir()),
                         ["rank0_step1.json", "rank1_step1.json", "ranks_step1.json"])
        self.assertIn(f"all together in {folder}/ranks_step1.json", result.stderr)
        events = json.loads((folder / "ranks_step1.json").read_text())["traceEvents"]
        self.assertEqual([event["args"]["name"] for event in events if event["ph"] == "M"],
                         ["rank 0", "rank 1"])
        own = json.loads((folder / "rank1_step1.json").read_text())["traceEvents"]
        self.assertEqual([event for event in events if event["pid"] == 1], own)
        spans = [event for event in events if event["ph"] == "X"]
        # One clock: the sum over the ranks ends on none before it has begun on all.
        sums = [span for span in spans if span["name"] == "sum_over_ranks"]
        self.assertEqual({span["pid"] for span in sums}, {0, 1})
        begin = max(min(span["ts"] for span in sums if span["pid"] == rank) for rank in (0, 1))
        end = min(min(span["ts"] + span["dur"] for span in sums if span["pid"] == rank)
                  for rank in (0, 1))
        self.assertLess(begin, end)
        self.assertEqual(result.stdout.count("operation kind"), 1, "the table of rank 0")

    def test_bench_prints_tables_of_the_ranks_that_are_asked_for(self):
        result = self.bench("--ranks", 4, "--profile-ranks", 3, 1)
        self.assertEqual([line for line in result.stdout.splitlines() if line.startswith("Rank ")],
                         ["Rank 1", "Rank 3"])
        result = run("bench", "--model", FOLDER / "config.json", "--ranks", 2, "--profile-ranks", 2)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertEqual(result.stderr, "troupe: --profile-ranks 2: there are the ranks 0 to 1 "
                                        "(--ranks).\n")

    def test_bench_refuses_what_does_not_fit(self):
        result = run("bench", "--model", "quickstart", "--ranks", 2, "--hidden-size", 65536,
                     "--ffn-hidden-size", 65536, "--threads", 2)
        self.assertEqual(result.returncode, 3, result.stderr)
        self.assertEqual(result.stderr.count("troupe: The run needs"), 1, result.stderr)
        for phrase in ("for 2 ranks, this machine has", "  parameters", "  total"):
            self.assertIn(phrase, result.stderr)

    def test_train_profiles_ranks(self):
        save, folder = FOLDER / "profiled", FOLDER / "train_profile"
        result = run(*train_arguments(save, "--ranks", 4, "--expert-model-parallel-size", 2,
                                      "--train-iters", 4, "--profile", "--profile-step-start", 1,
                                      "--profile-step-end", 3, "--profile-ranks", 2, 1,
                                      "--profile-dir", folder))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(sorted(path.name for path in folder.iterdir()),
                         [f"{whose}_step{step}.json" for whose in ("rank1", "rank2", "ranks")
                          for step in (2, 3)])
        self.assertEqual(result.stderr.count("operation kind"), 4, "two ranks, two steps")
        plain = FOLDER / "not_profiled"
        result = run(*train_arguments(plain, "--ranks", 4, "--expert-model-parallel-size", 2,
                                      "--train-iters", 4))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual([line["loss"] for line in metrics(save) if "loss" in line],
                         [line["loss"] for line in metrics(plain) if "loss" in line])


def main():
    global TROUPE, SOURCE, FOLDER
    TROUPE, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="troupe_ranks_") as folder:
        FOLDER = pathlib.Path(folder)
        (FOLDER / "config.json").write_text(json.dumps(CONFIG))
        documents = [" ".join(WORDS[(i * j + i) % len(WORDS)] for j in range(40))
                     for i in range(200)]
        (FOLDER / "corpus.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in documents))
        result = run("tokenize", "--input", FOLDER / "corpus.jsonl", "--output-prefix",
                     FOLDER / "corpus")
        if result.returncode != 0:
            sys.exit(result.stderr)
        unittest.main(argv=[sys.argv[0]])


if __name__ == "__main__":
    main()
