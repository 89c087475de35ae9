"""Trains one small model with every way of balancing experts and draws how even their loads become:
the figure and the table of docs/routing.md.

Usage: scripts/routing_figures.py DATA_PREFIX OUT.svg [STEPS]
       DATA_PREFIX is a byte-tokenised data set, such as runs/quickstart/data; needs build/troupe
Prints the table as Markdown. Runs lie in runs/routing afterwards.
"""

import json
import pathlib
import shutil
import subprocess
import sys

MODEL = ["--model", "mixtral-tiny", "--num-experts", "16", "--moe-ffn-hidden-size", "128",
         "--moe-router-topk", "2"]
SIGMOID = ["--moe-router-score-function", "sigmoid"]
NONE = ["--moe-router-load-balancing-type", "none"]


def loss(kind, coefficient="1e-2"):
    return ["--moe-router-load-balancing-type", kind, "--moe-aux-loss-coeff", coefficient]


METHODS = [
    ("no balancing", NONE),
    ("aux_loss", loss("aux_loss")),
    ("seq_aux_loss", loss("seq_aux_loss")),
    ("global_aux_loss", loss("global_aux_loss")),
    ("sinkhorn", ["--moe-router-load-balancing-type", "sinkhorn"]),
    ("sigmoid, no balancing", NONE + SIGMOID),
    ("expert bias", NONE + SIGMOID + ["--moe-router-enable-expert-bias",
                                      "--moe-router-bias-update-rate", "1e-2"]),
    ("expert bias, 2 of 4 groups", NONE + SIGMOID + [
        "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "1e-2",
        "--moe-router-num-groups", "4", "--moe-router-group-topk", "2"]),
    ("capacity 1.25, probs", NONE + ["--moe-expert-capacity-factor", "1.25"]),
    ("capacity 1.25, position", NONE + ["--moe-expert-capacity-factor", "1.25",
                                        "--moe-token-drop-policy", "position"]),
    ("capacity 1.25, padded", NONE + ["--moe-expert-capacity-factor", "1.25",
                                      "--moe-pad-expert-input-to-capacity"]),
    ("z-loss", NONE + ["--moe-z-loss-coeff", "1e-2"]),
    ("jitter 0.1", NONE + ["--moe-input-jitter-eps", "0.1"]),
    ("aux_loss, row multiple 16", loss("aux_loss") + ["--moe-router-padding-for-quantization"]),
    ("forced balance", NONE + ["--moe-router-force-load-balancing"]),
]
DRAWN = {"no balancing": "#c0392b", "aux_loss": "#2471a3", "seq_aux_loss": "#17a589",
         "global_aux_loss": "#7d3c98", "sinkhorn": "#d68910", "expert bias": "#1e8449",
         "expert bias, 2 of 4 groups": "#808b96"}
SMOOTHING = 10  # steps


def run(name, flags, data, steps):
    folder = pathlib.Path("runs/routing") / name.replace(" ", "_").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    command = ["build/troupe", "train", *MODEL, *flags, "--data-path", data, "--split", "95,5,0",
               "--seq-length", "128", "--micro-batch-size", "8", "--global-batch-size", "16",
               "--train-iters", str(steps), "--lr", "3e-3", "--min-lr", "3e-4",
               "--lr-warmup-iters", "20", "--eval-iters", "16", "--save", str(folder), "--quiet"]
    subprocess.run(command, check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if "loss" in line]
    return training, [line for line in lines if "val_loss" in line][-1]["val_loss"]


def mean(values):
    return sum(values) / len(values)


def layer_mean(line, key):
    return mean([layer[key] for layer in line["experts"]])


def draw(curves, path):
    width, height, left, bottom, top, right = 760, 380, 60, 50, 20, 210
    steps = max(len(values) for values in curves.values())
    largest = max(max(values) for values in curves.values())
    x = lambda step: left + (width - left - right) * step / max(1, steps - 1)
    y = lambda value: height - bottom - (height - bottom - top) * (value - 1) / (largest - 1)
    text = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>']
    tick = 1
    while tick <= largest:
        text.append(f'<line x1="{left}" x2="{width - right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" '
                    f'stroke="#ddd"/><text x="{left - 8}" y="{y(tick) + 4:.1f}" '
                    f'text-anchor="end">{tick}</text>')
        tick += max(1, round(largest / 6))
    for i in range(5):
        step = round(i * (steps - 1) / 4)
        text.append(f'<text x="{x(step):.1f}" y="{height - bottom + 18}" '
                    f'text-anchor="middle">{step}</text>')
    text.append(f'<text x="{(left + width - right) / 2}" y="{height - 10}" '
                'text-anchor="middle">step</text>')
    text.append(f'<text transform="translate(16 {(height - bottom + top) / 2}) rotate(-90)" '
                'text-anchor="middle">largest expert load / mean load</text>')
    for row, (name, values) in enumerate(curves.items()):
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values))
        color = DRAWN[name]
        text.append(f'<polyline points="{points}" fill="none" stroke="{color}" '
                    'stroke-width="1.8"/>')
        line_y = top + 12 + 20 * row
        text.append(f'<line x1="{width - right + 15}" x2="{width - right + 40}" y1="{line_y}" '
                    f'y2="{line_y}" stroke="{color}" stroke-width="3"/>'
                    f'<text x="{width - right + 46}" y="{line_y + 4}">{name}</text>')
    text.append("</svg>")
    pathlib.Path(path).write_text("\n".join(text) + "\n")


def main():
    data, out = sys.argv[1], sys.argv[2]
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 200
    curves = {}
    print("| method | largest load / mean | dead experts | dropped | router entropy (of 2.77 nats) "
          "| validation loss (nats per byte) |")
    print("|---|---|---|---|---|---|")
    for name, flags in METHODS:
        training, val_loss = run(name, flags, data, steps)
        imbalance = [layer_mean(line, "imbalance") for line in training]
        if name in DRAWN:
            curves[name] = [mean(imbalance[max(0, i - SMOOTHING + 1):i + 1])
                            for i in range(len(imbalance))]
        last = training[-20:]
        print(f"| {name} | {mean([layer_mean(line, 'imbalance') for line in last]):.2f} "
              f"| {mean([layer_mean(line, 'dead') for line in last]):.1f} "
              f"| {100 * mean([layer_mean(line, 'dropped') for line in last]):.1f}% "
              f"| {mean([layer_mean(line, 'entropy') for line in last]):.2f} "
              f"| {val_loss:.3f} |", flush=True)
    draw(curves, out)


if __name__ == "__main__":
    main()
