#!/usr/bin/env python3
"""Figures of `troupe plan` and `troupe inspect`: what the text says is what the JSON says, and what
both say is what can be counted by hand or in the other.

Usage: plan_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import main, run

MODEL = ["--model", "mixtral-tiny", "--seq-length", 64]
RECOMPUTE = ["--recompute-granularity", "selective", "--recompute-modules", "moe"]
OFFLOAD = ["--fine-grained-activation-offloading", "--offload-modules", "core_attn",
           "--min-offloaded-tensor-size", 1]
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def text_of_bytes(number):
    unit = max((unit for unit in UNITS if UNITS[unit] <= max(number, 1)), key=UNITS.get)
    return f"{number} B" if unit == "B" else f"{number / UNITS[unit]:.2f} {unit}"


def text_of_count(number):
    for bound, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= bound:
            return f"{number / bound:.1f}{unit}"
    return f"{number:.0f}"


class Plan(unittest.TestCase):
    def done(self, command, *flags):
        result = run(command, *MODEL, *flags)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def text_and_json(self, command, *flags):
        """The text without its line breaks and columns."""
        text = self.done(command, *flags)
        return re.sub(r"\s+", " ", text), json.loads(self.done(command, *flags, "--json"))

    def test_text_of_one_rank_says_what_json_says(self):
        text, plan = self.text_and_json("plan", "--micro-batch-size", 2, *RECOMPUTE, *OFFLOAD)
        bytes_, host = plan["bytes"], plan["host_bytes"]
        self.assertGreater(host["offloaded"], 0)
        self.assertEqual(host["offloaded"], host["total"] - host["optimizer"])
        self.assertEqual(sum(bytes_.values()), 2 * bytes_["total"] - host["total"])
        self.assertGreater(plan["bytes_without_recompute"], bytes_["total"])
        self.assertNotEqual(plan["bytes_without_offload"], plan["bytes_without_recompute"])
        for name, number in ([item for item in bytes_.items() if item[1] > 0]
                             + [("if all is kept", plan["bytes_without_recompute"]),
                                ("no offload", plan["bytes_without_offload"])]):
            self.assertIn(f" {name} {text_of_bytes(number)} ", text)
        self.assertIn(f" offloaded {text_of_bytes(host['offloaded'])} offloaded to the host", text)
        self.assertIn(f"flops {text_of_count(plan['model_flops_per_step'])} of the model, "
                      f"{text_of_count(plan['operation_flops_per_step'])} in all operations", text)
        self.assertIn("1 micro-batch of 2 x 64 tokens: 128 tokens", text)
        self.assertIn(f"largest at {plan['peak_operation']} ", text)

    def test_one_rank_has_the_bytes_that_inspect_shows(self):
        _, plan = self.text_and_json("plan", *OFFLOAD)
        shown = json.loads(self.done("inspect", *OFFLOAD, "--json"))
        self.assertEqual(plan["bytes"], shown["plan"]["bytes"])
        self.assertEqual({role: plan["host_bytes"][role] for role in ("optimizer", "offloaded")},
                         shown["plan"]["host_bytes"])

    def test_operations_of_inspect_add_up(self):
        document = json.loads(self.done("inspect", "--json"))
        bytes_ = {value["id"]: value["bytes"] for value in document["values"]}
        self.assertIn(2, {len(each["outputs"]) for each in document["operations"]})
        for each in document["operations"]:
            self.assertEqual(each["bytes"], sum(bytes_[id_] for id_ in each["outputs"]),
                             each["kind"])
        self.assertEqual(max(each["live_bytes"] for each in document["operations"]),
                         document["plan"]["largest_live_bytes"])

    def test_what_does_not_fit_says_how_much_is_missing(self):
        result = run("plan", "--model", "mixtral-8x7b", "--seq-length", 64, "--num-layers", 128)
        self.assertEqual(result.returncode, 3, result.stderr)
        found = {name: float(number) * UNITS[unit] for name, number, unit in re.findall(
            r"(total|available|not fit:) +([0-9.]+) ([GTMK]iB)", result.stdout)}
        self.assertAlmostEqual(found["not fit:"], found["total"] - found["available"],
                               delta=0.02 * UNITS["TiB"])
        self.assertLess(found["not fit:"], found["total"] - found["available"] / 2)
        self.assertNotIn("on the host", result.stdout)
        offloading = run("plan", "--model", "mixtral-8x7b", "--seq-length", 64, "--num-layers",
                         128, *OFFLOAD)
        self.assertRegex(re.sub(r"\s+", " ", offloading.stdout),
                         r"--exp-avg-sq-dtype bf16 \([0-9.]+ MiB on the host\)")

    def test_ranks_of_a_gpu_are_compared_with_the_one_that_is_here(self):
        text, plan = self.text_and_json("plan", "--device", "cuda", "--ranks", 2,
                                        "--expert-model-parallel-size", 2)
        needed = text_of_bytes(plan["needed_bytes"])
        if plan["available_bytes"] is None:
            self.assertIn(f"Each GPU needs at most {needed}. This machine has none to compare with",
                          text)
        else:
            self.assertIn(f"Each GPU needs at most {needed}; "
                          f"{text_of_bytes(plan['available_bytes'])} are available", text)

    def test_programs_of_up_to_64_ranks_are_built_without_being_asked_for(self):
        layout = ["--tensor-model-parallel-size", 2]
        text, plan = self.text_and_json("plan", *layout, "--ranks", 64)
        self.assertEqual(sum(each["ranks"] for each in plan["rank_classes"]), 64)
        self.assertIn("64 ranks run", text)
        text, plan = self.text_and_json("plan", *layout, "--ranks", 66)
        self.assertNotIn("rank_classes", plan)
        self.assertIn("With --fake-process-group the programs of all ranks are built", text)

    def test_ranks_and_groups_are_listed_up_to_16_ranks(self):
        text = self.done("plan", "--ranks", 16, "--tensor-model-parallel-size", 4)
        self.assertRegex(text, r"(?m)^Ranks\n  rank   tp  cp  dp  pp   etp  ep edp\n"
                               r"(.*\n){15}    15    3   0   3   0     3   0   3\n\n")
        self.assertIn("tp         {0 1 2 3} {4 5 6 7} {8 9 10 11} {12 13 14 15}\n", text)
        text = self.done("plan", "--ranks", 18, "--expert-model-parallel-size", 2)
        self.assertNotIn("Ranks\n", text)
        self.assertIn("ep         of    2 ranks: {0 1}, ...\n", text)
        self.assertIn("edp        of    9 ranks: {0 2 4 6 8 10 12 14 16}, ...\n", text)
        text = self.done("plan", "--ranks", 22, "--expert-model-parallel-size", 2)
        self.assertIn("edp        of   11 ranks: {0 2 4 6 8 10 12 14 .. 20}, ...\n", text)
        text = self.done("plan", "--ranks", 24, "--expert-model-parallel-size", 8)
        self.assertIn("ep         of    8 ranks: {0 1 2 3 4 5 6 7}, ...\n", text)

    def test_columns_of_the_memory_table_stay_apart(self):
        for experts, unit in ((8, "GiB"), (512, "TiB")):
            text = self.done("plan", "--ranks", 2, "--expert-model-parallel-size", 2,
                             "--fake-process-group", "--num-experts", experts,
                             "--moe-ffn-hidden-size", 1 << 24)
            self.assertIn(f"Memory of one rank, by what its program is, in {unit}\n", text)
            rows = re.findall(r"(?m)^ +\d+ +\d+ +\d+(?: +\d+(?:\.\d\d)?){8}$", text)
            self.assertTrue(rows, text)

    def test_the_idle_part_of_a_pipeline(self):
        text, plan = self.text_and_json("plan", "--ranks", 2, "--pipeline-model-parallel-size", 2,
                                        "--global-batch-size", 4)
        pipeline = plan["pipeline"]
        # Of 1F1B: (stages - 1) / (micro-batches + stages - 1).
        self.assertAlmostEqual(pipeline["bubble_equal_stages"], 1 / 5)
        self.assertGreater(pipeline["bubble_by_flops"], 1 / 5, "the last stage has the head")
        self.assertIn(f"idle 20.0 % if all stages take equally long, "
                      f"{100 * pipeline['bubble_by_flops']:.1f} % by their flops", text)
        self.assertEqual(pipeline["peak_live"], [2, 1])
        self.assertIn("live at most 1 to 2 micro-batches on a rank (by rank: 2 1)", text)

    def test_live_micro_batches_by_rank_of_up_to_16(self):
        for ranks in (16, 17):
            text = re.sub(r"\s+", " ", self.done(
                "plan", "--ranks", ranks, "--pipeline-model-parallel-size", ranks, "--num-layers",
                ranks, "--global-batch-size", ranks))
            self.assertIn(f"live at most 1 to {ranks} micro-batches on a rank", text)
            by_rank = " ".join(map(str, range(ranks, 0, -1)))
            self.assertEqual(f"(by rank: {by_rank})" in text, ranks == 16, text)

    def test_the_name_of_a_schedule(self):
        for flags, name in {
                (): "1f1b: 2 ranks, 4 micro-batches",
                ("--num-virtual-stages-per-pipeline-rank", 2):
                    "1f1b interleaved: 2 ranks x 2 stages in groups of 2, 4 micro-batches",
                ("--pipeline-schedule", "zb-v"): "zb-v: 2 ranks x 2 stages, 4 micro-batches",
        }.items():
            text = self.done("plan", "--ranks", 2, "--pipeline-model-parallel-size", 2,
                             "--global-batch-size", 4, *flags)
            self.assertIn(f"\nPipeline\n  {name}\n", text)

    def test_text_of_many_ranks_sums_over_all_of_a_class(self):
        text, plan = self.text_and_json(
            "plan", "--ranks", 8, "--expert-model-parallel-size", 2, "--global-batch-size", 16,
            "--pipeline-model-parallel-size", 2, *RECOMPUTE, *OFFLOAD, "--optimizer-cpu-offload")
        classes = plan["rank_classes"]
        self.assertLess(len(classes), 8)

        def total(part):
            return sum(each["ranks"] * part(each) for each in classes)

        exchanges = {name: total(lambda each, name=name: each["expert_exchange"][name])
                     for name in ("operations", "covered", "overlapped_flops")}
        self.assertGreater(exchanges["covered"], 0)
        self.assertIn(f"expert exchange: {exchanges['operations']} operations, "
                      f"{exchanges['covered']} overlap with compute "
                      f"({text_of_count(exchanges['overlapped_flops'])} flops)", text)
        whole = text_of_bytes(total(lambda each: each["bytes"]["total"]))
        self.assertIn(f"recompute: {whole} instead of "
                      f"{text_of_bytes(total(lambda each: each['bytes_without_recompute']))} on all "
                      "ranks", text)
        on_host = {role: text_of_bytes(total(lambda each, role=role: each["host_bytes"][role]))
                   for role in ("optimizer", "offloaded")}
        self.assertIn(f"offload: {whole} instead of "
                      f"{text_of_bytes(total(lambda each: each['bytes_without_offload']))} on all "
                      f"ranks; {on_host['offloaded']} of activations on the host", text)
        self.assertIn(f"optimizer states on the host: {on_host['optimizer']} of all ranks", text)
        self.assertIn(f"8 ranks run {len(classes)} different programs; "
                      + ", ".join(f"{text_of_count(total(lambda each, n=name: each[n]))} {name}"
                                  for name in ("operations", "collectives"))
                      + f" and {text_of_count(total(lambda each: each['messages']))} messages", text)
        self.assertEqual(plan["total_bytes"], plan["needed_bytes"])
        self.assertIn(f"All ranks together need {text_of_bytes(plan['total_bytes'])};", text)


if __name__ == "__main__":
    main()
