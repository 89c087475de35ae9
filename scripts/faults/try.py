#!/usr/bin/env python3
"""Tries the faults that plant.py planted, each by itself, against the tests, and counts those that a
test notices.

First every test runs without a fault, by itself, to learn which faults it reaches and how long it
takes, which FOLDER/reached.json keeps; tests that fail then are left out and named. Then, for each
fault, the tests that reach it run until one fails or takes too long, those that took least time first.

Usage: try.py FOLDER [--jobs N] [--seconds N] [--only NUMBER,...] [--tests REGEX] [--learn]
  FOLDER: where plant.py wrote, built (scripts/build.sh release all -DTROUPE_WERROR=OFF: of some
  faults the compiler says that they change nothing). --seconds: what one fault may take, which then
  counts as not noticed: read on which test, since it may hang.
Writes FOLDER/tried.tsv: number, noticed | survived | out of time | not reached, how many tests reach
it, at which test it ended, file:line, the old text, the change.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import subprocess
import tempfile
import time

SKIPPED = 77


class Test:
    def __init__(self, entry):
        self.name = entry["name"]
        self.command = entry.get("command", [])
        properties = {each["name"]: each["value"] for each in entry.get("properties", [])}
        self.limit_s = properties.get("TIMEOUT", 300)
        self.folder = properties.get("WORKING_DIRECTORY", ".")
        # Of a test program; empty of a script.
        self.case = next((word.removeprefix("--gtest_filter=") for word in self.command
                          if word.startswith("--gtest_filter=")), "")
        self.seconds = 0.0  # as learnt, like the faults that it reaches
        self.reached = frozenset()


def status_of(command, folder, limit_s, **variables):
    """The status of a command, None where it took longer than limit_s; its descendants end with it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        environment = {**os.environ, "TMPDIR": scratch, **variables}
        process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            try:
                os.killpg(process.pid, 9)
            except ProcessLookupError:
                pass
            process.wait()


def run_unfaulted(test, scratch):
    """The test's status without a fault, its seconds, and the faults that it reaches."""
    file = pathlib.Path(scratch) / test.name.replace("/", "~")[:200]
    begin = time.monotonic()
    status = status_of(test.command, test.folder, test.limit_s, TROUPE_FAULTS_REACHED=str(file))
    seconds = time.monotonic() - begin
    reached = [n for n, byte in enumerate(file.read_bytes()) if byte] if file.exists() else []
    return status, seconds, reached


def run_all_unfaulted(tests, jobs):
    """Of each test that passes, by name: its seconds and the faults that it reaches."""
    begin = time.monotonic()
    # Scripts first: they take longest.
    tests = sorted(tests, key=lambda test: test.case != "")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, \
            concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        runs = list(zip(tests, pool.map(lambda test: run_unfaulted(test, scratch), tests)))
    failed = [test.name for test, (status, _, _) in runs if status not in (0, SKIPPED)]
    print(f"{len(tests)} tests ran in {time.monotonic() - begin:.0f} s; left out, since they fail "
          f"without a fault: {' '.join(failed) or 'none'}", flush=True)
    return {test.name: (seconds, reached) for test, (status, seconds, reached) in runs if status == 0}


def grouped(tests):
    """The tests in groups that run at once: those of one program, and each script by itself."""
    programs, groups = collections.defaultdict(list), []
    for test in sorted(tests, key=lambda test: test.seconds):
        if test.case:
            programs[test.command[0]].append(test)
        else:
            groups.append([test])
    # Few first: most faults are noticed by any test that reaches them.
    groups += [part for cases in programs.values() for part in (cases[:20], cases[20:]) if part]
    return sorted(groups, key=lambda group: sum(test.seconds for test in group))


def try_fault(number, tests, limit_s):
    if not tests:
        return "not reached", ""
    end = time.monotonic() + limit_s
    for group in grouped(tests):
        first = group[0]
        left = end - time.monotonic()
        if left <= 0:
            return "out of time", first.name
        command = first.command
        with tempfile.NamedTemporaryFile("w", suffix=".flags") as flags:
            if first.case:
                cases = ":".join(test.case for test in group)
                flags.write(f"--gtest_filter={cases}\n--gtest_fail_fast\n")
                flags.flush()
                command = [command[0], f"--gtest_flagfile={flags.name}"]
            status = status_of(command, first.folder, left, TROUPE_FAULT=str(number))
        if status is None:
            return "out of time", first.name
        if status not in (0, SKIPPED):
            return "noticed", first.name
    return "survived", ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--only", default="")
    parser.add_argument("--tests", default=".", help="a regular expression: only tests with such names")
    parser.add_argument("--learn", action="store_true", help="end after the run without a fault")
    arguments = parser.parse_args()
    if not (arguments.folder / "faults.tsv").exists() or not (arguments.folder / "build").exists():
        parser.error(f"{arguments.folder}: holds no planted faults (plant.py), or was not built yet")
    rows = [line.split("\t") for line in (arguments.folder / "faults.tsv").read_text().splitlines()]
    only = {each for each in arguments.only.split(",") if each}
    faults = {int(row[0]): row for row in rows if not only or row[0] in only}

    listing = subprocess.run(["ctest", "--show-only=json-v1", "-LE", "gpu", "-R", arguments.tests],
                             check=True, cwd=arguments.folder / "build", capture_output=True)
    tests = [Test(each) for each in json.loads(listing.stdout)["tests"]]
    tests = [test for test in tests if test.command]
    kept = arguments.folder / "reached.json"
    if not kept.exists():
        kept.write_text(json.dumps(run_all_unfaulted(tests, arguments.jobs)))
    passed = json.loads(kept.read_text())
    tests = [test for test in tests if test.name in passed]
    for test in tests:
        test.seconds, reached = passed[test.name]
        test.reached = frozenset(reached)
    if arguments.learn:
        return

    reaching = {n: [test for test in tests if n in test.reached] for n in faults}
    begin, counts, output = time.monotonic(), collections.Counter(), []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        tried = {pool.submit(try_fault, n, reaching[n], arguments.seconds): n for n in faults}
        for future in concurrent.futures.as_completed(tried):
            n = tried[future]
            verdict, name = future.result()
            counts[verdict] += 1
            output.append((n, verdict, len(reaching[n]), name, *faults[n][1:]))
            (arguments.folder / "tried.tsv").write_text(
                "".join("\t".join(map(str, row)) + "\n" for row in sorted(output)))
            if verdict != "noticed":
                print(f"{n} {verdict}: {' | '.join(faults[n][1:])}", flush=True)
    print(f"{counts['noticed']} of {len(faults)} noticed, in {time.monotonic() - begin:.0f} s; "
          f"{dict(counts)}")


main()
