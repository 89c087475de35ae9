#!/usr/bin/env python3
"""What `inspect` and `plan` say of a GPU's kernels and of traffic between ranks, without a GPU.

Usage: kernels_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import main, run

MODEL = ["--model", "mixtral-tiny", "--seq-length", 64, "--micro-batch-size", 1,
         "--global-batch-size", 4]
ON_GPU = ["--device", "cuda", "--bf16"]


class Kernels(unittest.TestCase):
    def output(self, *arguments):
        result = run(*arguments)
        self.assertIn(result.returncode, (0, 3), result.stderr)
        return result

    def test_inspect_names_them(self):
        text = self.output("inspect", *MODEL, *ON_GPU).stdout
        self.assertRegex(text, r"= attention\(.*\).* by (cudnn|plain tiles) ")
        self.assertRegex(text, r"= grouped_linear\(.*\) by (sm90|sm90 pair|plain tiles) ")
        self.assertNotIn(" by add", text)
        self.assertNotIn(" by cublaslt", self.output("inspect", *MODEL).stdout)
        document = json.loads(self.output("inspect", *MODEL, *ON_GPU, "--json").stdout)
        kernels = {each["kind"]: each["kernel"] for each in document["operations"]}
        self.assertEqual(kernels["linear"], "cublaslt")
        self.assertEqual(kernels["route"], "route")

    def test_plan_lists_them(self):
        text = self.output("plan", *MODEL, *ON_GPU).stdout
        self.assertRegex(text, r"\n  linear +cublaslt \d+\n")
        for layout in ([], ["--ranks", 2, "--expert-model-parallel-size", 2]):
            document = json.loads(self.output("plan", *MODEL, *ON_GPU, *layout, "--json").stdout)
            kernels = document["rank_classes"][0]["kernels"] if layout else document["kernels"]
            self.assertIn(("linear", "cublaslt"), {(k["kind"], k["variant"]) for k in kernels})

    def test_slow_ones_are_warned_of_once(self):
        slow = self.output("plan", *MODEL, *ON_GPU, "--attention-dropout", 0.1).stderr
        self.assertEqual(slow.count("(plain tiles) for attention, attention_gradient"), 1, slow)
        self.assertIn("--attention-dropout 0", slow)
        fp32 = self.output("plan", *MODEL, "--device", "cuda").stderr
        self.assertIn("Use --bf16", fp32)
        self.assertNotIn("slow kernels", self.output("plan", *MODEL).stderr)

    def test_scratch_memory_is_planned_in_every_build(self):
        plan = json.loads(self.output("inspect", *MODEL, *ON_GPU, "--json").stdout)["plan"]
        self.assertGreaterEqual(plan["scratch_bytes"], 32 << 20, "that of matrix products")


class Traffic(unittest.TestCase):
    def test_plan_sums_it_by_group(self):
        result = run("plan", *MODEL, "--ranks", 4, "--tensor-model-parallel-size", 2,
                     "--expert-model-parallel-size", 2, "--sequence-parallel", "--json")
        self.assertIn(result.returncode, (0, 3), result.stderr)
        for each in json.loads(result.stdout)["rank_classes"]:
            links = {link["group"]: link for link in each["links"]}
            self.assertIn("tp", links)
            for link in links.values():
                self.assertGreater(link["ranks"], 1)
                self.assertGreater(link["bytes"], 0)
                self.assertGreaterEqual(link["messages"], link["operations"])

    def test_inspect_states_it_for_each_collective(self):
        result = run("inspect", *MODEL, "--ranks", 2, "--tensor-model-parallel-size", 2, "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        operations = json.loads(result.stdout)["operations"]
        links = [each["link"] for each in operations if "link" in each]
        self.assertTrue(any(link["group"] == "tp" and link["bytes"] > 0 for link in links))
        linear = next(each for each in operations if each["kind"] == "linear")
        self.assertEqual(linear["products"], {"flops": linear["flops"], "dtype": "f32"})


if __name__ == "__main__":
    main()
