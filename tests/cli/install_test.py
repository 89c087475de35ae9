#!/usr/bin/env python3
"""What make install installs: a tree that works wherever it is moved, with a man page and completions.

Usage: install_test.py TROUPE SOURCE_FOLDER
"""

import pathlib
import re
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, main

# Sets the words of a command line, of which the last is completed, and prints what bash offers.
COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_troupe
printf '%s\\n' "${COMPREPLY[@]}"
"""


def call(*command):
    return subprocess.run([*map(str, command)], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, errors="replace", check=False)


def setUpModule():
    build = pathlib.Path(HERE.troupe).parents[1]
    done = call("cmake", "--install", build, "--prefix", HERE.folder / "first")
    assert done.returncode == 0, done.stdout + done.stderr
    (HERE.folder / "first").rename(HERE.folder / "moved")


class Installed(unittest.TestCase):
    def setUp(self):
        self.prefix = HERE.folder / "moved"
        self.troupe = self.prefix / "bin/troupe"

    def test_a_moved_program_finds_its_models(self):
        done = call(self.troupe, "plan", "--model", "quickstart", "--seq-length", 64)
        self.assertEqual(done.returncode, 0, done.stderr)
        shutil.rmtree(self.prefix / "share/troupe")
        done = call(self.troupe, "plan", "--model", "quickstart", "--seq-length", 64)
        self.assertEqual(done.returncode, 2)
        self.assertIn("No configurations are installed beside this program", done.stderr)
        shutil.copytree(HERE.source / "configs", self.prefix / "share/troupe/configs")

    def test_it_knows_nothing_of_the_sources(self):
        paths = re.findall(re.escape(bytes(HERE.source)) + rb"/[!-~]*", self.troupe.read_bytes())
        self.assertEqual(sorted(set(paths))[:5], [])

    def test_version_says_what_was_built(self):
        lines = call(self.troupe, "--version").stdout.splitlines()
        self.assertRegex(lines[0], r"^troupe \d+\.\d+\.\d+$")
        self.assertEqual([line.split()[0] for line in lines[1:]],
                         ["commit", "compiler", "processor", "cuda"])

    def test_the_man_page_has_every_command_and_no_fault(self):
        page = self.prefix / "share/man/man1/troupe.1"
        text = page.read_text()
        for section in ("NAME", "SYNOPSIS", "DESCRIPTION", "COMMANDS", "OPTIONS", "EXIT STATUS"):
            self.assertIn(f".SH {section}\n", text)
        self.assertIn("\n.B \\-\\-train\\-iters N\n", text)
        self.assertIn("\n.B troupe doctor [FLAGS]\n", text)
        # A line that begins so would be a request to man.
        for line in text.splitlines():
            if line[:1] in (".", "'"):
                self.assertRegex(line, r"^\.(TH|SH|SS|TP|B|BR|I|RI|RB|br)\b")
        if shutil.which("groff"):
            done = call("groff", "-man", "-ww", "-Tutf8", page)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertGreater(len(done.stdout.splitlines()), 500)

    def complete(self, *words):
        script = self.prefix / "share/bash-completion/completions/troupe"
        done = call("bash", "-c", COMPLETE, "bash", script, "troupe", *words)
        self.assertEqual(done.stderr, "")
        return done.stdout.split()

    def test_bash_completes_commands(self):
        self.assertEqual(self.complete("pl"), ["plan"])
        self.assertIn("train", self.complete(""))
        self.assertEqual(self.complete("help", "doc"), ["doctor"])

    def test_bash_completes_flags_of_the_command(self):
        self.assertEqual(self.complete("train", "--train-it"), ["--train-iters"])
        self.assertEqual(self.complete("doctor", "--train-it"), [])
        self.assertEqual(self.complete("train", "--lr", "1e-3", "--global-batch"),
                         ["--global-batch-size"])

    def test_bash_completes_values(self):
        self.assertEqual(self.complete("train", "--device", ""), ["cpu", "cuda"])
        self.assertEqual(self.complete("train", "--device", "=", "cu"), ["cuda"])
        self.assertEqual(self.complete("train", "--lr-decay-style", "cos"), ["cosine"])

    def test_bash_offers_files_otherwise(self):
        (HERE.folder / "a_file").touch()
        self.assertEqual(self.complete("train", "--load", f"{HERE.folder}/a_f"),
                         [f"{HERE.folder}/a_file"])

    def test_other_shells_accept_theirs(self):
        for shell, name in (("zsh", "zsh/site-functions/_troupe"),
                            ("fish", "fish/vendor_completions.d/troupe.fish")):
            script = self.prefix / "share" / name
            self.assertIn("--train-iters" if shell == "zsh" else " -l train-iters ",
                          script.read_text())
            if shutil.which(shell):
                done = call(shell, "-n", script)
                self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    main()
