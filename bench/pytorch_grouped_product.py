"""Times PyTorch's grouped product on a GPU, for comparison with grouped_product_bench: the same
shapes, dtype and kind of loads.

Prints a line for each product: median time of seven runs after two, and its rate. Weight gradients
come out in bf16 here, in fp32 there, which writes twice as much.

Usage: python3 bench/pytorch_grouped_product.py [MODEL]     needs torch 2.8 or later
"""

import statistics
import sys

import torch

# experts, rows, hidden, inner: as in grouped_product_bench.cu
MODELS = {
    "mixtral-8x7b": (8, 16384, 4096, 14336),
    "mixtral-8x22b": (8, 16384, 6144, 16384),
    "qwen3-30b": (128, 65536, 2048, 768),
    "qwen3-30b-ep4": (32, 65536, 2048, 768),
    "qwen3-235b-ep8": (16, 65536, 4096, 1536),
    "deepseek-v3-ep8": (32, 65536, 7168, 2048),
    "olmoe": (64, 65536, 2048, 1024),
}


def median_ms(run):
    times = []
    for i in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def main():
    torch.manual_seed(1)
    for name in sys.argv[1:] or MODELS:
        experts, rows, hidden, inner = MODELS[name]
        loads = 0.9 + 0.2 * torch.rand(experts, dtype=torch.float64)
        ends = (loads.cumsum(0) / loads.sum() * rows).round().to(torch.int32).cuda()
        for number, (n, k) in enumerate(((2 * inner, hidden), (hidden, inner)), start=1):
            x, dy, weight = random(rows, k), random(rows, n), random(experts, n, k) * 0.05
            products = {
                "forward": lambda: torch._grouped_mm(x, weight.transpose(1, 2), offs=ends),
                "data gradient": lambda: torch._grouped_mm(dy, weight, offs=ends),
                "weight gradient": lambda: torch._grouped_mm(dy.t(), x, offs=ends),
            }
            for product, run in products.items():
                ms = median_ms(run)
                rate = 2 * rows * n * k / ms / 1e9
                print(f"{name:16} {product:15} {number} {ms:8.3f} ms {rate:6.0f} TFLOP/s", flush=True)
            del x, dy, weight


if __name__ == "__main__":
    main()
