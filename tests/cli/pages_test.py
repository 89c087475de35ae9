#!/usr/bin/env python3
"""Every command that the pages print works: those of README.md, CONTRIBUTING.md and docs.

A fenced block says what it is: `sh` is a shell's commands, `console` a session of which `$ ` begins
the commands, `python` a program; `text` and other languages are none, and other blocks are refused.
The commands of a page run one after the other in a folder of its own, which looks like a source folder
with a built program, a text and two short runs in it. What takes minutes is made shorter first
(SHORTER), `...` becomes the flags of a small run, and launchers are stood in for (LAUNCHER). A command that cannot run here stands in NOT_RUN, with the reason. Each command of make
is one that make knows (make -n). In running text, `troupe` names flags that the command has, and
`make` its targets.

Usage: pages_test.py TROUPE SOURCE_FOLDER [-k NAME]
"""

import os
import pathlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main, run, write_config, write_corpus

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
OTHER_LANGUAGES = {"text", "cpp", "json"}
# How a line of a shell begins. One like that in a block of text would be a command untried.
SHELL_LINE = re.compile(r"(?:\$ |\./|scripts/|build\S*/)|"
                        r"(?:troupe|make|python3|pip|mpirun|torchrun|srun|apt|export) ")

# How a command begins that may be run: others could change the machine.
HARMLESS = re.compile(r"(?:time )?(?:(?:\./)?(?:build/)?troupe|make|python3(?! -m)|mpirun|torchrun|srun) |"
                      r"(?:export )?[A-Z_]+=|\(umask 077; ")

# Commands that cannot be tried here, by page and beginning, and why. What can be checked of them
# without running them is checked all the same: the files of the repository that they name.
ENGINE = "needs an engine for containers and a network; containers_test.py reads the recipes"
NOT_RUN = {
    ("CONTRIBUTING.md", "/usr/bin/python3 scripts/faults/plant.py"): "needs python3-clang",
    ("CONTRIBUTING.md", "cd /tmp/faults"): "builds a copy of the project, in minutes",
    ("CONTRIBUTING.md", "python3 scripts/faults/try.py"): "runs every test, many times",
    ("docs/cuda.md", "scripts/install_dependencies.sh --unpack"): "downloads packages of Debian",
    ("docs/cuda.md", "python3 -m pip install"): "downloads a package of PyPI",
    ("docs/cuda.md", "build-cuda/tests/cuda_gpu_tests"): "needs a GPU; the build makes the file",
    ("docs/cuda.md", "python3 tests/cuda/two_hosts_gpu_test.py"): "needs two GPUs and root",
    ("docs/install.md", "podman "): ENGINE,
    ("docs/install.md", "docker "): ENGINE,
    ("docs/install.md", "apptainer "): ENGINE,
    ("docs/python.md", "pip install"): "installs a wheel that make wheel builds, in minutes",
    ("docs/python.md", "python3 -c 'checkpoint"): "needs torch; notebook_test.py reads tensors",
    ("docs/reports.md", "pip install"): "downloads a package of PyPI",
    ("docs/reports.md", "WANDB_MODE=offline"): "needs the package wandb",
    ("docs/reports.md", "wandb sync"): "needs the package wandb and its service",
    ("docs/reports.md", "MLFLOW_TRACKING_URI="): "needs the package mlflow",
}

# The same work, less of it: what would take from seconds to minutes, or needs a place that tests
# must not write to. (page, what the page says, what is run)
SHORTER = [
    ("docs/getting_started.md", "--train-iters 450", "--train-iters 4"),
    ("docs/getting_started.md", "--micro-batch-size 8 ", "--micro-batch-size 1 "),
    ("docs/getting_started.md", "--lr-warmup-iters 30", "--lr-warmup-iters 2"),
    ("docs/getting_started.md", "--eval-interval 100 --eval-iters 16 --save-interval 100",
     "--eval-interval 2 --eval-iters 1 --save-interval 2"),
    ("docs/getting_started.md", "--max-new-tokens 200", "--max-new-tokens 8"),
    ("docs/getting_started.md", "bench --model quickstart --seq-length 256",
     "bench --model quickstart --seq-length 64"),
    ("docs/low_precision.md", "--fp8-recipe blockwise",
     "--fp8-recipe blockwise --lr 1e-3 --train-iters 1 --seq-length 64 --split 80,20,0"),
    ("docs/low_precision.md", "troupe train --device cuda", "troupe train --device cpu"),
    ("docs/low_precision.md", "--lr-warmup-iters 30", "--lr-warmup-iters 0"),
    ("docs/low_precision.md", "--micro-batch-size 8 --train-iters 2000 --lr 3e-3",
     "--micro-batch-size 1 --min-lr 1e-4"),
    ("docs/low_precision.md", "--train-iters 600", "--train-iters 1"),
    ("docs/low_precision.md", "--eval-interval 200 --eval-iters 16",
     "--eval-interval 1 --eval-iters 1"),
    ("docs/low_precision.md", "--eval-interval 500 --eval-iters 16",
     "--eval-interval 1 --eval-iters 1"),
    ("docs/upcycling.md", "--train-iters 200 --eval-interval 100",
     "--train-iters 2 --eval-interval 1 --eval-iters 1"),
    ("docs/upcycling.md", "--train-iters 100 --eval-interval 50",
     "--train-iters 2 --eval-interval 1 --eval-iters 1"),
    ("docs/cuda.md", "troupe train --device cuda", "troupe train --device cpu"),
    ("docs/layouts.md", "--gpus 1024xh100", "--num-layers 4 --gpus 8xh100"),
    ("docs/layouts.md", "--ranks 1024 ", "--model deepseek-v3 --bf16 --global-batch-size 512 "
                                         "--seq-length 256 --ranks 1024 "),
    ("docs/benchmarks/README.md", "--seq-length 256 --micro-batch-size 8",
     "--seq-length 64 --micro-batch-size 1"),
    ("docs/benchmarks/tokenizers.md", "64_000_000", "64_000"),
    ("docs/benchmarks/tokenizers.md", "/tmp/", ""),
    ("docs/python.md", "runs/corpus", "runs/quickstart/data"),
    ("docs/python.md", "micro_batch_size=8, train_iters=450", "micro_batch_size=1, train_iters=2"),
    ("docs/ranks.md", "node1 MASTER_PORT=29500", "127.0.0.1 MASTER_PORT=FREE_PORT"),
    ("docs/ranks.md", "SECRET=...", "SECRET=0123456789abcdef0123456789abcdef"),
    ("docs/ranks.md", "torchrun ... troupe", "torchrun troupe"),
]

# What `...` stands for, by command; and where DIR is a reference.
SMALL_STEP = "--model mixtral-tiny --num-layers 1 --seq-length 16 --global-batch-size 16"
ELLIPSIS = {"train": f"{SMALL_STEP} --mock-data --lr 1e-3 --train-iters 1", "bench": SMALL_STEP}
DIR = "tests/fixtures/hf/mixtral"

# Endings other than success that the page says, or that a machine without a GPU has: what standard
# error says then.
REFUSALS = [
    ("docs/layouts.md", "--ranks 3 ", "--expert-model-parallel-size 3: it must divide the number of "
                                      "experts, 8. Nearest: 2 or 4."),
    ("docs/cuda.md", "troupe verify DIR --device cuda", "--device cuda: "),
]

# Stands in for torchrun, srun and mpirun: as many ranks as they would start, as threads of one
# process; of a training run their programs are built and checked against each other, which is all but
# its steps. Which flags launchers have is not checked.
LAUNCHER = r"""#!/usr/bin/env python3
import os, re, sys
words = sys.argv[1:]
program = words.index("troupe")
asked = " ".join(words[:program]).replace("=", " ")

def number(flag, default):
    found = re.search(rf"(?<!\S)(?:{flag}) (\d+)", asked)
    return int(found[1]) if found else default

ranks = number("-np|--nproc-per-node|--ntasks-per-node", 2) * number("--nnodes", 1)
on_paper = ["--fake-process-group"] if words[program + 1] == "train" else []
os.execvp("troupe", [*words[program:], "--ranks", str(ranks), *on_paper])
"""


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(page):
    """Of each fenced block: its language, the number of its first line, and its lines."""
    language, begin, inside = None, 0, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = re.match(r" *```(.*)$", line)
        if not fence:
            inside.append(line)
        elif language is None:
            language, begin, inside = fence[1].strip(), number + 1, []
        else:
            yield language, begin, inside
            language = None


def is_unfinished(command):
    """Does the command go on in the next line: after a backslash, in quotes, or beside the next?"""
    if command.endswith("\\") or re.search(r" &(?: +#.*)?$", command):
        return True
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def commands(page):
    """Line numbers and commands of the page's blocks, in order."""
    for language, begin, lines in blocks(page):
        if language == "python":
            yield begin, f"python3 -c {shlex.quote(chr(10).join(lines))}"
        if language not in ("sh", "console"):
            continue
        command, start = "", 0
        for number, line in enumerate(lines, begin):
            if language == "console" and not command:
                if not line.startswith("$ "):
                    continue
                line = line[2:]
            if not command:
                start = number
            command += line
            if is_unfinished(command):
                command += "\n"
                continue
            if command.strip() and not command.lstrip().startswith("#"):
                yield start, command
            command = ""
        assert not command, f"{name_of(page)}:{start}: a command without an end: {command}"


def spans(page):
    """Line numbers and code in running text and tables."""
    inside = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if re.match(r" *```", line):
            inside = not inside
        elif not inside:
            for code in re.findall(r"`([^`]+)`", line):
                yield number, code


def reason_not_to_run(page, command):
    return next((reason for (where, beginning), reason in NOT_RUN.items()
                 if where == name_of(page) and command.startswith(beginning)), None)


def runnable(page, command):
    """The command as it is run here."""
    for where, said, shorter in SHORTER:
        if where == name_of(page):
            command = command.replace(said, shorter)
    if "FREE_PORT" in command:
        with socket.create_server(("127.0.0.1", 0)) as free:
            command = command.replace("FREE_PORT", str(free.getsockname()[1]))
        command += "\nwait $!"
    lines = []
    for line in command.split("\n"):
        called = re.search(r"\btroupe (\w+)", line)
        small = ELLIPSIS.get(called[1], "") if called else ""
        lines.append(re.sub(r"(?<= )\.\.\.(?=\s|$)", small, line))
    command = re.sub(r"\bDIR\b", DIR, "\n".join(lines))
    return re.sub(r"^make ", "make -n ", command)


def setUpModule():
    """A folder like a source folder with what the pages take as given, to be copied for each page;
    and commands beside it."""
    write_config()
    write_corpus(60, 1000)  # 5 % of it are samples of the longest sequence of a page
    HERE.start = HERE.folder / "start"
    runs = HERE.start / "runs"
    (runs / "quickstart").mkdir(parents=True)
    for text in ("corpus.txt", "text.txt"):
        shutil.copy(HERE.folder / "corpus.txt", HERE.start / text)
    for suffix in (".bin", ".idx"):
        shutil.copy(HERE.folder / f"corpus{suffix}", runs / "quickstart" / f"data{suffix}")
    for name in ("first", "second"):
        done = run("train", "--quiet", "--model", HERE.folder / "config.json", "--data-path",
                   HERE.folder / "corpus", "--seq-length", 32, "--lr", "1e-3", "--train-iters", 2,
                   "--save", runs / name)
        assert done.returncode == 0, done.stderr
    for entry in HERE.source.resolve().iterdir():
        if not entry.name.startswith((".", "build", "runs")):
            (HERE.start / entry.name).symlink_to(entry)
    program = pathlib.Path(HERE.troupe).resolve()
    (HERE.start / "build").mkdir()
    (HERE.start / "build/troupe").symlink_to(program)
    HERE.commands = HERE.folder / "commands"
    HERE.commands.mkdir()
    (HERE.commands / "troupe").symlink_to(program)
    for launcher in ("torchrun", "srun", "mpirun"):
        (HERE.commands / launcher).write_text(LAUNCHER)
        (HERE.commands / launcher).chmod(0o755)


def environment(folder):
    """Without what would make a process one of several, or another user's home."""
    kept = {name: os.environ[name] for name in ("TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
    return kept | {"PATH": f"{HERE.commands}:{os.environ['PATH']}", "HOME": str(folder),
                   "LC_ALL": "C.UTF-8", "PYTHONPATH": str(HERE.source / "python")}


class Commands(unittest.TestCase):
    longMessage = False

    def check_page(self, page):
        folder = HERE.folder / name_of(page).replace("/", "_")
        shutil.copytree(HERE.start, folder, symlinks=True)
        variables = []  # what the page's shell has set
        for number, command in commands(page):
            with self.subTest(command=f"{name_of(page)}:{number}: {command}"):
                if reason_not_to_run(page, command):
                    self.check_files(command)
                    continue
                self.assertRegex(command, HARMLESS, "neither harmless nor in NOT_RUN")
                self.check_command(page, "\n".join([*variables, runnable(page, command)]), command,
                                   folder)
            if re.match(r"(?:export )?[A-Z_]+=(?:\"[^\"]*\"|\$\(.*\)|\S+)(?: +#.*)?$", command):
                variables.append(runnable(page, command))

    def check_command(self, page, script, command, folder):
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=folder,
                              env=environment(folder), stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace", check=False)
        said = next((said for where, part, said in REFUSALS
                     if where == name_of(page) and part in command), None)
        if said and done.returncode == 2:
            self.assertIn(said, " ".join(done.stderr.split()), script)
        else:
            self.assertEqual(done.returncode, 0,
                             f"run as: {script}\n{done.stderr[-2000:]}\n{done.stdout[-500:]}")

    def check_files(self, command):
        for path in re.findall(r"(?<!\S)(?:scripts|tests|python|configs|packaging)/[\w./-]+", command):
            self.assertTrue((HERE.source / path).exists(), f"there is no {path}")


def check(page):
    return lambda self: self.check_page(page)


for each in PAGES:
    if any(commands(each)):
        setattr(Commands, "test_" + re.sub(r"\W", "_", name_of(each)), check(each))


class Text(unittest.TestCase):
    longMessage = False

    def test_every_block_says_what_it_is(self):
        for page in PAGES:
            for language, number, lines in blocks(page):
                with self.subTest(block=f"{name_of(page)}:{number}"):
                    self.assertIn(language, {"sh", "console", "python", *OTHER_LANGUAGES})
                    if language == "console":
                        self.assertTrue(any(line.startswith("$ ") for line in lines),
                                        "a session without commands")
                    if language == "text":
                        self.assertEqual([line for line in lines if SHELL_LINE.match(line)], [])

    def test_every_exception_is_of_a_command(self):
        texts = {name_of(page): "\n".join(command for _, command in commands(page))
                 for page in PAGES}
        for page, beginning in NOT_RUN:
            self.assertIn(beginning, texts[page], page)
        for page, said, *_ in SHORTER + REFUSALS:
            self.assertIn(said, texts[page], page)

    def test_flags_in_running_text_are_those_of_the_command(self):
        known = {}
        for page in PAGES:
            for number, code in spans(page):
                called = re.match(r"(?:taskset \S+ \S+ )?(?:\S*/)?troupe ([a-z]+)\b(?! help)", code)
                if not called or called[1] == "help":
                    continue
                command = called[1]
                if command not in known:
                    known[command] = set(re.findall(r"--[a-z][\w-]*",
                                                    run(command, "--help").stdout))
                with self.subTest(code=f"{name_of(page)}:{number}: {code}"):
                    self.assertNotEqual(known[command], set(), "there is no such command")
                    flags = set(re.findall(r"(?<!\S)--[a-z][\w-]*", code))
                    self.assertEqual(flags - known[command] - {"--help"}, set())

    def test_targets_in_running_text_are_those_of_make(self):
        for page in PAGES:
            for number, code in spans(page):
                if not re.match(r"make [a-z-]+(?: |$)", code):
                    continue
                with self.subTest(code=f"{name_of(page)}:{number}: {code}"):
                    done = subprocess.run(["make", "-n", *shlex.split(code)[1:]], cwd=HERE.source,
                                          capture_output=True, text=True, check=False)
                    self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    main()
