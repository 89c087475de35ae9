#!/usr/bin/env python3
"""The programs of many ranks, built and checked on one machine: Megatron's example of Mixtral 8x7B
on 32 ranks, and a model of DeepSeek-V3's shape on 1,024.

Usage: fake_process_group_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, run

# The shape of DeepSeek-V3 with plain attention: 61 layers on 8 places of 4 stages.
DEEPSEEK = """
--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --moe-ffn-hidden-size 2048
--num-attention-heads 128 --num-query-groups 128 --group-query-attention --kv-channels 128
--vocab-size 129280 --seq-length 4096 --max-position-embeddings 4096 --num-experts 256
--moe-router-topk 8 --moe-layer-freq ([0]*3+[1]*58) --moe-shared-expert-intermediate-size 2048
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --normalization RMSNorm
--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 --bf16 --moe-token-dispatcher-type alltoall --ranks 1024
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 --expert-model-parallel-size 64
--expert-tensor-parallel-size 1 --pipeline-model-parallel-layout Et|(tt|)*30L
--micro-batch-size 1 --global-batch-size 2048
""".split()
ROLES = {"parameters", "gradients", "optimizer", "activations", "workspace", "communication"}


def mixtral():
    """The command line that megatron_flags_test.cc holds."""
    text = (HERE.source / "tests/options/megatron_flags_test.cc").read_text()
    literals = re.search(r"kMixtral =\n(.*?);", text, re.DOTALL).group(1)
    return "".join(re.findall(r'"(.*?)"', literals)).split()


class FakeProcessGroup(unittest.TestCase):
    def document(self, *arguments):
        result = run(*arguments, "--fake-process-group", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def check_classes(self, plan, ranks):
        classes = plan["rank_classes"]
        self.assertEqual(sum(each["ranks"] for each in classes), ranks)
        for each in classes:
            self.assertLessEqual(ROLES, set(each["bytes"]))
            parts = sum(bytes_ for role, bytes_ in each["bytes"].items() if role != "total")
            self.assertEqual(parts, each["bytes"]["total"])
            self.assertGreater(each["collectives"], 0)
        self.assertEqual(sum(each["ranks"] * each["bytes"]["total"] for each in classes),
                         plan["total_bytes"])
        self.assertGreater(plan["check"]["seconds"], 0)
        self.assertGreater(plan["check"]["peak_bytes"], 1 << 20)
        return classes

    def test_mixtral_on_32_ranks(self):
        plan = self.document("plan", "--ranks", 32, *mixtral())
        classes = self.check_classes(plan, 32)
        # By place in the pipeline alone: with the distributed optimizer each replica counts the
        # norm of its own shard.
        self.assertEqual([(each["pp"], each["ranks"]) for each in classes],
                         [(pp, 8) for pp in range(4)])
        for each in classes:
            weights = plan["parameters_per_rank"][each["pp"]]["bytes"]
            # Each tensor is filled up to 64 bytes.
            self.assertAlmostEqual(each["bytes"]["parameters"], weights, delta=1e5)
            # A message in and one out for each of 16 micro-batches, forward and backward; half of
            # that at both ends.
            self.assertEqual(each["messages"], 32 if each["pp"] in (0, 3) else 64)

    def test_factor_of_the_loss_is_the_one_in_the_program(self):
        layouts = (["--ranks", 4, "--tensor-model-parallel-size", 2],
                   ["--ranks", 8, "--pipeline-model-parallel-size", 2, "--context-parallel-size", 2],
                   ["--ranks", 8, "--expert-model-parallel-size", 4, "--micro-batch-size", 2])
        model = ["--model", "mixtral-tiny", "--seq-length", 64, "--global-batch-size", 16]
        for layout in layouts:
            for per_token in ([], ["--calculate-per-token-loss"]):
                arguments = [*model, *layout, *per_token]
                loss = self.document("plan", *arguments)["layout"]["loss"]
                program = run("inspect", *arguments)
                self.assertEqual(program.returncode, 0, program.stderr)
                value = re.search(r"d_loss +=  *fill\(\) \{value=([^}]*)\}", program.stdout).group(1)
                with self.subTest(arguments=arguments):
                    self.assertEqual(loss["gradient"], float(value))
                    self.assertEqual(loss["mean_over"], "tokens" if per_token else "micro_batches")

    def test_text_says_classes_time_and_memory(self):
        result = run("train", "--ranks", 32, "--fake-process-group", *mixtral())
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("32 ranks run 4 different programs", result.stdout)
        self.assertRegex(result.stdout, r"built and checked in .*s, with at most .*B of memory")

    def test_what_recompute_and_offload_save(self):
        layout = ["plan", "--model", "mixtral-tiny", "--seq-length", 64, "--global-batch-size", 16,
                  "--ranks", 4, "--pipeline-model-parallel-size", 2]

        def classes(*flags):
            return self.document(*layout, *flags)["rank_classes"]

        whole = [each["bytes"]["total"] for each in classes()]
        recompute = classes("--recompute-granularity", "selective", "--recompute-modules", "moe")
        offload = classes("--fine-grained-activation-offloading", "--offload-modules", "core_attn")
        self.assertEqual([each.get("bytes_without_recompute") for each in recompute], whole)
        self.assertEqual([each.get("bytes_without_offload") for each in offload], whole)
        for each, bytes_ in zip(recompute, whole, strict=True):
            self.assertLess(each["bytes"]["total"], bytes_)

    def test_shape_of_deepseek_v3_on_1024_ranks(self):
        plan = self.document("plan", *DEEPSEEK)
        classes = self.check_classes(plan, 1024)
        self.assertEqual({each["pp"] for each in classes}, set(range(8)))
        self.assertLess(len(classes), 64, "the work grows with the classes")
        self.assertLess(plan["check"]["peak_bytes"], 8 << 30)

    def test_a_layout_that_cannot_be_is_refused(self):
        result = run("plan", "--model", "mixtral-tiny", "--ranks", 6, "--fake-process-group",
                     "--expert-model-parallel-size", 3)
        self.assertEqual(result.returncode, 2)
        self.assertIn("--expert-model-parallel-size 3", result.stderr)

    def test_what_does_not_fit_here_is_refused_without_the_flag_alone(self):
        flags = ("plan", "--ranks", 32, *mixtral())
        self.assertEqual(run(*flags, "--json").returncode, 3)
        self.assertEqual(run(*flags, "--json", "--fake-process-group").returncode, 0)


if __name__ == "__main__":
    main()
