#!/usr/bin/env python3
"""What Troupe prints, whole, against what it printed before: programs of all kinds of layers, precisions
and layouts, plans, searches, and reports with the data of their pages. Other tests say what parts of
these texts must hold; this one says which lines a change moves.

Usage: golden_texts_test.py TROUPE SOURCE_FOLDER
With TROUPE_UPDATE_GOLDEN in the environment it writes tests/golden/texts instead; read the differences.
"""

import difflib
import json
import os
import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, run

GOLDEN = "tests/golden/texts"

# Models are cut to few layers and experts, so that each text is read in minutes.
PROGRAMS = {
    "latent_attention": "--model deepseek-v3 --num-layers 2 --moe-layer-freq ([0]+[1]) --num-experts 16 "
    "--mtp-num-layers 1 --ranks 4 --rank 3 --pipeline-model-parallel-size 2 "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type flex --bf16 --fp8-format e4m3 "
    "--fp8-recipe blockwise --fp8-modules all --recompute-granularity selective "
    "--recompute-modules mla_up_proj moe_act",
    "linear_attention": "--model qwen3-next-80b-a3b --num-layers 2 --linear-attention-freq 2 "
    "--num-experts 16 --bf16",
    "sinks_and_capacity": "--model gpt-oss-20b --num-layers 2 --ranks 4 --tensor-model-parallel-size 2 "
    "--sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size 4 "
    "--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity",
    "capacity_of_all_tokens": "--model mixtral-tiny --num-layers 1 --moe-expert-capacity-factor 4",
    "sharded_state": "--model mixtral-tiny --num-layers 1 --ranks 2 --rank 1 --use-megatron-fsdp "
    "--overlap-param-gather --overlap-grad-reduce --bf16 --fp8-format e4m3 --fp8-recipe mxfp8 "
    "--fp8-param-gather --fp8-modules all --activation-func-fp8-input-store",
    "sparse_attention": "--model deepseek-v3.2 --num-layers 1 --moe-layer-freq 1 --num-experts 16 "
    "--reset-attention-mask --bf16",
    "four_bits_and_muon": "--model mixtral-tiny --num-layers 1 --bf16 --fp4-format e2m1 --ranks 2 "
    "--optimizer dist_muon --use-precision-aware-optimizer --main-grads-dtype bf16 "
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp8",
    "dropout_and_context": "--model qwen2-moe-tiny --num-layers 1 --moe-input-jitter-eps 0.01 "
    "--moe-z-loss-coeff 0.001 --hidden-dropout 0.1 --attention-dropout 0.1 --ranks 2 "
    "--context-parallel-size 2 --cp-comm-type p2p --calculate-per-token-loss "
    "--log-num-zeros-in-grad --log-params-norm",
    "rooms_and_pipeline": "--model mixtral-tiny --num-layers 4 --ranks 8 --rank 2 "
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall "
    "--moe-expert-rank-capacity-factor 1.5 --overlap-moe-expert-parallel-comm "
    "--delay-wgrad-compute --global-batch-size 8 --bf16",
    "offload": "--model mixtral-tiny --num-layers 2 --bf16 --optimizer-cpu-offload "
    "--fine-grained-activation-offloading --offload-modules expert_fc1 moe_act "
    "--fp8-format hybrid --fp8-recipe delayed --fp8-modules all",
}

PLANS = {
    "pipeline": "--gpus 16xh100 --bf16 --model mixtral-8x7b --num-layers 8 --tensor-model-parallel-size 2 "
    "--sequence-parallel --pipeline-model-parallel-size 4 --expert-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 64 --train-tokens 1e9 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "fp8": "--gpus 8xh100 --bf16 --model deepseek-v3 --num-layers 4 --num-experts 32 "
    "--expert-model-parallel-size 8 --moe-token-dispatcher-type flex --fp8-format e4m3 "
    "--fp8-recipe blockwise --fp8-modules all --expert-load dirichlet:1 --seq-length 2048",
    "does_not_fit": "--gpus 2xh100 --bf16 --model qwen3-30b-a3b --expert-model-parallel-size 2",
    "remedies": "--gpus 8xh100 --bf16 --optimizer muon --micro-batch-size 4 --model qwen3-30b-a3b "
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 "
    "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall",
    "ranks": "--ranks 4 --model olmoe-tiny --seq-length 128 --expert-model-parallel-size 4 --threads 1 "
    "--moe-expert-rank-capacity-factor 1.5 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
}

SEARCHES = {
    "small": "--gpus 16xh100 --model mixtral-tiny --seq-length 512 --global-batch-size 32",
    "large": "--gpus 64xh200 --model qwen3-30b-a3b --num-layers 8 --global-batch-size 256 "
    "--search-top 5",
    "short_steps": "--gpus 2xh100 --model mixtral-tiny --seq-length 64 --micro-batch-size 1 "
    "--global-batch-size 32",
    "eight_bits": "--gpus 8xh100 --model olmoe-1b-7b --num-layers 4 --global-batch-size 64 "
    "--fp8-format hybrid --fp8-recipe tensorwise",
}

OPTIONS = 'lr = 0.001\nmodel = "small"\ntrain-iters = 40\nfp16-is-not-known = true\n'


def run_lines(loss):
    """metrics.jsonl of a run of two starts, with evaluations, skipped steps and a large model's
    experts; the numbers are made up, each another."""
    def header(step, time):
        return {"header": True, "step": step, "time": time, "version": "0.1.0", "commit": "abc",
                "host": "here", "device": "cuda", "ranks": 2, "model": "small", "parameters": 123456,
                "active_parameters": 54321, "data": ["corpus"], "options": "options.toml",
                "matmul_limit_tflops": 700.0}

    lines = [header(0, "2026-11-22T10:00:00.000Z"),
             {"step": 0, "time": "2026-11-22T10:00:01.000Z", "val_loss": 5.5, "val_tokens": 256}]
    for step in range(1, 41):
        if step == 21:
            lines.append(header(20, "2026-11-22T12:00:00.000Z"))
        hour = 10 if step <= 20 else 12
        lines.append({
            "step": step, "time": f"2026-11-22T{hour}:{step:02}:{step % 7:02}.250Z",
            "loss": loss - 0.05 * step + 0.3 * (step == 13), "lr": 1e-3 / step,
            "grad_norm": 1.0 + 0.1 * (step % 5), "tokens": 4096 * step, "batch_size": 4,
            "weight_decay": 0.01, "tokens_per_s": 5000.0 + 10 * step, "tflops_per_gpu": 210.0 + step,
            "step_time_s": 0.8 + 0.001 * step, "peak_bytes": (3 << 30) + step,
            "load_imbalance": 1.5 + 0.01 * step, "load_balancing_loss": 1.02 + 0.001 * step,
            "z_loss": 0.5 - 0.002 * step, "num_zeros": 10 * step, "params_norm": 40 + 0.1 * step,
            **({"skipped": True} if step in (7, 8) else {}),
            "experts": [{"layer": layer, "imbalance": 1.2 + 0.1 * layer, "max_violation": 0.2,
                         "dead": int(step > 30 and layer == 1), "dropped": 0.01 * (step % 3),
                         "entropy": 1.9 + 0.01 * layer, "load_balancing_loss": 1.0 + 0.01 * layer,
                         "rows": [0 if step > 30 and layer == 1 and expert == 3
                                  else 100 + step * layer + 7 * expert for expert in range(8)]}
                        for layer in range(3)]})
        if step % 20 == 0:
            lines.append({"step": step, "time": f"2026-11-22T{hour}:{step:02}:30.000Z",
                          "val_loss": loss - 0.04 * step, "val_tokens": 256})
    lines.append({"step": 40, "time": "2026-11-22T12:41:00.000Z", "test_loss": 3.75,
                  "test_tokens": 512})
    return lines


def data_of(page):
    """What a page draws, of its one element of data, with a line for each number."""
    data = re.search(r'<script[^>]* id="data"[^>]*>(.*?)</script>', page.read_text(), re.S)[1]
    return json.dumps(json.loads(data), indent=0)


class GoldenTexts(unittest.TestCase):
    def printed(self, *arguments, statuses=(0,)):
        done = run(*arguments)
        self.assertIn(done.returncode, statuses, done.stderr)
        return (done.stdout + done.stderr).replace(str(HERE.folder), "FOLDER")

    def check(self, name, text):
        path = HERE.source / GOLDEN / f"{name}.txt"
        if "TROUPE_UPDATE_GOLDEN" in os.environ:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            return
        expected = path.read_text() if path.exists() else ""
        moved = list(difflib.unified_diff(expected.splitlines(), text.splitlines(),
                                          f"{GOLDEN}/{name}.txt", "now", lineterm="", n=1))
        if moved:
            self.fail("\n".join(["If this is meant, read it, then run the test with "
                                 "TROUPE_UPDATE_GOLDEN=1.", *moved[:60]]))

    def test_programs(self):
        for name, flags in PROGRAMS.items():
            with self.subTest(program=name):
                text = self.printed("inspect", "--threads", 1, "--seq-length", 32, *flags.split())
                # Columns are as wide as their longest line, and one operation more moves the numbers
                # of all after it, which is no change of the others.
                text = re.sub(r"^ *[0-9]+ ", "", re.sub("  +", "  ", text), flags=re.M)
                self.check(f"program_{name}", text)

    def test_plans(self):
        for name, flags in PLANS.items():
            with self.subTest(plan=name):
                text = self.printed("plan", *flags.split(), statuses=(0, 3))
                # What this machine takes and has.
                text = re.sub(r"(?<=built and checked in ).*", "no time", text)
                self.check(f"plan_{name}", re.sub(r"(?<=; )\S+ \S+(?= are available)", "some", text))

    def test_searches(self):
        for name, flags in SEARCHES.items():
            with self.subTest(search=name):
                self.check(f"search_{name}", self.printed("plan", "--search", "--bf16", "--quiet",
                                                          *flags.split()))

    def test_reports(self):
        folders = []
        long_name = " ".join(["a run whose folder's name takes more than one line"] * 2)
        for name, loss in (("first", 5.5), (long_name, 5.25)):
            folders.append(HERE.folder / name)
            folders[-1].mkdir()
            (folders[-1] / "metrics.jsonl").write_text(
                "\n".join(json.dumps(line) for line in run_lines(loss)) + "\n")
            (folders[-1] / "options.toml").write_text(OPTIONS)
        page = HERE.folder / "page.html"
        for name, runs in (("one", folders[:1]), ("two", folders)):
            self.check(f"report_{name}", self.printed("report", *runs, "--output", page))
            self.check(f"report_{name}_page", data_of(page).replace(str(HERE.folder), "FOLDER"))

    def test_the_page_of_a_step(self):
        page = HERE.folder / "step.html"
        self.printed("inspect", "--model", "mixtral-tiny", "--num-layers", 1, "--seq-length", 16,
                     "--threads", 1, "--html", page)
        self.check("step_page", data_of(page))


if __name__ == "__main__":
    main()
