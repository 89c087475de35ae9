#!/usr/bin/env python3
"""`troupe plan --gpus`: the verdict is by the memory of the GPUs that are named, whatever this machine
has, and what cannot be is answered with the nearest that can.

Usage: plan_gpus_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import re
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, run

MODEL = ["--model", "mixtral-tiny", "--seq-length", 64, "--bf16"]


def plan(*flags):
    return run("plan", *MODEL, *flags)


def h100():
    return (HERE.source / "configs/gpus/h100.toml").read_text()


class PlanGpus(unittest.TestCase):
    def with_file(self, text, prefix="2x", flags=()):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "mine.toml"
            path.write_text(text)
            return plan("--gpus", f"{prefix}{path}", *flags)

    def refused(self, result, *words):
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)

    def test_every_kind_can_be_planned_for(self):
        for path in sorted((HERE.source / "configs/gpus").glob("*.toml")):
            with self.subTest(path.stem):
                result = plan("--gpus", f"8x{path.stem}", "--json")
                self.assertEqual(result.returncode, 0, result.stderr)
                document = json.loads(result.stdout)
                self.assertEqual(document["ranks"], 8)
                gib = float(re.search(r"memory_gib = ([\d.]+)", path.read_text()).group(1))
                self.assertEqual(document["available_bytes"], int(gib * 2**30))
                self.assertTrue(document["fits"])

    def test_the_verdict_is_by_the_memory_of_the_target(self):
        needed = json.loads(plan("--gpus", "2xh100", "--json").stdout)["needed_bytes"]
        for gib, status in ((needed / 2**30 + 1, 0), (1, 3)):
            text = re.sub(r"memory_gib = [\d.]+", f"memory_gib = {gib}", h100())
            result = self.with_file(text, flags=["--num-experts", 64, "--moe-ffn-hidden-size", 8192]
                                    if status else [])
            self.assertEqual(result.returncode, status, result.stdout + result.stderr)
            self.assertIn("it fits" if status == 0 else "it does not fit",
                          re.sub(r"\s+", " ", result.stdout))
        self.assertIn("What makes the", result.stdout)

    def test_what_makes_it_fit_comes_by_what_it_costs_in_time(self):
        result = self.with_file(re.sub(r"memory_gib = [\d.]+", "memory_gib = 1", h100()),
                                flags=["--num-experts", 64, "--moe-ffn-hidden-size", 8192,
                                       "--seq-length", 512, "--micro-batch-size", 4])
        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
        text = re.sub(r"\s+", " ", result.stdout)
        self.assertIn("one by one, what costs least time first (docs/memory.md):", text)
        remedies = re.findall(r"[\d.]+ [GM]iB (--[^()]*) \(([+-]\d+) % time\)", text)
        self.assertGreaterEqual(len(remedies), 3, text)
        costs = {flags.split()[0]: int(percent) for flags, percent in remedies}
        self.assertEqual(list(costs.values()), sorted(costs.values()))
        # Copies between GPU and host take longer than what they replace.
        self.assertGreater(costs["--optimizer-cpu-offload"], 0)
        self.assertGreater(costs["--optimizer-cpu-offload"],
                           costs["--use-precision-aware-optimizer"])

    def test_groups_of_several_nodes_have_room_for_what_is_sent(self):
        # Nodes of one GPU exchange through NCCL, which needs memory to receive into.
        layout = ["--expert-model-parallel-size", 2, "--moe-token-dispatcher-type", "flex",
                  "--json"]
        apart = re.sub(r"gpus_per_(node|nvlink) = 8", r"gpus_per_\1 = 1", h100())
        one = json.loads(self.with_file(h100(), flags=layout).stdout)
        two = json.loads(self.with_file(apart, flags=layout).stdout)
        self.assertGreater(two["needed_bytes"], one["needed_bytes"])

    def test_the_first_lines_are_the_verdict(self):
        flags = ["--gpus", "4xh100", "--expert-model-parallel-size", 2, "--global-batch-size", 8,
                 "--pipeline-model-parallel-size", 2]
        lines = plan(*flags).stdout.splitlines()
        document = json.loads(plan(*flags, "--json").stdout)
        verdict, time = document["verdict"], document["time"]
        self.assertRegex(lines[0], r"^fits: [\d.]+ of 78\.66 GiB on rank \d, [\d.]+ left")
        self.assertIn(f"speed: {verdict['tokens_per_s_per_gpu']:.0f} tokens/s", lines[1])
        self.assertTrue(lines[2].startswith(f"limit: {verdict['limit']}; "), lines[2])
        self.assertLess(max(map(len, lines[:3])), 80)
        self.assertAlmostEqual(sum(time["parts"].values()), time["seconds"],
                               delta=1e-6 * time["seconds"])
        self.assertIn("pipeline bubble", time["parts"])
        tokens = 8 * 64 / time["seconds"] / 4
        self.assertAlmostEqual(verdict["tokens_per_s_per_gpu"], tokens, delta=1e-6 * tokens)

    def test_the_whole_run_by_its_length(self):
        flags = ["--gpus", "4xh100", "--expert-model-parallel-size", 2, "--global-batch-size", 8]
        steps = json.loads(plan(*flags, "--train-iters", 500, "--json").stdout)
        samples = json.loads(plan(*flags, "--train-samples", 4000, "--json").stdout)
        self.assertEqual(steps["verdict"], samples["verdict"])
        tokens = json.loads(plan(*flags, "--train-tokens", 500 * 8 * 64, "--json").stdout)
        self.assertEqual(steps["verdict"], tokens["verdict"])
        verdict, seconds = steps["verdict"], steps["time"]["seconds"]
        self.assertEqual(verdict["steps"], 500)
        self.assertAlmostEqual(verdict["gpu_hours"], 500 * seconds * 4 / 3600)
        for samples, count in ((8, 1), (4, 0.5)):
            short = json.loads(plan(*flags, "--train-samples", samples, "--json").stdout)["verdict"]
            self.assertEqual(short["steps"], count)
            self.assertAlmostEqual(short["seconds"], count * seconds)
            self.assertAlmostEqual(short["gpu_hours"], count * seconds * 4 / 3600)
        # bf16 weights, and in fp32 master weights and two moments; norms have no master weights.
        bytes_of_parameter = verdict["checkpoint_bytes"] / steps["parameters"]
        self.assertAlmostEqual(bytes_of_parameter, 14, delta=0.3)
        self.assertIn("run: 500 steps in ", plan(*flags, "--train-iters", 500).stdout)
        self.refused(plan(*flags, "--train-iters", 500, "--train-tokens", 1e9),
                     "--train-tokens and --train-iters exclude each other")
        self.refused(plan("--train-tokens", 1e9), "--train-tokens: it belongs to --gpus")

    def test_a_checkpoint_takes_the_time_that_storage_needs(self):
        stored = json.loads(self.with_file("storage_gb_s = 0.5\n" + h100(), flags=["--json"]).stdout)
        verdict = stored["verdict"]
        self.assertAlmostEqual(verdict["save_seconds"], verdict["checkpoint_bytes"] / 0.5e9)
        text = self.with_file("storage_gb_s = 0.5\n" + h100()).stdout
        self.assertRegex(text, r"run: a checkpoint has .*, saved in ")
        unknown = json.loads(plan("--gpus", "2xh100", "--json").stdout)
        self.assertNotIn("save_seconds", unknown["verdict"])

    def test_a_slower_network_makes_a_longer_step(self):
        layout = ["--expert-model-parallel-size", 2, "--json"]
        apart = re.sub(r"gpus_per_(node|nvlink) = 8", r"gpus_per_\1 = 1", h100())
        slow = re.sub(r"network_gb_s = \d+", "network_gb_s = 0.1", apart)
        seconds = [json.loads(self.with_file(text, flags=layout).stdout)["time"]["seconds"]
                   for text in (h100(), apart, slow)]
        self.assertEqual(seconds, sorted(seconds))
        self.assertGreater(seconds[2], 2 * seconds[1])

    EXPERTS = ["--gpus", "4xh100", "--expert-model-parallel-size", 4, "--seq-length", 256,
               "--moe-token-dispatcher-type", "alltoall"]

    def with_load(self, load, *flags):
        document = json.loads(plan(*self.EXPERTS, *flags, "--expert-load", load, "--json").stdout)
        document.pop("check")  # how long it took
        return document

    def write_metrics(self, folder, *steps):
        lines = [{"header": True, "step": 0}]
        for number, rows in enumerate(steps, 1):
            lines.append({"step": number, "loss": 5.0, "experts": [
                {"layer": layer, "imbalance": 1.0, "rows": rows} for layer in range(4)]})
        lines.append({"step": len(steps), "val_loss": 5.0})
        path = pathlib.Path(folder) / "metrics.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
        return path

    def test_the_time_is_that_of_the_fullest_rank(self):
        even = self.with_load("even")
        default = json.loads(plan(*self.EXPERTS, "--json").stdout)
        default.pop("check")
        self.assertEqual(even, default)
        drawn = [self.with_load(f"dirichlet:{alpha}") for alpha in (100, 2, 0.5)]
        self.assertEqual(drawn[1], self.with_load("dirichlet:2"))
        loads = [each["verdict"]["expert_load"]["mean"] for each in drawn]
        self.assertEqual(loads, sorted(loads))
        # Shares of two experts each, of the parameter 1: 1 + 1/2 + 1/3 + 1/4.
        self.assertAlmostEqual(loads[2], 25 / 12, delta=1e-6)
        seconds = [each["time"]["seconds"] for each in [even] + drawn]
        self.assertEqual(seconds, sorted(set(seconds)))
        for each in drawn:  # nothing but the time depends on it
            del each["verdict"], each["time"]
            for ranks in each["rank_classes"]:
                del ranks["operation_seconds"]
        del even["verdict"], even["time"]
        for ranks in even["rank_classes"]:
            del ranks["operation_seconds"]
        self.assertEqual(drawn, [even] * 3)

    def test_loads_as_a_run_had_them(self):
        with tempfile.TemporaryDirectory() as folder:
            # Of 16 rows, ranks with two experts each got 8 and 4 at most: twice and once the mean.
            path = self.write_metrics(folder, [5, 3, 2, 2, 1, 1, 1, 1], [2] * 8)
            run = self.with_load(folder)
            self.assertEqual(run["verdict"]["expert_load"],
                             {"mean": 1.5, "largest": 1.5, "room": None})
            self.assertEqual(run, self.with_load(path))
            # The last 100 steps count.
            self.write_metrics(folder, [16] + [0] * 7, *[[2] * 8] * 100)
            self.assertEqual(self.with_load(folder)["verdict"]["expert_load"]["mean"], 1)

    def test_loads_are_those_after_copies(self):
        copies = ["--moe-expert-clones", 1]
        with tempfile.TemporaryDirectory() as folder:
            # The first rank has 10 of 16 rows, 6 above the mean, of which one expert has 9: each
            # of the others gets what it lacks.
            self.write_metrics(folder, [9, 1, 1, 1, 1, 1, 1, 1], [2] * 8)
            loads = [self.with_load(folder, *flags)["verdict"]["expert_load"]["mean"]
                     for flags in ([], copies)]
            self.assertEqual(loads, [(10 / 4 + 1) / 2, 1])
        drawn = [self.with_load("dirichlet:0.5", *flags) for flags in ([], copies)]
        even = [self.with_load("even", *flags) for flags in ([], copies)]
        loads = [each["verdict"]["expert_load"]["mean"] for each in drawn]
        self.assertLess(loads[1], 0.8 * loads[0])
        # Beside what copies of even loads take.
        more = [a["time"]["parts"]["expert products"] - b["time"]["parts"]["expert products"]
                for a, b in zip(drawn, even)]
        self.assertLess(more[1], more[0])
        text = plan(*self.EXPERTS, *copies, "--expert-load", "dirichlet:1").stdout.splitlines()
        self.assertRegex(text[3], r"^load: 1\.\d\d x even on the fullest rank after copies")

    def test_a_load_is_compared_with_the_room(self):
        room = ["--moe-expert-rank-capacity-factor", 1.5]
        fits = plan(*self.EXPERTS, *room, "--expert-load", "dirichlet:20").stdout.splitlines()
        self.assertRegex(fits[3], r"^load: 1\.\d\d x even on the fullest rank; room for 1\.50$")
        self.assertTrue(fits[4].startswith("run: "), fits[4])
        lacks = plan(*self.EXPERTS, *room, "--expert-load", "dirichlet:1").stdout.splitlines()
        self.assertIn("that is too much: steps run again in rounds", lacks[4])
        self.assertLess(max(map(len, lacks[:6])), 80)
        whole = plan("--gpus", "4xh100", "--expert-load", "dirichlet:1").stdout.splitlines()
        self.assertEqual(whole[3], "load: each rank has all experts, so it makes no difference")

    def test_a_search_makes_room_for_the_load(self):
        flags = ["--gpus", "4xh100", "--global-batch-size", 16, "--expert-model-parallel-size", 4,
                 "--search", "--json"]
        for load, room in (("even", 1.25), ("dirichlet:0.5", 2.5)):
            document = json.loads(plan(*flags, "--expert-load", load).stdout)
            # The load is 25/12. The first has more room than it needs: what fits.
            second = document["best"][1]
            self.assertEqual(second["expert_room"], room)

    # Too little memory for 1.5 times an even load, by the plan without a stash.
    def test_a_stash_is_taken_where_the_room_is_too_small(self):
        flags = ["--model", "mixtral-8x7b", "--num-layers", 8, "--expert-model-parallel-size", 8,
                 "--use-distributed-optimizer", "--seq-length", 4096, "--micro-batch-size", 2,
                 "--bf16"]

        def plan_with(gib, *more):
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder) / "mine.toml"
                path.write_text(re.sub(r"memory_gib = [\d.]+", f"memory_gib = {gib}", h100()))
                return run("plan", *flags, "--gpus", f"8x{path}", *more)

        room = ["--moe-expert-rank-capacity-factor", "1.5"]
        needed = json.loads(plan_with(80, *room, "--json").stdout)["needed_bytes"] / 2**30
        enough = plan_with(1.2 * needed)  # evaluation takes some, and CUDA
        self.assertEqual(enough.returncode, 0, enough.stdout + enough.stderr)
        self.assertEqual(enough.stderr, "")
        less = plan_with(1.04 * needed)
        self.assertEqual(less.returncode, 0, less.stdout + less.stderr)
        self.assertRegex(less.stderr, "^Note: --moe-paged-stash is on, .*3.6 to 5.3 % of the time")
        self.assertEqual(len(less.stderr.splitlines()), 1, less.stderr)
        self.assertIn("what experts keep: ", less.stdout)
        for given in (["--moe-paged-stash=false"], ["--moe-paged-stash"], room):
            self.assertEqual(plan_with(1.04 * needed, *given).stderr, "")

    def test_loads_that_cannot_be(self):
        for load, words in {"dirichlet:0": ("0.001", "dirichlet:1"), "dirichlet:nan": ("number",),
                            "dirichlet:1x": ("number",), "uneven": ("no such run", "even"),
                            "": ("no such run",), ".": ("no metrics.jsonl",)}.items():
            with self.subTest(load):
                self.refused(plan("--gpus", "2xh100", "--expert-load", load), "--expert-load",
                             *words)
        self.refused(plan("--expert-load", "dirichlet:1"), "--gpus")
        dense = ["--num-layers", 1, "--hidden-size", 32, "--num-attention-heads", 4,
                 "--ffn-hidden-size", 48, "--vocab-size", 64, "--seq-length", 16,
                 "--max-position-embeddings", 16]
        self.refused(run("plan", *dense, "--gpus", "2xh100", "--expert-load", "dirichlet:1"),
                     "the model has no experts")
        with tempfile.TemporaryDirectory() as folder:
            path = self.write_metrics(folder, [1, 2, 3, 4])
            self.refused(plan("--gpus", "2xh100", "--expert-load", folder), "4 experts", "has 8")
            path.write_text('{"step": 1, "loss": 5.0}\n')
            self.refused(plan("--gpus", "2xh100", "--expert-load", folder), "no line of a step")
            for layer, rows in ((0, "[1, -1, 0, 0, 0, 0, 0, 0]"), (0, '"many"'), (0, "[1e300]"),
                                (2**32, [2] * 8), (-1, [2] * 8)):
                path.write_text('{"step": 1, "loss": 5.0, "experts": [{"layer": %s, "rows": %s}]}\n'
                                % (layer, rows))
                self.refused(plan("--gpus", "2xh100", "--expert-load", folder), "line 1")
            path.write_text('{"step": 1, "experts": [}\n')
            result = plan("--gpus", "2xh100", "--expert-load", folder)
            self.assertEqual(result.returncode, 1)
            self.assertIn("metrics.jsonl:1", result.stderr)

    def test_a_file_may_say_how_many(self):
        result = self.with_file("gpus = 4\n" + h100(), prefix="", flags=["--json"])
        self.assertEqual(json.loads(result.stdout)["ranks"], 4)
        self.refused(self.with_file(h100(), prefix=""), "how many", "--gpus 8x")

    def test_clusters_that_cannot_be(self):
        for gpus, words in {"0xh100": ("--gpus 1xh100",),
                            "99999999999999999999xh100": ("--gpus 131072xh100",),
                            "12xh100": ("--gpus 8xh100 or --gpus 16xh100",),
                            "8xh10": ("Did you mean --gpus 8xh100?",),
                            "8xnone.toml": ("configs/gpus/h100.toml",),
                            "h200": ("--gpus 8xh200",)}.items():
            with self.subTest(gpus):
                self.refused(plan("--gpus", gpus), *words)

    def test_layouts_that_the_gpus_do_not_divide_into(self):
        self.refused(plan("--gpus", "4xh100", "--pipeline-model-parallel-size", 3),
                     "a multiple of 3 GPUs", "--gpus 24xh100")
        self.refused(plan("--gpus", "6xh100", "--tensor-model-parallel-size", 4),
                     "a multiple of 4 GPUs", "--gpus 4xh100 or --gpus 8xh100")
        # Each factor of both meshes counts, and is named.
        for flag, name in (("--context-parallel-size", "CP 5"),
                           ("--expert-model-parallel-size", "EP 5"),
                           ("--expert-tensor-parallel-size", "ETP 5"),
                           ("--tensor-model-parallel-size", "TP 5"),
                           ("--pipeline-model-parallel-size", "PP 5")):
            with self.subTest(flag):
                self.refused(plan("--gpus", "8xh100", flag, 5), "a multiple of 5 GPUs", name)

    def test_flags_that_contradict_it(self):
        self.refused(plan("--gpus", "8xh100", "--ranks", 4), "Leave --ranks out")
        self.refused(plan("--gpus", "8xh100", "--device", "cpu"), "Leave --device out")
        self.refused(plan("--gpus", "8xh100", "--ranks-per-gpu", 2), "Leave --ranks-per-gpu out")

    def test_files_that_are_wrong(self):
        self.refused(self.with_file(h100()[:300]), "mine.toml")
        self.refused(self.with_file(h100().replace("memory_gb_s", "memory_gbs")), "memory_gb_s",
                     "memory_gbs")
        self.refused(self.with_file(h100() + "noise = 1\n"), "noise")
        self.refused(self.with_file(re.sub(r"memory_gib = [\d.]+", "memory_gib = nan", h100())),
                     "memory_gib takes a number")
        self.refused(self.with_file(h100().replace("gpus_per_nvlink = 8", "gpus_per_nvlink = 12")),
                     "gpus_per_nvlink", ": 16.")


if __name__ == "__main__":
    main()
