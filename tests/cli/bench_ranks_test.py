#!/usr/bin/env python3
"""Figures of several ranks: `troupe bench` in layouts, and --profile.

Usage: bench_ranks_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, metrics, run, write_config, write_corpus


def setUpModule():
    write_config()
    write_corpus(100, 40)


def train_arguments(save, *flags):
    return ["train", "--model", HERE.folder / "config.json", "--data-path", HERE.folder / "corpus",
            "--lr", "1e-3", "--compute-dtype", "fp64", "--micro-batch-size", "2",
            "--global-batch-size", "8", "--split", "90,10,0", "--threads", "2", "--save", save,
            *flags]


class BenchRanks(unittest.TestCase):
    def bench(self, *flags):
        result = run("bench", "--model", HERE.folder / "config.json", "--seq-length", 16, "--threads", 2,
                     *flags)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result

    def test_inputs_of_every_kind_are_written(self):
        # Tokens of later depths and documents beyond their range would end the step.
        for flags in (["--mtp-num-layers", 2, "--reset-attention-mask"],
                      ["--compute-dtype", "fp64", "--moe-router-ignore-padding"],
                      ["--bf16", "--reset-position-ids", "--eod-mask-loss", "--mtp-num-layers", 1]):
            with self.subTest(flags=flags):
                found = json.loads(self.bench(*flags, "--json").stdout)
                self.assertAlmostEqual(
                    found["matmul_limit_share"],
                    1e12 * found["tflops_per_gpu"] / found["matmul_limit_flops_per_s"], places=9)

    def test_bench_in_layouts(self):
        shape = ["--model", HERE.folder / "config.json", "--seq-length", 16]
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

    def test_bench_runs_again_where_the_experts_lack_room(self):
        flags = ["--ranks", 2, "--expert-model-parallel-size", 2]
        note = "does not suffice: each step runs a second time, in rounds of tokens."
        result = self.bench(*flags, "--moe-expert-rank-capacity-factor", 1)
        self.assertEqual(" ".join(result.stderr.split()).count(note), 1, result.stderr)
        self.assertIn("--moe-expert-rank-capacity-factor 1)", result.stderr)
        result = self.bench(*flags, "--moe-expert-rank-capacity-factor", 2)
        self.assertNotIn(note, " ".join(result.stderr.split()))

    def test_figures_of_many_ranks_have_more_digits(self):
        # Ranks share the processor: each does little.
        self.assertRegex(self.bench().stdout, r", [0-9]+\.[0-9]{3} model TFLOP/s, ")
        self.assertRegex(" ".join(self.bench("--ranks", 2).stdout.split()),
                         r", [0-9]+\.[0-9]{3} model TFLOP/s of each rank, ")

    def test_figures_of_the_text_follow_from_each_other(self):
        shape = ["--model", "mixtral-tiny", "--seq-length", 64, "--threads", 1]
        plan = json.loads(run("plan", *shape, "--json").stdout)
        text = " ".join(run("bench", *shape).stdout.split())
        found = re.search(r"seen: ([0-9.]+) ([GT])flop/s .* step ([0-9.]+) (m?s) \(median.*, "
                          r"([0-9.]+) model TFLOP/s, ([0-9]+)% of the matmul limit", text)
        limit, time, speed, percent = (float(found[group]) for group in (1, 3, 5, 6))
        # Half of the last digit that is shown, of each figure.
        expected = plan["model_flops_per_step"] / (time * {"ms": 1e-3, "s": 1}[found[4]]) / 1e12
        self.assertAlmostEqual(speed, expected, delta=0.0005 + expected * 0.05 / time)
        limit_tflops = limit * {"G": 1e-3, "T": 1}[found[2]]
        share = 100 * speed / limit_tflops
        self.assertAlmostEqual(percent, share,
                               delta=0.5 + 100 * 0.0005 / limit_tflops + share * 0.05 / limit)

    def test_bench_counts_the_tokens_of_all_replicas(self):
        flags = ["--ranks", 4, "--tensor-model-parallel-size", 2, "--micro-batch-size", 3,
                 "--global-batch-size", 12, "--json"]
        found = json.loads(self.bench(*flags).stdout)
        self.assertAlmostEqual(found["tokens_per_s"] * found["step_time_s"], 12 * 16, delta=1e-6)

    def test_figures_follow_from_each_other_and_from_the_plan(self):
        for ranks, flags in ((1, ["--global-batch-size", 6]),
                             (4, ["--global-batch-size", 12, "--tensor-model-parallel-size", 2])):
            with self.subTest(ranks=ranks):
                flags += ["--ranks", ranks, "--micro-batch-size", 3, "--json"]
                found = json.loads(self.bench(*flags).stdout)
                plan = json.loads(run("plan", "--model", HERE.folder / "config.json", "--seq-length",
                                      16, "--threads", 2, *flags).stdout)
                flops = plan.get("model_flops_per_step")
                if ranks == 1:
                    self.assertAlmostEqual(found["tflops_per_gpu"] * found["step_time_s"] * 1e12,
                                           flops, delta=1e-6 * flops)
                    self.assertEqual(found["tokens_per_s"], found["tokens_per_s_per_rank"])
                    done = sum(kind["flops_per_s"] * kind["time_s"] for kind in found["kinds"])
                    self.assertAlmostEqual(done, plan["operation_flops_per_step"],
                                           delta=1e-6 * done)
                self.assertAlmostEqual(
                    found["matmul_limit_share"] * found["matmul_limit_flops_per_s"],
                    found["tflops_per_gpu"] * 1e12, delta=1e-6 * found["tflops_per_gpu"] * 1e12)
                self.assertLessEqual(found["matmul_limit_share"], 1)
                self.assertEqual(sum(kind["count"] for kind in found["kinds"]), found["operations"])
                self.assertEqual(found["planned_host_bytes"], 0)
                self.assertGreaterEqual(found["profiled_step_s"],
                                        found["idle_s"] + found["communication_s"])
                self.assertLessEqual(found["largest_gap_s"], found["idle_s"])

    def test_bench_writes_timelines_that_open_together(self):
        folder = HERE.folder / "bench_profile"
        result = self.bench("--ranks", 2, "--expert-model-parallel-size", 2, "--profile",
                            "--profile-dir", folder)
        self.assertEqual(sorted(path.name for path in folder.iterdir()),
                         ["rank0_step1.json", "rank1_step1.json", "ranks_step1.json"])
        self.assertIn(f"all together in {folder}/ranks_step1.json", result.stderr)
        events = json.loads((folder / "ranks_step1.json").read_text())["traceEvents"]
        self.assertEqual([event["args"]["name"] for event in events if event["name"] == "process_name"],
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
        result = run("bench", "--model", HERE.folder / "config.json", "--ranks", 2, "--profile-ranks", 2)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertEqual(result.stderr, "troupe: --profile-ranks 2: there are the ranks 0 to 1 "
                                        "(--ranks).\n")

    def test_bench_refuses_what_does_not_fit(self):
        result = run("bench", "--model", "quickstart", "--ranks", 2, "--hidden-size", 65536,
                     "--ffn-hidden-size", 65536, "--num-layers", 99, "--threads", 2)
        self.assertEqual(result.returncode, 3, result.stderr)
        self.assertEqual(result.stderr.count("troupe: The run needs"), 1, result.stderr)
        for phrase in ("for 2 ranks, this machine has", "  parameters", "  total"):
            self.assertIn(phrase, result.stderr)
        needed, total = re.search(r"The run needs ([0-9.]+) TiB for 2 ranks.*^  total +([0-9.]+) GiB",
                                  result.stderr, re.DOTALL | re.MULTILINE).groups()
        self.assertAlmostEqual(float(needed), 2 * float(total) / 1024, delta=0.01)

    def test_train_profiles_ranks(self):
        save, folder = HERE.folder / "profiled", HERE.folder / "train_profile"
        result = run(*train_arguments(save, "--ranks", 4, "--expert-model-parallel-size", 2,
                                      "--train-iters", 4, "--profile", "--profile-step-start", 1,
                                      "--profile-step-end", 3, "--profile-ranks", 2, 1,
                                      "--profile-dir", folder))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(sorted(path.name for path in folder.iterdir()),
                         [f"{whose}_step{step}.json" for whose in ("rank1", "rank2", "ranks")
                          for step in (2, 3)])
        self.assertEqual(result.stderr.count("operation kind"), 4, "two ranks, two steps")
        plain = HERE.folder / "not_profiled"
        result = run(*train_arguments(plain, "--ranks", 4, "--expert-model-parallel-size", 2,
                                      "--train-iters", 4))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual([line["loss"] for line in metrics(save) if "loss" in line],
                         [line["loss"] for line in metrics(plain) if "loss" in line])

    def test_a_timeline_that_one_rank_cannot_write_ends_nothing(self):
        folder = HERE.folder / "blocked"
        (folder / "rank2_step2.json").mkdir(parents=True)
        save = HERE.folder / "blocked_run"
        result = run(*train_arguments(save, "--ranks", 4, "--quiet", "--train-iters", 4, "--profile",
                                      "--profile-step-start", 1, "--profile-step-end", 2,
                                      "--profile-ranks", 0, 2, "--profile-dir", folder))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        self.assertRegex(result.stderr, "Warning: the timeline of step 2 could not be written: "
                                        ".*rank2_step2.json")
        # Rank 0 has written its own, and all have trained on.
        self.assertTrue(json.loads((folder / "rank0_step2.json").read_text())["traceEvents"])
        self.assertEqual(metrics(save)[-1]["step"], 4)

    def test_bench_fails_where_it_cannot_write_a_timeline(self):
        folder = HERE.folder / "blocked_bench"
        (folder / "rank1_step1.json").mkdir(parents=True)
        result = run("bench", "--model", HERE.folder / "config.json", "--seq-length", 16,
                     "--threads", 2, "--ranks", 2, "--profile", "--profile-dir", folder)
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertEqual(result.stderr.count("troupe: "), 1, result.stderr)
        self.assertIn("rank1_step1.json", result.stderr)


if __name__ == "__main__":
    main()
