"""How far are the steps that `troupe plan --gpus` predicts off those that `troupe bench` measures?

Usage: python3 bench/plan_time.py measure PROGRAM ROWS REPORTS
       python3 bench/plan_time.py compare PROGRAM ROWS REPORTS GPUS [--svg FILE]
  PROGRAM  a troupe; `measure` needs one with CUDA and GPUs, `compare` any
  ROWS     flags of a training step, a line for each (bench/plan_time_1xh100.txt)
  REPORTS  folder: `measure` writes what bench reported into N.json, of the N-th line; `compare`
           reads that
  GPUS     what plan takes: 1xh100, or Nx and a file of `troupe bench --calibrate`
  --svg    a picture: predicted over measured, with lines 5 and 12 % apart

All steps are in bf16, of sequences of 4,096 tokens where the line names no other. Lines with even
numbers are called held out: formulas of src/plan/kernel_rates.cc were fitted to the others.

`compare` prints a table in Markdown and, below it, the mean and the worst of both halves; it ends
with 1 where a prediction of bytes is not what was allocated.
"""

import argparse
import json
import math
import pathlib
import shlex
import statistics
import subprocess
import sys

import compare_steps


def rows_of(path):
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        flags = shlex.split(line)
        yield number, flags if "--seq-length" in flags else [*flags, "--seq-length", "4096"]


def measure(program, rows, reports):
    reports.mkdir(parents=True, exist_ok=True)
    failed = False
    for number, flags in rows_of(rows):
        report = compare_steps.measure(program, "--device cuda --bf16", shlex.join(flags))
        if report is None:
            failed = True
            continue
        (reports / f"{number}.json").write_text(json.dumps(report))
        print(f"{number}: {1e3 * report['step_time_s']:.1f} ms", flush=True)
    return failed


def without_ranks(flags):
    if "--ranks" not in flags:
        return flags
    at = flags.index("--ranks")
    return flags[:at] + flags[at + 2:]


def plan(program, flags, gpus):
    done = subprocess.run([program, "plan", "--gpus", gpus, "--bf16", "--json",
                           *without_ranks(flags)], capture_output=True, text=True)
    if not done.stdout:
        sys.exit(f"{shlex.join(flags)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def text_of(flags):
    """A row of the table: without what all rows have."""
    words = " ".join(without_ranks(flags)).replace("--model ", "", 1)
    return words.replace(" --seq-length 4096", "")


def draw(points, path):
    size, margin = 480, 56
    low = math.log10(min(min(p[:2]) for p in points) / 1.3)
    high = math.log10(max(max(p[:2]) for p in points) * 1.3)
    x = lambda v: margin + (math.log10(v) - low) / (high - low) * (size - margin - 16)
    y = lambda v: size - margin - (math.log10(v) - low) / (high - low) * (size - margin - 16)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" '
             'font-family="sans-serif" font-size="12">',
             f'<rect width="{size}" height="{size}" fill="white"/>']
    ends = (10 ** low, 10 ** high)
    for factor, colour in ((1, "#444"), (1.05, "#aaa"), (1 / 1.05, "#aaa"), (1.12, "#ddd"),
                           (1 / 1.12, "#ddd")):
        a = max(ends[0], ends[0] / factor)
        b = min(ends[1], ends[1] / factor)
        parts.append(f'<line x1="{x(a):.1f}" y1="{y(a * factor):.1f}" x2="{x(b):.1f}" '
                     f'y2="{y(b * factor):.1f}" stroke="{colour}"/>')
    for tick in (3, 10, 30, 100, 300, 1000):
        if ends[0] < tick < ends[1]:
            parts.append(f'<text x="{x(tick):.1f}" y="{size - margin + 18}" '
                         f'text-anchor="middle">{tick}</text>')
            parts.append(f'<text x="{margin - 8}" y="{y(tick) + 4:.1f}" '
                         f'text-anchor="end">{tick}</text>')
    for measured, predicted, is_held_out in points:
        fill = "#d9480f" if is_held_out else "#1c7ed6"
        parts.append(f'<circle cx="{x(measured):.1f}" cy="{y(predicted):.1f}" r="3.5" '
                     f'fill="{fill}" fill-opacity="0.75"/>')
    parts += [f'<text x="{size / 2}" y="{size - 14}" text-anchor="middle">measured, ms</text>',
              f'<text x="16" y="{size / 2}" text-anchor="middle" '
              f'transform="rotate(-90 16 {size / 2})">predicted, ms</text>',
              f'<circle cx="{margin + 16}" cy="24" r="3.5" fill="#1c7ed6"/>'
              f'<text x="{margin + 26}" y="28">fit</text>',
              f'<circle cx="{margin + 66}" cy="24" r="3.5" fill="#d9480f"/>'
              f'<text x="{margin + 76}" y="28">held out</text>', "</svg>"]
    pathlib.Path(path).write_text("\n".join(parts) + "\n")


def compare(program, rows, reports, gpus, svg):
    print("| | flags | measured | predicted | off |\n|---|---|---|---|---|")
    errors = {False: [], True: []}
    points = []
    wrong_bytes = []
    for number, flags in rows_of(rows):
        report = reports / f"{number}.json"
        if not report.exists():
            continue
        measured = json.loads(report.read_text())
        planned = plan(program, flags, gpus)
        pair = 1e3 * measured["step_time_s"], 1e3 * planned["time"]["seconds"]
        off = pair[1] / pair[0] - 1
        is_held_out = number % 2 == 0
        errors[is_held_out].append(abs(off))
        points.append((*pair, is_held_out))
        if not measured["planned_bytes"] == measured["allocated_bytes"] == planned["needed_bytes"]:
            wrong_bytes.append(number)
        print(f"| {number} | `{text_of(flags)}` | {pair[0]:.1f} ms | {pair[1]:.1f} ms | "
              f"{100 * off:+.1f} % |")
    for name, of in (("fit", errors[False]), ("held out", errors[True])):
        if of:
            print(f"\n{name}: {len(of)} rows, mean {100 * statistics.mean(of):.1f} %, "
                  f"worst {100 * max(of):.1f} %")
    if svg:
        draw(points, svg)
    if wrong_bytes:
        print(f"\nbytes differ in rows {wrong_bytes}", file=sys.stderr)
    return bool(wrong_bytes)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "compare"])
    parser.add_argument("program")
    parser.add_argument("rows")
    parser.add_argument("reports", type=pathlib.Path)
    parser.add_argument("gpus", nargs="?", default="1xh100")
    parser.add_argument("--svg")
    options = parser.parse_args()
    if options.what == "measure":
        return measure(options.program, options.rows, options.reports)
    return compare(options.program, options.rows, options.reports, options.gpus, options.svg)


if __name__ == "__main__":
    sys.exit(main())
