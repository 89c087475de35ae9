#!/usr/bin/env python3
"""A run saves itself whatever its owner forgets and whatever happens around it: no --save, a
terminal that closes, a pipe without reader, a disk that is full for a while, a second run in the
same folder, ranks with stale copies.

Usage: never_lose_test.py TROUPE SOURCE_FOLDER
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import (HERE, command, main, metrics, run, steps_done, write_config,
                          write_corpus)


def train(*flags, steps=4):
    return ["train", "--model", HERE.folder / "config.json", "--data-path", HERE.folder / "corpus",
            "--train-iters", steps, "--lr", "1e-3", "--split", "90,10,0", "--threads", 1, *flags]


def checkpoints(save):
    return sorted(path.name for path in (save / "checkpoints").glob("step_*"))


def setUpModule():
    write_config()
    write_corpus(150, 50)


class NeverLose(unittest.TestCase):
    def setUp(self):
        self.save = HERE.folder / self.id().rsplit(".", 1)[-1]
        self.work = HERE.folder / "work"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        self.running = []

    def tearDown(self):
        for process in self.running:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()

    def start(self, *flags, **options):
        process = subprocess.Popen(command(*train("--save", self.save, *flags, steps=100_000)),
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, text=True,
                                   **{"stderr": subprocess.PIPE, **options})
        self.running.append(process)
        while steps_done(self.save) < 2:
            if process.poll() is not None:
                self.fail(f"the run ended with {process.returncode}: {process.communicate()[1]}")
            time.sleep(0.01)
        return process

    def test_without_a_folder_it_makes_one(self):
        done = run(*train(), cwd=self.work)
        self.assertEqual(done.returncode, 0, done.stderr)
        folders = list((self.work / "runs").iterdir())
        self.assertEqual(len(folders), 1)
        # The model is a config.json, so it has the name of its folder.
        self.assertRegex(folders[0].name, r"^[\w.-]+-20\d{6}-\d{6}$")
        self.assertIn(f"Saving to runs/{folders[0].name} ", done.stderr)
        self.assertEqual(checkpoints(folders[0]), ["step_00000004"])
        self.assertEqual(len(metrics(folders[0])), 4)
        # Two of one second do not share it.
        both = [subprocess.Popen(command(*train("--quiet")), cwd=self.work) for _ in range(2)]
        self.assertEqual([process.wait() for process in both], [0, 0])
        self.assertEqual(len(list((self.work / "runs").iterdir())), 3)

    def test_ranks_agree_on_the_folder(self):
        done = run(*train("--ranks", 2), cwd=self.work)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(list((self.work / "runs").iterdir())), 1)

    def test_no_save_leaves_nothing(self):
        done = run(*train("--no-save"), cwd=self.work)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(list(self.work.iterdir()), [])

    def test_a_refused_run_leaves_no_folder(self):
        # With options that do not go together, and with weights that turn out to be damaged when the
        # folder is there already.
        done = run(*train("--micro-batch-size", 4, "--global-batch-size", 6), cwd=self.work)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertFalse((self.work / "runs").exists())
        model = self.work / "model"
        model.mkdir()
        shutil.copy(HERE.folder / "config.json", model)
        (model / "model.safetensors").write_text("damaged")
        for flags in ([], ["--save", self.save]):
            done = run(*train("--pretrained-checkpoint", model, *flags), cwd=self.work)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("model.safetensors", done.stderr)
        self.assertEqual(list((self.work / "runs").iterdir()), [])
        self.assertFalse(self.save.exists())

    def test_a_closed_terminal_ends_it_saved(self):
        process = self.start()
        process.send_signal(signal.SIGHUP)
        # The shell and the kernel both say it.
        process.send_signal(signal.SIGHUP)
        errors = process.communicate()[1]
        self.assertEqual(process.returncode, 130, errors)
        self.assertEqual(checkpoints(self.save), [f"step_{steps_done(self.save):08d}"])

    def test_nohup_holds(self):
        process = self.start(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        process.send_signal(signal.SIGHUP)
        before = steps_done(self.save)
        while steps_done(self.save) < before + 3:
            self.assertIsNone(process.poll())
            time.sleep(0.01)

    def test_a_reader_that_goes_ends_nothing(self):
        script = '"$@" 2>&1 | head -n 1'
        done = subprocess.run(["bash", "-o", "pipefail", "-c", script, "bash",
                               *command(*train("--save", self.save, steps=40))],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(done.stdout.splitlines()), 1)
        self.assertEqual(checkpoints(self.save), ["step_00000040"])

    def test_two_runs_do_not_share_a_folder(self):
        process = self.start()
        second = run(*train("--save", self.save, "--load", self.save))
        self.assertEqual(second.returncode, 2, second.stderr)
        self.assertIn(f"process {process.pid})", second.stderr)
        self.assertIsNone(process.poll())
        process.kill()
        process.wait()
        again = run(*train("--save", self.save, "--load", self.save))
        self.assertEqual(again.returncode, 0, again.stderr)

    def test_a_failed_save_is_tried_again(self):
        self.save.mkdir()
        (self.save / "checkpoints").symlink_to("a_disk_that_is_gone")
        process = self.start("--save-interval", 2)
        while "was not saved" not in (line := process.stderr.readline()):
            self.assertNotEqual(line, "")
        self.assertIn("Training goes on", line)
        (self.save / "checkpoints").unlink()
        while not checkpoints(self.save):
            self.assertIsNone(process.poll())
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        errors = process.communicate()[1]
        self.assertEqual(process.returncode, 130, errors)
        self.assertEqual(checkpoints(self.save)[-1], f"step_{steps_done(self.save):08d}")

    def test_a_save_by_the_clock_is_not_repeated_at_the_next_step(self):
        self.save.mkdir()
        (self.save / "checkpoints").symlink_to("a_disk_that_is_gone")
        # It is always time, until the save has failed: then not before a minute has gone by.
        process = self.start("--quiet", "--save-interval-minutes", "1e-9")
        while steps_done(self.save) < 6:
            self.assertIsNone(process.poll())
            time.sleep(0.01)
        process.kill()
        errors = process.communicate()[1]
        self.assertEqual(re.findall(r"step (\d+) was not saved", errors), ["1"], errors)

    def test_a_last_save_is_tried_twice_more_before_it_is_a_failure(self):
        mended = self.save.with_name("mended")
        for save in (self.save, mended):
            save.mkdir()
            (save / "checkpoints").symlink_to("a_disk_that_is_gone")
        process = subprocess.Popen(command(*train("--save", mended, "--quiet")),
                                   stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.running.append(process)
        while "Trying again in 5" not in (line := process.stderr.readline()):
            self.assertNotEqual(line, "")
        (mended / "checkpoints").unlink()
        done = run(*train("--save", self.save, "--quiet"))
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(done.stderr.count("Trying again"), 2, done.stderr)
        self.assertTrue(done.stderr.endswith("troupe: The last checkpoint, of step 4, could not be "
                                             "saved. Nothing was saved.\n"), done.stderr)
        self.assertEqual((process.communicate()[1], process.returncode), ("", 0))
        self.assertEqual(checkpoints(mended), ["step_00000004"])

    def test_a_disk_without_room_is_told_before_the_first_step(self):
        script = HERE.folder / "small_disk.sh"
        script.write_text(f"""mkdir -p '{self.save}'
mount -t tmpfs -o size=200k tmpfs '{self.save}' || exit 80
exec "$@"
""")
        if shutil.which("unshare") is None:
            self.skipTest("there is no unshare")
        done = subprocess.run(["unshare", "--map-root-user", "--mount", "sh", str(script),
                               *command(*train("--save", self.save, "--quiet"))],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode == 80 or done.stderr.startswith("unshare: "):
            self.skipTest("this system does not let a user mount a small disk")
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertRegex(done.stderr, r"a checkpoint takes \d+.* \(\d{6} bytes\), and \d+.* "
                                      r"\(\d+ bytes\) are free there")

    def test_a_timeline_that_cannot_be_written_ends_nothing(self):
        (HERE.folder / "in_the_way").write_text("")
        done = run(*train("--save", self.save, "--profile", "--profile-step-start", 1,
                          "--profile-step-end", 2, "--profile-dir", HERE.folder / "in_the_way" / "x",
                          "--ranks", 2))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Warning: the timeline of step 2 could not be written", done.stderr)
        self.assertEqual(checkpoints(self.save), ["step_00000004"])

    def test_the_log_begins_with_what_runs_where(self):
        self.assertEqual(run(*train("--save", self.save, "--exit-after-step", 2)).returncode, 0)
        self.assertEqual(run(*train("--save", self.save, "--load", self.save)).returncode, 0)
        lines = [json.loads(line) for line in (self.save / "metrics.jsonl").read_text().splitlines()]
        self.assertEqual([line["step"] for line in lines], [0, 1, 2, 2, 3, 4])
        self.assertEqual([line.get("header", False) for line in lines],
                         [True, False, False, True, False, False])
        self.assertEqual(lines[0]["data"], [str(HERE.folder / "corpus")])
        self.assertEqual(lines[0]["host"], os.uname().nodename)
        self.assertEqual(lines[0]["options"], f"{self.save}/options.toml")
        self.assertRegex(lines[0]["commit"], r"^([0-9a-f]{12}(-dirty)?|unknown)$")
        for line in lines:
            self.assertTrue(re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]))

    def test_another_model_is_named_by_its_fields(self):
        self.assertEqual(run(*train("--save", self.save)).returncode, 0)
        done = run(*train("--save", self.save, "--load", self.save, "--num-experts", 8))
        self.assertEqual(done.returncode, 2)
        self.assertIn("\n  num_experts: 4 saved, 8 now\n", done.stderr)
        self.assertLess(len(done.stderr.splitlines()), 8, done.stderr)


if __name__ == "__main__":
    main()
