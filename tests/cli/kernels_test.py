#!/usr/bin/env python3
"""What `inspect` and `plan` say of a GPU's kernels, without a GPU.

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
        self.assertRegex(text, r"= attention\(.*\).* by (cudnn|own tiles) ")
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
        self.assertEqual(slow.count("(own tiles) for attention, attention_gradient"), 1, slow)
        self.assertIn("--attention-dropout 0", slow)
        fp32 = self.output("plan", *MODEL, "--device", "cuda").stderr
        self.assertIn("Use --bf16", fp32)
        self.assertNotIn("slow kernels", self.output("plan", *MODEL).stderr)

    def test_scratch_memory_is_planned_in_every_build(self):
        plan = json.loads(self.output("inspect", *MODEL, *ON_GPU, "--json").stdout)["plan"]
        self.assertGreaterEqual(plan["scratch_bytes"], 32 << 20, "that of matrix products")


if __name__ == "__main__":
    main()
