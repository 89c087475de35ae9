#!/usr/bin/env python3
"""One step of Muon in Troupe beside one in PyTorch: from the same checkpoint and the same gradient,
in fp32, with every matrix orthogonalised as Megatron Core does it, written here from its formulas.
With a GPU that PyTorch sees, PyTorch computes there, and so does Troupe where it was built for it.

The gradient is the momentum that the same step leaves with --muon-momentum 0. Without PyTorch only
the momentum is compared.

Usage: muon_torch_gpu_test.py TROUPE SOURCE_FOLDER
"""

import itertools
import json
import math
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from checkpoint_tensors import read_f32
from program_runs import HERE, main, run

try:
    import torch
except ImportError:
    torch = None

QUERIES, KEYS = 64, 32
MODEL = ("--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 4, "--num-query-groups",
         2, "--group-query-attention", "--num-experts", 4, "--moe-router-topk", 2,
         "--moe-ffn-hidden-size", 48, "--swiglu", "--disable-bias-linear", "--normalization",
         "RMSNorm", "--vocab-size", 272, "--seq-length", 32, "--micro-batch-size", 2,
         "--global-batch-size", 4, "--mock-data", "--untie-embeddings-and-output-weights",
         "--max-position-embeddings", 32, "--lr", "1e-2", "--lr-decay-style", "constant",
         "--weight-decay", "0.1", "--seed", 3)
RATE, DECAY, BETA = 1e-2, 0.1, 0.95
QUINTIC = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
           (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))
SIMPLE = ((3.4445, -4.7750, 2.0315),) * 5
SCALES = {"spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
          "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
          "shape_scaling": lambda rows, columns: math.sqrt(max(1, rows / columns))}


def train(save, iterations, *flags):
    done = run("train", *MODEL, "--train-iters", iterations, "--save-interval", 1, "--save",
               HERE.folder / save, *flags)
    assert done.returncode == 0, done.stderr
    return read_f32(HERE.folder / save / "checkpoints" / f"step_{iterations:08d}")


def muon_flags(beta, precision, *more):
    return ("--optimizer", "muon", "--muon-momentum", beta, "--muon-fp32-matmul-prec", precision,
            *more)


def setUpModule():
    HERE.start = train("start", 1, *muon_flags(BETA, "high"))
    HERE.gradient = train("gradient", 2, "--load", HERE.folder / "start", *muon_flags(0, "high"))


def orthogonalised(x, coefficients, dtype):
    """Of a matrix, with products in `dtype`."""
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    x = (x / x.norm().clamp(min=1e-15)).to(dtype)
    for a, b, c in coefficients:
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    x = x.float()
    return x.T if is_tall else x


class MuonBesidePyTorch(unittest.TestCase):
    def after(self, precision, *flags):
        """The tensors after one more step from the start."""
        save = f"{precision}{len(list(HERE.folder.iterdir()))}"
        return train(save, 2, "--load", HERE.folder / "start", *muon_flags(BETA, precision, *flags))

    def matrices(self):
        names = [name for name in HERE.start if name.startswith("momentum.")]
        self.assertEqual(len(names), 10)
        return [name.removeprefix("momentum.") for name in names]

    def test_momentum_is_the_mean_of_gradients(self):
        after = self.after("high")
        for name in self.matrices():
            name = f"momentum.{name}"
            for old, gradient, new in zip(HERE.start[name][1], HERE.gradient[name][1],
                                          after[name][1]):
                # Three roundings to fp32 of numbers of this size.
                self.assertAlmostEqual(new, BETA * old + (1 - BETA) * gradient,
                                       delta=3e-7 * (abs(old) + abs(gradient)) + 1e-12, msg=name)

    @unittest.skipIf(torch is None, "needs torch")
    def test_a_step_is_that_of_pytorch(self):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        has_cuda = json.loads(run("doctor", "--json").stdout)["cuda"]
        flags = ("--device", "cuda") if device == "cuda" and has_cuda else ()
        cases = itertools.chain(
            itertools.product(("high",), SCALES, ("quintic", "simple"), (False, True)),
            [("medium", "spectral", "quintic", False)])
        for precision, scale, coefficients, nesterov in cases:
            with self.subTest(precision=precision, scale=scale, coefficients=coefficients,
                              nesterov=nesterov):
                after = self.after(precision, "--muon-scale-mode", scale,
                                   "--muon-coefficient-type", coefficients,
                                   *(("--muon-nesterov",) if nesterov else ()), *flags)
                for name in self.matrices():
                    self.check(name, after, precision, SCALES[scale],
                               QUINTIC if coefficients == "quintic" else SIMPLE, nesterov, device)

    def check(self, name, after, precision, scale, coefficients, nesterov, device):
        def tensor(tensors, key):
            shape, numbers = tensors[key]
            return torch.tensor(numbers, dtype=torch.float32, device=device).reshape(shape)

        weight = tensor(HERE.start, name)
        gradient = tensor(HERE.gradient, f"momentum.{name}")
        momentum = torch.lerp(tensor(HERE.start, f"momentum.{name}"), gradient, 1 - BETA)
        update = torch.lerp(gradient, momentum, BETA) if nesterov else momentum
        rows = update.shape[-2]
        sections = [QUERIES, KEYS, KEYS] if name.endswith("w_qkv") else [rows]

        def moved_in(dtype):
            parts = [scale(*part.shape) * orthogonalised(part, coefficients, dtype)
                     for matrix in update.reshape(-1, rows, update.shape[-1])
                     for part in matrix.split(sections)]
            return torch.cat(parts).reshape(weight.shape)

        found = (weight * (1 - RATE * DECAY) - tensor(after, name)) / RATE
        if precision == "high":
            # Sums of fp32 in other orders, enlarged by up to 493 (newton_schulz.h).
            expected = moved_in(torch.float32)
            tolerance = 1e-3 * expected.norm()
        else:
            # Products in bf16 round to other sides: both are as far from the exact result.
            expected = moved_in(torch.bfloat16)
            tolerance = 2 * (expected - moved_in(torch.float64)).norm()
        self.assertLess(float((found - expected).norm()), float(tolerance), name)


if __name__ == "__main__":
    main()
