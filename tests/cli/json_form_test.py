#!/usr/bin/env python3
"""The form of the JSON that each command prints with --json: one document, alone on standard output,
indented by two or all in one line, in UTF-8 whatever the names in it are.

Usage: json_form_test.py TROUPE SOURCE_FOLDER
"""

import os
import pathlib
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, command, json_in_form, main, write_config, write_corpus

MODEL = ["--seq-length", 16, "--threads", 2]
# A name that is no UTF-8, and the character that JSON has in its place.
ODD = b"r\xffn \xc3\xa9"
SHOWN = "r\ufffdn \u00e9"


def printed(*arguments):
    done = subprocess.run(command(*arguments), cwd=HERE.folder, stdin=subprocess.DEVNULL,
                          capture_output=True, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace")


class JsonForm(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        write_config()
        write_corpus(10, 30)

    def document(self, indent, *arguments, status=0):
        """What the command prints, which must have that form."""
        code, text, errors = printed(*arguments, "--json")
        self.assertEqual(code, status, errors)
        document, plain, formed = json_in_form(text, indent)
        self.assertEqual(plain, formed)
        return document

    def test_of_commands_that_look_at_a_model(self):
        odd = HERE.folder / os.fsdecode(b"models " + ODD)
        odd.mkdir()
        shutil.copy(HERE.folder / "config.json", odd)
        model = ["--model", odd, *MODEL]
        layout = [*model, "--ranks", 2, "--tensor-model-parallel-size", 2]
        search = [*model, "--gpus", "2xh100", "--global-batch-size", 2, "--search"]
        for indent, arguments in (
                (2, ["plan", *model]), (2, ["plan", *layout]),
                (2, ["plan", *layout, "--fake-process-group"]), (2, ["plan", *search]),
                (None, ["inspect", *model]), (None, ["inspect", *model, "--passes"]),
                (2, ["bench", *layout]),
                (2, ["verify", HERE.source / "tests/fixtures/hf/mixtral"])):
            with self.subTest(arguments=arguments):
                self.document(indent, *arguments)
        self.assertTrue(self.document(2, "doctor")["healthy"])

    # Data, a run and what is made of it, under names that are no UTF-8.
    def test_of_commands_with_files(self):
        odd = os.fsdecode(ODD)
        tokenized = self.document(2, "tokenize", "--input", "corpus.txt", "--split-documents", 1,
                                  "--output-prefix", odd)
        self.assertEqual(tokenized["output_prefix"], SHOWN)
        data = ["--data-path", odd, "--split", "50,50,0", *MODEL]
        train = ["train", "--model", "config.json", *data, "--train-iters", 1, "--lr", 1e-3]
        run = self.document(2, *train, "--save", odd)
        self.assertEqual(run["save"], SHOWN)
        self.document(2, "eval", "--load", odd, *data, "--eval-iters", 1)
        generated = self.document(2, "generate", "--load", odd, "--prompt", odd,
                                  "--max-new-tokens", 2, "--threads", 2)
        self.assertEqual(generated["prompt"], SHOWN)
        written = self.document(2, "convert", "--load", odd, "--save", odd + "2")
        self.assertEqual(written["save"], SHOWN + "2")
        report = self.document(None, "report", odd, "--output", odd + ".html")
        self.assertEqual(report["page"], SHOWN + ".html")
        self.assertEqual(report["runs"][0]["name"], SHOWN)


if __name__ == "__main__":
    main()
