"""How far are predicted steps off measured ones where the router loads experts unevenly?

Usage: python3 bench/plan_time_skew.py PROGRAM ROWS GPUS [FLAGS]
  PROGRAM  a troupe, which trains each row
  ROWS     flags of a training step, a line for each (bench/plan_time_skew.txt)
  GPUS     what plan takes for one rank: h100, h200, or a file of `troupe bench --calibrate`
  FLAGS    of all rows, in one word: "--device cuda --bf16"

Each row is trained on mock data until it has logged enough steps, then killed, since its checkpoint
would be large. `plan --gpus` gets the loads that it logged (--expert-load), and for comparison even
ones. The table in Markdown has the fullest rank's load, a mean over layers, and the median of the
steps after the first ones.
"""

import argparse
import json
import os
import pathlib
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time

WARM_UP = 4
STEPS = 16


def lines_of(path):
    """Steps that a run has logged; the last line may be half written."""
    if not path.exists():
        return []
    steps = []
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            break
        if "loss" in entry:
            steps.append(entry)
    return steps


def train(program, flags, folder):
    """Seconds of the steps that count."""
    with open(folder / "errors.txt", "w") as errors:
        process = subprocess.Popen([program, "train", *flags, "--mock-data", "--train-iters", "1000",
                                    "--lr", "1e-4", "--save", folder / "run", "--quiet"],
                                   stdout=errors, stderr=errors, start_new_session=True)
        try:
            while len(steps := lines_of(folder / "run" / "metrics.jsonl")) < STEPS:
                if process.poll() is not None:
                    sys.exit(f"{shlex.join(flags)}: {(folder / 'errors.txt').read_text()[-500:]}")
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return [step["step_time_s"] for step in steps[WARM_UP:]]


def plan(program, flags, gpus, load):
    words = list(flags)
    ranks = "1"
    if "--ranks" in words:
        at = words.index("--ranks")
        ranks = words[at + 1]
        del words[at:at + 2]
    if "--device" in words:
        at = words.index("--device")
        del words[at:at + 2]
    done = subprocess.run([program, "plan", "--gpus", f"{ranks}x{gpus}", "--json", *words,
                           "--expert-load", load], capture_output=True, text=True)
    if not done.stdout:
        sys.exit(f"{shlex.join(words)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("rows", type=pathlib.Path)
    parser.add_argument("gpus")
    parser.add_argument("flags", nargs="?", default="")
    options = parser.parse_args()
    print("| | flags | fullest rank | measured | planned | off | even loads | off |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    offs = []
    for number, line in enumerate(options.rows.read_text().splitlines(), 1):
        flags = [*shlex.split(line), *shlex.split(options.flags)]
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            measured = statistics.median(train(options.program, flags, folder))
            uneven = plan(options.program, flags, options.gpus, folder / "run" / "metrics.jsonl")
            even = plan(options.program, flags, options.gpus, "even")
        seconds, seconds_even = (each["time"]["seconds"] for each in (uneven, even))
        off, off_even = seconds / measured - 1, seconds_even / measured - 1
        offs.append(abs(off))
        print(f"| {number} | `{line.replace('--model ', '')}` | "
              f"{uneven['verdict']['expert_load']['mean']:.2f} | {1e3 * measured:.1f} ms | "
              f"{1e3 * seconds:.1f} ms | {100 * off:+.1f} % | {1e3 * seconds_even:.1f} ms | "
              f"{100 * off_even:+.1f} % |", flush=True)
    print(f"\nmean {100 * statistics.mean(offs):.1f} %, worst {100 * max(offs):.1f} %")


main()
