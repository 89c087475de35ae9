"""Times training steps of one or more builds of Troupe, alternating (A B A B ...), so that a card
that slows down slows all of them down. Prints a table in Markdown: for each model the step's time by
each build, medians over the rounds of what `troupe bench` measures, their ratio to the first build's,
and the operations whose time differs most.

Usage: python3 bench/compare_steps.py [--rounds N] [--rows FILE] [--reports FOLDER]
         PROGRAM[:FLAGS] [PROGRAM[:FLAGS] ...]
  PROGRAM  a troupe; FLAGS, separated by spaces, are added to its command lines
  FILE     flags of `troupe bench`, a line for each model; without it the four rows of
           docs/benchmarks/gpu_training_step.md
  FOLDER   gets what each `troupe bench` reported: ROW-BUILD-ROUND.json, counted from 0

  python3 bench/compare_steps.py old/build-cuda/troupe build-cuda/troupe
  python3 bench/compare_steps.py build-cuda/troupe \\
      "build-cuda/troupe:--fp8-format e4m3 --fp8-recipe tensorwise"
"""

import argparse
import json
import pathlib
import shlex
import statistics
import subprocess
import sys

GPU_FLAGS = ("--device cuda --bf16 --seq-length 4096 --micro-batch-size 2 "
             "--global-batch-size 16 --model ")
GPU_ROWS = [GPU_FLAGS + row for row in
            ("olmoe-1b-7b --num-layers 4", "qwen3-30b-a3b --num-layers 4",
             "mixtral-8x7b --num-layers 2", "mixtral-8x22b --num-layers 1")]
MOST_OPERATIONS = 5


def measure(program, flags, row):
    """The report of one run, or None with what went wrong on stderr."""
    command = [program, "bench", "--json", "--quiet", *shlex.split(row), *shlex.split(flags)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout)
    print(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr.strip()[-300:]}",
          file=sys.stderr)
    return None


def kinds_of(reports):
    """Median milliseconds by kind of operation."""
    kinds = {}
    for report in reports:
        for kind in report.get("kinds", []):
            kinds.setdefault(kind["kind"], []).append(1e3 * kind["time_s"])
    return {kind: statistics.median(times) for kind, times in kinds.items()}


def largest_differences(first, other):
    """What differs between two tables of kinds_of, as text."""
    changes = sorted(((other.get(kind, 0) - first.get(kind, 0), kind)
                      for kind in first.keys() | other.keys()), key=lambda c: -abs(c[0]))
    return ", ".join(f"{kind} {change:+.2f}" for change, kind in changes[:MOST_OPERATIONS])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", help="file with flags, a line for each model")
    parser.add_argument("--reports", type=pathlib.Path, help="folder for all reports")
    parser.add_argument("programs", nargs="+")
    options = parser.parse_args()
    rows = GPU_ROWS
    if options.rows:
        with open(options.rows) as file:
            rows = [line.strip() for line in file if line.strip()]
    builds = [program.partition(":")[::2] for program in options.programs]
    print("| `bench` | build | step, ms | of the first | TFLOP/s | limit | what differs most, ms |")
    print("|---|---|---|---|---|---|---|", flush=True)
    failed = False
    for row_index, row in enumerate(rows):
        reports = [[] for _ in builds]
        for round_index in range(options.rounds):
            for i, (build, of_build) in enumerate(zip(builds, reports)):
                report = measure(*build, row)
                failed = failed or report is None
                if report is None:
                    continue
                of_build.append(report)
                if options.reports:
                    options.reports.mkdir(parents=True, exist_ok=True)
                    path = options.reports / f"{row_index}-{i}-{round_index}.json"
                    path.write_text(json.dumps(report, indent=1))
        times = [statistics.median([1e3 * r["step_time_s"] for r in of_build] or [float("nan")])
                 for of_build in reports]
        for i, of_build in enumerate(reports):
            if not of_build:
                continue
            flops = statistics.median(r["tflops_per_gpu"] for r in of_build)
            limit = statistics.median(r["matmul_limit_flops_per_s"] / 1e12 for r in of_build)
            differs = largest_differences(kinds_of(reports[0]), kinds_of(of_build)) if i else ""
            print(f"| `{row.removeprefix(GPU_FLAGS)}` | {options.programs[i]} | {times[i]:.1f} | "
                  f"{times[i] / times[0]:.3f} | {flops:.1f} | {limit:.0f} | {differs} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
