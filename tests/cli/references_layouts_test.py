#!/usr/bin/env python3
"""troupe verify of every reference model of tests/fixtures/hf in layouts of all kinds, in fp64 on the
CPU: each agrees with transformers in at least five of them, and those that it cannot have are
refused.

Usage: references_layouts_test.py TROUPE SOURCE_FOLDER
"""

import concurrent.futures
import json
import sys
import pathlib
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, run

TP, EP, PP, CP = (f"--{name}-parallel-size" for name in
                  ("tensor-model", "expert-model", "pipeline-model", "context"))
ETP = "--expert-tensor-parallel-size"


def layouts_of(layers):
    """By name. Pipelines have a rank for each layer."""
    return {
        "DP": ("--ranks", 2),
        "DP, optimizer sharded": ("--ranks", 2, "--use-distributed-optimizer"),
        "FSDP": ("--ranks", 2, "--use-megatron-fsdp"),
        "TP, experts whole": ("--ranks", 2, TP, 2, ETP, 1),
        "TP x CP": ("--ranks", 4, TP, 2, CP, 2, ETP, 1),
        "EP": ("--ranks", 2, EP, 2),
        "CP": ("--ranks", 2, CP, 2),
        "PP": ("--ranks", layers, PP, layers),
        "PP x EP": ("--ranks", 2 * layers, PP, layers, EP, 2),
    }


# Its reference is rounded more than the others are (docs/models.md).
ROUNDED = "qwen3_next"


def layers(folder):
    return json.loads((folder / "config.json").read_text())["num_hidden_layers"]


class References(unittest.TestCase):
    def test_every_reference_in_five_layouts(self):
        folders = sorted(folder for folder in (HERE.source / "tests/fixtures/hf").iterdir()
                         if folder.is_dir() and folder.name != ROUNDED)
        self.assertGreaterEqual(len(folders), 25)

        def verify(pair):
            folder, _, flags = pair
            return run("verify", folder, "--compute-dtype", "fp64", "--threads", 1, *flags)

        pairs = [(folder, *layout) for folder in folders
                 for layout in layouts_of(layers(folder)).items()]
        agree = {folder.name: [] for folder in folders}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for (folder, layout, _), done in zip(pairs, pool.map(verify, pairs)):
                with self.subTest(model=folder.name, layout=layout):
                    # 2: the request is wrong.
                    self.assertIn(done.returncode, (0, 2), done.stdout + done.stderr)
                if done.returncode == 0:
                    agree[folder.name].append(layout)
        for name, layouts in agree.items():
            self.assertGreaterEqual(len(layouts), 5, f"{name}: {layouts}")

    def test_references_of_few_tokens_for_an_expert_in_bf16(self):
        """Those whose worst tensor is nearest to its bound, by which sums of ranks are rounded."""
        for name in ("mixtral", "qwen3_moe"):
            for layout, flags in layouts_of(2).items():
                with self.subTest(model=name, layout=layout):
                    done = run("verify", HERE.source / "tests/fixtures/hf" / name, "--compute-dtype",
                               "bf16", "--threads", 1, *flags, "--json")
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                    result = json.loads(done.stdout)
                    self.assertLess(result["grad_worst_rel"], 1e-1)
                    self.assertLess(result["grad_all_rel"], 2.5e-2)

    def test_interleaved_pipelines(self):
        stages = {"mixtral": ("--pipeline-model-parallel-layout", "E|t|t|L"),
                  "ling_v2": ("--pipeline-model-parallel-layout", "Et|t|t|L"),
                  "qwen3_moe_mixed_layers": ("--num-virtual-stages-per-pipeline-rank", 2)}
        fixtures = HERE.source / "tests/fixtures/hf"
        for name, interleaved in stages.items():
            for dtype in ("fp64", "bf16"):
                with self.subTest(model=name, dtype=dtype):
                    done = run("verify", fixtures / name, "--compute-dtype", dtype, "--threads", 1,
                               "--oracle", "--ranks", 2, PP, 2, *interleaved)
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        # DP 2 leaves a replica one sequence.
        refused = run("verify", fixtures / "mixtral", "--ranks", 4, PP, 2, *stages["mixtral"])
        self.assertEqual(refused.returncode, 2)
        self.assertIn("virtual stages need as many micro-batches, and the reference has 1 sequence "
                      "for each replica. Use fewer ranks", refused.stderr)
        self.assertNotIn("global-batch-size", refused.stderr)


if __name__ == "__main__":
    main()
