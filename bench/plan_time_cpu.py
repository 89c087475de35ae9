"""How far are the step times that `troupe train --hardware` plans on a CPU off those that it measures?

Usage: python3 bench/plan_time_cpu.py PROGRAM ROWS [--threads N]
  PROGRAM    a troupe
  ROWS       flags of a training step, a line for each (bench/plan_time_cpu.txt)
  --threads  of all ranks together (default: 2)

For each row the machine is calibrated (`troupe bench --calibrate`), 21 steps are trained on mock data,
and the machine is calibrated again: other work on it changes how fast it is. The table in Markdown has
the median of the steps but the first, what was planned with the first calibration, and how far the two
calibrations' products of fp32 are apart. Lines with even numbers are called held out: the shares of a
CPU in src/plan/kernel_rates.cc were fitted to operations of the others.
"""

import argparse
import json
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import tomllib

STEPS = 21


def run(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(map(str, command))}: {done.stderr.strip()}")


def calibrate(program, threads, path):
    run(program, "bench", "--calibrate", path, "--threads", threads, "--quiet")
    return tomllib.loads(path.read_text())["fp32_tflops"]


def measure(program, flags, threads):
    """Seconds of a step as measured and as planned, and how much faster the machine became."""
    ranks = int(flags[flags.index("--ranks") + 1]) if "--ranks" in flags else 1
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        before = calibrate(program, threads, folder / "before.toml")
        run(program, "train", *flags, "--mock-data", "--train-iters", STEPS, "--lr", 1e-4, "--save",
            folder / "run", "--hardware", folder / "before.toml", "--threads",
            max(1, threads // ranks), "--quiet")
        after = calibrate(program, threads, folder / "after.toml")
        lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        steps = [line for line in lines if "loss" in line]
    measured = statistics.median(step["step_time_s"] for step in steps[1:])
    return measured, steps[-1]["planned_step_time_s"], after / before - 1


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("rows", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print("| | flags | measured | planned | off | machine |\n|---|---|---|---|---|---|")
    errors = {"fit": [], "held out": []}
    for number, line in enumerate(options.rows.read_text().splitlines(), 1):
        flags = shlex.split(line)
        measured, planned, change = measure(options.program, flags, options.threads)
        off = planned / measured - 1
        errors["held out" if number % 2 == 0 else "fit"].append(abs(off))
        print(f"| {number} | `{line.replace('--model ', '', 1)}` | {1e3 * measured:.1f} ms | "
              f"{1e3 * planned:.1f} ms | {100 * off:+.1f} % | {100 * change:+.0f} % |", flush=True)
    for name, of in errors.items():
        print(f"\n{name}: {len(of)} rows, mean {100 * statistics.mean(of):.1f} %, "
              f"worst {100 * max(of):.1f} %")


if __name__ == "__main__":
    main()
