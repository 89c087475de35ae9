#!/usr/bin/env python3
"""Muon's update as an independent program computes it: from two checkpoints that lie one step apart,
every matrix of the layers moves by its momentum, orthogonalised, and by its weight decay; and what
--optimizer muon refuses.

Usage: muon_test.py TROUPE SOURCE
"""
import json
import math
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

TROUPE, SOURCE = sys.argv[1], Path(sys.argv[2])
sys.path.insert(0, str(SOURCE / "tests" / "support"))
from checkpoint_tensors import read_f32  # noqa: E402

LEARNING_RATE, WEIGHT_DECAY = 1e-2, 0.1
# Megatron's "quintic", a triple for each step.
QUINTIC = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
           (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)]
MODEL = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "4",
         "--num-query-groups", "2", "--group-query-attention", "--num-experts", "4",
         "--moe-router-topk", "2", "--moe-ffn-hidden-size", "12", "--swiglu",
         "--disable-bias-linear", "--normalization", "RMSNorm", "--vocab-size", "272",
         "--seq-length", "16", "--micro-batch-size", "2", "--global-batch-size", "4", "--mock-data",
         "--untie-embeddings-and-output-weights", "--max-position-embeddings", "16"]
QKV_ROWS = [16, 8, 8]


def troupe(*arguments):
    return subprocess.run([TROUPE, *arguments], capture_output=True, text=True, timeout=300)


def product(a, b):
    columns = list(zip(*b))
    return [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in a]


def transposed(a):
    return [list(row) for row in zip(*a)]


def orthogonalised(x):
    is_tall = len(x) > len(x[0])
    if is_tall:
        x = transposed(x)
    norm = math.sqrt(sum(v * v for row in x for v in row))
    x = [[v / norm for v in row] for row in x]
    for a, b, c in QUINTIC:
        square = product(x, transposed(x))
        fourth = product(square, square)
        factor = [[b * s + c * f for s, f in zip(*rows)] for rows in zip(square, fourth)]
        moved = product(factor, x)
        x = [[a * v + m for v, m in zip(*rows)] for rows in zip(x, moved)]
    return transposed(x) if is_tall else x


def halves(indices):
    middle = len(indices) // 2
    return [indices[:middle], indices[middle:]]


def matrices_of(name, shape, is_cut):
    """The matrices of a parameter as lists of rows of places: each expert's, and queries, keys and
    values; when it is cut, the slice of each of two ranks."""
    rows, columns = shape[-2], shape[-1]
    sections = {"w_qkv": QKV_ROWS, "w_gate_up": [rows // 2, rows // 2]}.get(name, [rows])
    matrices = []
    for matrix in range(math.prod(shape[:-2])):
        groups = []
        for size in sections:
            first = sum(map(len, groups))
            groups.append(list(range(first, first + size)))
        across = list(range(columns))
        if not is_cut:
            blocks = [(group, across) for group in groups]
        elif name in ("w_qkv", "w_gate_up"):
            blocks = [(half, across) for group in groups for half in halves(group)]
        else:
            blocks = [(group, half) for group in groups for half in halves(across)]
        if name == "w_gate_up":  # one matrix
            parts = 2 if is_cut else 1
            blocks = [(blocks[i][0] + blocks[i + parts][0], across) for i in range(parts)]
        matrices += [[[(matrix * rows + i) * columns + j for j in own] for i in group]
                     for group, own in blocks]
    return matrices


class Muon(unittest.TestCase):
    def test_every_matrix_of_a_layer_moves_by_its_orthogonal_momentum(self):
        over_two = ["--ranks", "2", "--tensor-model-parallel-size", "2"]
        for optimizer, layout in [
                ("muon", []),
                ("muon", over_two),
                ("muon", [*over_two, "--muon-tp-mode", "blockwise"]),
                ("dist_muon", ["--ranks", "2"])]:
            with self.subTest(optimizer=optimizer, layout=layout):
                self.check_a_step(["--optimizer", optimizer, *layout], "blockwise" in layout)

    def check_a_step(self, flags, is_cut):
        with tempfile.TemporaryDirectory() as folder:
            run = troupe("train", *MODEL, *flags, "--muon-fp32-matmul-prec", "high",
                         "--lr", str(LEARNING_RATE), "--lr-decay-style", "constant",
                         "--weight-decay", str(WEIGHT_DECAY), "--train-iters", "2",
                         "--save-interval", "1", "--keep-checkpoints", "2", "--save", folder)
            self.assertEqual(run.returncode, 0, run.stderr)
            before, after = [read_f32(Path(folder) / "checkpoints" / f"step_{step:08d}")
                             for step in (1, 2)]
        moved = [name for name in after if name.startswith("momentum.")]
        # qkv, attention's output, router, two products of the experts: in each of two layers.
        self.assertEqual(len(moved), 10)
        for name in moved:
            weight = name.removeprefix("momentum.")
            shape, momentum = after[name]
            change = [None] * len(momentum)
            short = weight.split(".")[-1]
            for places in matrices_of(short, shape, is_cut and short != "w_router"):
                scale = math.sqrt(max(len(places), len(places[0])))
                matrix = orthogonalised([[momentum[i] for i in row] for row in places])
                for row, numbers in zip(places, matrix):
                    for i, v in zip(row, numbers):
                        change[i] = scale * v
            old, new = before[weight][1], after[weight][1]
            largest = max(abs(v) for v in change)
            for old_weight, v, new_weight in zip(old, change, new):
                expected = old_weight * (1 - LEARNING_RATE * WEIGHT_DECAY) - LEARNING_RATE * v
                # Steps in f32: errors of some 1e-7, enlarged by up to 493 (newton_schulz.h).
                self.assertAlmostEqual(new_weight, expected,
                                       delta=5e-4 * LEARNING_RATE * largest + 1e-6, msg=weight)

    # Without clipping, as the norm of the gradients is another sum.
    def test_sharded_and_whole_state_go_on_with_each_other_bit_for_bit(self):
        for layout in ([], ["--tensor-model-parallel-size", "2"]):
            with self.subTest(layout=layout), tempfile.TemporaryDirectory() as folder:
                layout = ["--ranks", str(2 * max(1, len(layout))), *layout]
                ends = []
                for optimizers in (("muon", "muon"), ("dist_muon", "muon"), ("muon", "dist_muon")):
                    save = Path(folder) / "_".join(optimizers)
                    for steps, optimizer in zip((1, 3), optimizers):
                        run = troupe("train", *MODEL, *layout, "--optimizer", optimizer,
                                     "--bf16", "--train-iters", str(steps), "--save-interval",
                                     "1", "--clip-grad", "0", "--lr", "1e-2", "--lr-decay-style", "constant",
                                     "--save", str(save), "--load", str(save))
                        self.assertEqual(run.returncode, 0, run.stderr)
                    ends.append(read_f32(save / "checkpoints" / "step_00000003"))
                self.assertEqual(ends[1], ends[0])
                self.assertEqual(ends[2], ends[0])

    def test_plans_show_what_sharded_state_saves(self):
        optimizer_bytes = []
        for optimizer in ("muon", "dist_muon"):
            run = troupe("plan", *MODEL, "--ranks", "4", "--micro-batch-size", "1", "--optimizer",
                         optimizer, "--json")
            self.assertEqual(run.returncode, 0, run.stderr)
            optimizer_bytes.append(json.loads(run.stdout)["bytes"]["optimizer"])
        self.assertLess(optimizer_bytes[1], 0.5 * optimizer_bytes[0])

    def test_what_cannot_be_is_refused(self):
        for flags, part in [
                (["--muon-tp-mode", "distributed"], "Use duplicated, which gives the same update"),
                (["--ranks", "2", "--use-distributed-optimizer"],
                 "use --optimizer dist_muon, which shards whole matrices"),
                (["--ranks", "2", "--use-megatron-fsdp"], "use --optimizer dist_muon instead"),
                (["--ranks", "2", "--use-megatron-fsdp", "--optimizer", "dist_muon"],
                 "--use-megatron-fsdp cuts them between rows: leave it out"),
                (["--optimizer-cpu-offload"], "Leave out --optimizer-cpu-offload"),
                (["--muon-num-ns-steps", "6"], "quintic are those of 5 steps")]:
            optimizer = [] if "--optimizer" in flags else ["--optimizer", "muon"]
            run = troupe("plan", *MODEL, *optimizer, *flags)
            self.assertEqual(run.returncode, 2, run.stderr)
            self.assertIn(part, run.stderr)
        for flag in ("--muon-momentum 0.8", "--muon-nesterov", "--muon-scale-mode unit_rms_norm",
                     "--muon-extra-scale-factor 0.2", "--muon-coefficient-type simple",
                     "--muon-num-ns-steps 3", "--muon-fp32-matmul-prec high", "--muon-no-split-qkv",
                     "--muon-tp-mode blockwise"):
            with self.subTest(flag):
                run = troupe("plan", *MODEL, *flag.split())
                self.assertEqual(run.returncode, 2, run.stderr)
                self.assertIn(f"{flag.split()[0]}: it belongs to --optimizer muon", run.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
