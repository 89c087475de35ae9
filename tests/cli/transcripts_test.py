#!/usr/bin/env python3
"""Sessions of a shell in tests/cli/transcripts: each command is run again, and must print what stands
below it, to the letter.

A file of them is in cram's format. Lines that begin with two spaces are the session: `$ ` begins a
command and `> ` goes on with it; then follow the lines of standard output, those of standard error
after `! `, and the status in brackets unless it is 0. All other lines explain. The commands of a
file run one after the other in one empty folder. What differs from run to run and from machine to
machine is a sign of its own in all of them (MASKS).

After an intended change, run the test with the environment variable TROUPE_UPDATE_GOLDEN=1 to write
the files anew, and review the difference like any other code.

Usage: transcripts_test.py TROUPE SOURCE_FOLDER [-k NAME]
"""

import difflib
import os
import pathlib
import re
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main

FILES = pathlib.Path(__file__).with_name("transcripts")
DURATION = r"(?<![\w.])[\d.]+ (?:ns|us|ms|s|min|h|d)\b"
MASKS = [
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", "<date>"),
    (r"\b\d\d:\d\d:\d\d\b", "<time>"),
    (r"[\d.]+ (?:[kMGT] ?)?(?:tokens|(?:model )?TFLOP|Gflop)/s", "<rate>"),
    (r"[\d.]+ (?:[KMGT]i)?B/s", "<rate>"),
    (r"\d+% of (?=limit|the matmul)", "<part> of "),
    (rf"( ?) *{DURATION}(?: {DURATION})*", r"\1<duration>"),
    (r'("?(?:tokens_per_s|tflops_per_gpu|matmul_limit_tflops|step_time_s|seconds|available_bytes)"?: ?)[\d.e+-]+',
     r"\1<measured>"),
    (r'(<measured>, "peak_bytes": ?)\d+', r"\1<measured>"),
    # Of what a tensor has been trained to: other processors and other BLAS round otherwise.
    (r'("tensor": "[^"]*", "offset": \[[^]]*\], "shape": \[[^]]*\], "xxh3": )"[0-9a-f]{16}"',
     r'\1"<bits>"'),
    (r'("(?:commit|host)": ?)"[^"]*"', r'\1"<here>"'),
    (r"(?<=available) +[\d.]+ [KMGT]iB", " <memory>"),
    (r";\s+[\d.]+ [KMGT]iB\s+are\s+available\s+here:\s+as\s+threads\s+of\s+one\s+process\s+they\s+",
     "; <memory> are available here: as threads of one process they "),
    (r"(?<=with at most )[\d.]+ [KMGT]iB(?= of memory)", "<memory>"),
]


# Sessions whose figures are planned, or read from files that they write: the same everywhere, except
# what planning took.
NOT_MEASURED = {"plan_gpus", "plan_search", "report"}
MASKS_OF_PLANNING = [
    (r"built\s+and\s+checked\s+in\s+[\d.]+\s+\w+,\s+with\s+at\s+most\s+[\d.]+\s+\w+\s+of\s+memory",
     "built and checked in <duration>, with at most <memory> of memory"),
    (r'(check: \{"seconds": )[\d.e-]+, "peak_bytes": \d+', r'\1<measured>, "peak_bytes": <measured>'),
]


def digits(match):
    """Six of them: the sums of other processors and of other BLAS end in other bits."""
    return f"{float(match.group()):.6g}"


def masked(text, masks):
    text = text.replace(str(HERE.source), "<source>")
    for pattern, sign in masks:
        text = re.sub(pattern, sign, text)
    return re.sub(r"\d+\.\d{7,}(?:e-?\d+)?", digits, text)


# The last two of scripts/faults.
KEPT = ("HOME", "TMPDIR", "TROUPE_FAULT", "TROUPE_FAULTS_REACHED")


def environment():
    """Without what could change an output: the width of a terminal, launchers, the language."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    path = f"{pathlib.Path(HERE.troupe).parent}:{FILES}:{os.environ['PATH']}"
    return kept | {"PATH": path, "LC_ALL": "C.UTF-8", "SOURCE": str(HERE.source)}


def session(command, folder, masks):
    """The lines that a command prints, and its status."""
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment(),
                          stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          errors="backslashreplace", check=False)
    lines = masked(done.stdout, masks).rstrip("\n").splitlines()
    lines += ["! " + line for line in masked(done.stderr, masks).splitlines()]
    if done.returncode != 0:
        lines.append(f"[{done.returncode}]")
    return lines


def rerun(text, folder, masks):
    """The file as it would be now."""
    lines, new = text.splitlines(), []
    while lines:
        line = lines.pop(0)
        if not line.startswith("  $ "):
            new.append(line)
            continue
        command = [line]
        while lines and lines[0].startswith("  > "):
            command.append(lines.pop(0))
        printed = session("\n".join(part[4:] for part in command), folder, masks)
        new += command + [("  " + each).rstrip() for each in printed]
        blank = 0  # lines at the end of the old output, which belong to the file
        while lines and re.match(r"$|  (?!\$ )", lines[0]):
            blank = 0 if lines.pop(0) else blank + 1
        new += [""] * blank
    return "\n".join(new) + "\n"


class Transcripts(unittest.TestCase):
    longMessage = False


def check(path):
    def test(self):
        folder = HERE.folder / path.stem
        folder.mkdir()
        text = path.read_text()
        self.assertIn("\n  $ ", text, "a transcript without commands")
        new = rerun(text, folder, MASKS_OF_PLANNING if path.stem in NOT_MEASURED else MASKS)
        if "TROUPE_UPDATE_GOLDEN" in os.environ:
            path.write_text(new)
            return
        difference = difflib.unified_diff(text.splitlines(), new.splitlines(), path.name, "now",
                                          lineterm="")
        self.assertEqual(text, new, "\n".join(["", *difference]))
    return test


for file in sorted(FILES.glob("*.txt")):
    setattr(Transcripts, "test_" + file.stem, check(file))

if __name__ == "__main__":
    main()
