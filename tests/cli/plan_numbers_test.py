#!/usr/bin/env python3
"""All numbers that `troupe plan --json` prints, for models, layouts and options that have little in
common, against those that were printed before: bytes, seconds of every kind of operation, messages,
schedules. Other tests hold a few of them against measurements and formulas; this one says which
numbers a change moves.

Usage: plan_numbers_test.py TROUPE SOURCE_FOLDER
With TROUPE_UPDATE_GOLDEN in the environment it writes tests/golden/plan_numbers.json instead; read
the differences.
"""

import json
import math
import os
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, run

GOLDEN = "tests/golden/plan_numbers.json"

# GPUs, then the rest. Models are cut to few layers, which the pipelines share.
PLANS = [
    ("8xh100", "--model olmoe-1b-7b --num-layers 2 --expert-model-parallel-size 8 "
     "--use-distributed-optimizer --micro-batch-size 2 --global-batch-size 32"),
    ("16xh100", "--model mixtral-8x7b --num-layers 8 --tensor-model-parallel-size 2 "
     "--sequence-parallel --pipeline-model-parallel-size 4 --expert-model-parallel-size 2 "
     "--expert-tensor-parallel-size 1 --num-layers-per-virtual-pipeline-stage 1 "
     "--moe-token-dispatcher-type alltoall --moe-expert-rank-capacity-factor 1.5 "
     "--global-batch-size 64 --overlap-grad-reduce --overlap-param-gather "
     "--use-distributed-optimizer"),
    ("8xh100", "--model deepseek-v3 --num-layers 4 --num-experts 32 --pipeline-model-parallel-size 2 "
     "--expert-model-parallel-size 4 --moe-token-dispatcher-type flex --fp8-format e4m3 "
     "--fp8-recipe blockwise --fp8-modules all --recompute-granularity selective "
     "--recompute-modules mla_up_proj moe_act --seq-length 2048"),
    ("4xh200", "--model qwen3-next-80b-a3b --num-layers 4 --num-experts 32 --context-parallel-size 2 "
     "--expert-model-parallel-size 4 --seq-length 8192"),
    ("8xa100", "--model gpt-oss-20b --num-layers 2 --use-megatron-fsdp --expert-model-parallel-size 2 "
     "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ("32xh100", "--model qwen3-30b-a3b --num-layers 4 --expert-model-parallel-size 32 "
     "--moe-token-dispatcher-type alltoall --moe-dispatch-fwd-dtype mxfp8 "
     "--moe-combine-bwd-dtype mxfp8 --expert-load dirichlet:1 --use-distributed-optimizer "
     "--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
     "--exp-avg-sq-dtype fp8"),
    ("2xh100", "--model mixtral-tiny --seq-length 64 --num-layers 4 --pipeline-model-parallel-size 2 "
     "--global-batch-size 8 --optimizer-cpu-offload --fine-grained-activation-offloading "
     "--offload-modules expert_fc1 moe_act --fp8-format hybrid --fp8-recipe tensorwise "
     "--fp8-param-gather --fp8-modules all"),
    ("8xb200", "--model glm-4.5-air --num-layers 2 --tensor-model-parallel-size 4 --sequence-parallel "
     "--expert-tensor-parallel-size 2 --moe-expert-capacity-factor 1.25 --fp8-format e4m3 "
     "--fp8-recipe mxfp8"),
    ("8xh100", "--model mixtral-tiny --seq-length 128 --activation-func-fp8-input-store --optimizer dist_muon --delay-wgrad-compute "
     "--overlap-moe-expert-parallel-comm --expert-model-parallel-size 4 --global-batch-size 16 "
     "--moe-token-dispatcher-type alltoall"),
    ("16xrtx", "--model mixtral-tiny --seq-length 256 --fp4-format e2m1 --tensor-model-parallel-size 2 "
     "--context-parallel-size 2 --cp-comm-type allgather --train-tokens 1e9"),
    ("8xh100", "--model deepseek-v3.2 --num-layers 4 --num-experts 16 --seq-length 4096 "
     "--pipeline-model-parallel-size 4 --reset-attention-mask --global-batch-size 16"),
    ("1xh100", "--model mixtral-8x22b --num-layers 4 --micro-batch-size 4"),
    ("4xh100", "--model mixtral-tiny --seq-length 512 --context-parallel-size 2 --cp-comm-type p2p "
     "--mtp-num-layers 1 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex "
     "--expert-load dirichlet:8 --loss-chunk-tokens 64"),
    ("8xgb200", "--model qwen2-57b-a14b --num-layers 4 --tensor-model-parallel-size 2 "
     "--sequence-parallel --expert-model-parallel-size 4 --recompute-granularity selective "
     "--recompute-modules core_attn layernorm shared_experts --fp8-format hybrid "
     "--optimizer-offload-fraction 0.5 --optimizer-cpu-offload --global-batch-size 16"),
    ("8xh200", "--model moonlight-16b-a3b --num-layers 4 --pipeline-model-parallel-size 4 "
     "--num-layers-per-virtual-pipeline-stage 1 --recompute-granularity full --recompute-method block "
     "--recompute-num-layers 1 --fp8-format hybrid --fp8-recipe tensorwise --use-megatron-fsdp "
     "--global-batch-size 32"),
    ("16xh100", "--model minimax-m2 --num-layers 2 --num-experts 32 --tensor-model-parallel-size 8 "
     "--sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size 16 "
     "--moe-token-dispatcher-type alltoall --moe-expert-rank-capacity-factor 2 "
     "--distributed-timeout-minutes 5 --calculate-per-token-loss --grad-reduce-in-bf16"),
    ("2xh100", "--model mixtral-tiny --num-layers 3 --seq-length 512 --micro-batch-size 2 "
     "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
     "--moe-expert-rank-capacity-factor 1.25 --fine-grained-activation-offloading "
     "--offload-modules attn_norm qkv_linear"),
    ("4xh100", "--model olmoe-1b-7b --num-layers 4 --optimizer muon "
     "--expert-model-parallel-size 4 --expert-load dirichlet:2 --seq-length 1024"),
    ("8xh100", "--model olmoe-1b-7b --num-layers 4 --expert-model-parallel-size 8 "
     "--moe-token-dispatcher-type alltoall --moe-expert-rank-capacity-factor 1.25 "
     "--moe-expert-clones 2 --seq-length 2048"),
]


def shortened(document):
    """Without the members of groups and what planning took, with the first and the last class of
    ranks, and with kernels and links by their names."""
    del document["layout"]["groups"], document["check"]
    classes = document["rank_classes"]
    document["rank_classes"] = classes[:1] + classes[1:][-1:]
    for each in document["rank_classes"]:
        each["kernels"] = {f"{kernel['kind']}, {kernel['variant']}, slow: {kernel['slow']}":
                           kernel["operations"] for kernel in each["kernels"]}
        each["links"] = {f"{link['group']} of {link['ranks']}":
                         f"{link['operations']} operations, {link['bytes']} bytes, "
                         f"{link['messages']} messages" for link in each["links"]}
    return document


def flat(value, path=""):
    """The leaves of a document, by their paths."""
    if isinstance(value, dict):
        return {leaf: each for key, inner in value.items()
                for leaf, each in flat(inner, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {leaf: each for index, inner in enumerate(value)
                for leaf, each in flat(inner, f"{path}[{index}]").items()}
    return {path.lstrip("."): value}


def same(found, expected):
    """Times are sums of numbers of different sizes, in an order that the compiler may choose."""
    if isinstance(found, float) and isinstance(expected, (float, int)):
        return math.isclose(found, expected, rel_tol=1e-9)
    return found == expected


class PlanNumbers(unittest.TestCase):
    maxDiff = None

    def test_are_those_of_before(self):
        found = {}
        for gpus, flags in PLANS:
            done = run("plan", "--gpus", gpus, "--bf16", *flags.split(), "--json")
            self.assertIn(done.returncode, (0, 3), f"{gpus} {flags}\n{done.stderr}")
            found[f"{gpus} {flags}"] = flat(shortened(json.loads(done.stdout)))
        path = HERE.source / GOLDEN
        if "TROUPE_UPDATE_GOLDEN" in os.environ:
            path.write_text(json.dumps(found, indent=1) + "\n")
            return
        expected = json.loads(path.read_text())
        self.assertEqual(list(found), list(expected), "other plans than in the file")
        moved = [f"{plan}\n  {leaf}: {expected[plan].get(leaf)} was printed, now {numbers.get(leaf)}"
                 for plan, numbers in found.items()
                 for leaf in sorted(numbers.keys() | expected[plan].keys())
                 if leaf not in numbers or leaf not in expected[plan]
                 or not same(numbers[leaf], expected[plan][leaf])]
        self.assertEqual(moved, [], "\n".join(["If this is meant, read them, then run the test with "
                                               f"TROUPE_UPDATE_GOLDEN=1 ({GOLDEN}).", *moved[:40]]))


if __name__ == "__main__":
    main()
