#!/usr/bin/env python3
"""Muon's update as an independent program computes it: from two checkpoints that lie one step apart,
every matrix of the layers moves by its momentum, orthogonalised, and by its weight decay; and what
--optimizer muon refuses.

Usage: muon_test.py TROUPE SOURCE
"""
import json
import math
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

TROUPE, SOURCE = sys.argv[1], Path(sys.argv[2])
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


def read_f32(folder):
    """The tensors of a checkpoint of one rank: name -> (shape, numbers). Slices ("name@row,column")
    that cut rows follow each other."""
    data = next(folder.glob("*.safetensors")).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    slices = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        begin, end = entry["data_offsets"]
        numbers = struct.unpack(f"<{(end - begin) // 4}f", data[8 + size + begin:8 + size + end])
        whole, _, offset = name.partition("@")
        place = tuple(map(int, offset.split(","))) if offset else ()
        slices.setdefault(whole, []).append((place, numbers))
    tensors = json.loads((folder / "index.json").read_text())["tensors"]
    return {tensor["name"]: (tensor["shape"],
                             [v for _, numbers in sorted(slices[tensor["name"]]) for v in numbers])
            for tensor in tensors if tensor["name"] in slices}


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


def matrices_of(name, shape, numbers):
    """As lists of rows: each expert's, and queries, keys and values."""
    rows, columns = shape[-2], shape[-1]
    sizes = QKV_ROWS if name.endswith("w_qkv") else [rows]
    all_rows = [list(numbers[i:i + columns]) for i in range(0, len(numbers), columns)]
    matrices = []
    while all_rows:
        for size in sizes:
            matrices.append(all_rows[:size])
            all_rows = all_rows[size:]
    return matrices


class Muon(unittest.TestCase):
    def test_every_matrix_of_a_layer_moves_by_its_orthogonal_momentum(self):
        with tempfile.TemporaryDirectory() as folder:
            run = troupe("train", *MODEL, "--optimizer", "muon", "--muon-fp32-matmul-prec", "high",
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
            change = []
            for matrix in matrices_of(weight, shape, momentum):
                scale = math.sqrt(max(len(matrix), len(matrix[0])))
                change += [scale * v for row in orthogonalised(matrix) for v in row]
            old, new = before[weight][1], after[weight][1]
            largest = max(abs(v) for v in change)
            for old_weight, v, new_weight in zip(old, change, new):
                expected = old_weight * (1 - LEARNING_RATE * WEIGHT_DECAY) - LEARNING_RATE * v
                # Steps in f32: errors of some 1e-7, enlarged by up to 493 (newton_schulz.h).
                self.assertAlmostEqual(new_weight, expected,
                                       delta=5e-4 * LEARNING_RATE * largest + 1e-6, msg=weight)

    def test_what_cuts_matrices_is_refused(self):
        for flags, part in [
                (["--ranks", "2", "--tensor-model-parallel-size", "2"],
                 "--optimizer muon updates whole matrices, and --tensor-model-parallel-size 2"),
                (["--ranks", "2", "--use-distributed-optimizer"],
                 "--use-distributed-optimizer cuts them: leave it out"),
                (["--optimizer-cpu-offload"], "Leave out --optimizer-cpu-offload"),
                (["--muon-num-ns-steps", "6"], "quintic are those of 5 steps")]:
            run = troupe("plan", *MODEL, "--optimizer", "muon", *flags)
            self.assertEqual(run.returncode, 2, run.stderr)
            self.assertIn(part, run.stderr)
        run = troupe("plan", *MODEL, "--muon-momentum", "0.95")
        self.assertEqual(run.returncode, 2)
        self.assertIn("--muon-momentum: it belongs to --optimizer muon", run.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
