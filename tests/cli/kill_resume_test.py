#!/usr/bin/env python3
"""Runs that are killed, interrupted, or stopped by a full disk go on as if nothing had happened.

Every run here must end in the same checkpoint as one run that was not disturbed: the same bytes, the
same position, and each step's metrics exactly once, with the same values.

Usage: kill_resume_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import (HERE, command, main, metrics, run, steps_done, write_config,
                          write_corpus)

STEPS = 60
KILLS = 10
# What must not depend on how often a run was stopped, and on nothing but the run.
STABLE_METRICS = ("step", "loss", "lr", "grad_norm", "tokens", "load_balancing_loss", "z_loss",
                  "experts", "val_loss", "val_tokens")

CYCLE_S = 0.0  # time of one step and its save


def train(save, *flags, threads=2):
    return ["train", "--quiet", "--model", HERE.folder / "config.json", "--data-path",
            HERE.folder / "corpus", "--train-iters", STEPS, "--lr", "1e-3", "--lr-warmup-iters", 5,
            "--micro-batch-size", 2, "--global-batch-size", 4, "--moe-z-loss-coeff", "0.001",
            "--eval-interval", 20, "--eval-iters", 2, "--split", "90,10,0", "--threads", threads,
            "--save", save, *flags]


def stable_metrics(save):
    return [{key: line[key] for key in STABLE_METRICS if key in line} for line in metrics(save)]


def checkpoints(save):
    return sorted(path.name for path in (save / "checkpoints").glob("step_*"))


def leftovers(save):
    return sorted(path.name for path in (save / "checkpoints").glob(".*"))


def content(save, step=STEPS):
    """Everything that a checkpoint says about the run: position, seed, and every tensor's hash."""
    folder = save / "checkpoints" / f"step_{step:08d}"
    index = json.loads((folder / "index.json").read_text())
    training = {key: value for key, value in index["training"].items() if key != "options"}
    return index["step"], training, {tensor["name"]: tensor for tensor in index["tensors"]}


def shards(save, step=STEPS):
    folder = save / "checkpoints" / f"step_{step:08d}"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def setUpModule():
    global CYCLE_S
    write_config()
    write_corpus(150, 50)
    begin = time.monotonic()
    done = run(*train(HERE.folder / "undisturbed", "--save-interval", "1", "--keep-checkpoints", "2"))
    CYCLE_S = (time.monotonic() - begin) / STEPS
    assert done.returncode == 0, done.stderr


class KillResume(unittest.TestCase):
    maxDiff = 4000

    def setUp(self):
        self.save = HERE.folder / self.id().rsplit(".", 1)[-1]
        self.running = []

    def tearDown(self):
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.communicate()
        shutil.rmtree(self.save, ignore_errors=True)

    def start(self, *flags):
        process = subprocess.Popen(command(*train(self.save, *flags)), stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.running.append(process)
        return process

    def finish(self, *flags):
        done = run(*train(self.save, "--load", self.save, *flags))
        self.assertEqual(done.returncode, 0, done.stderr)

    def wait_until(self, process, reached):
        while not reached():
            if process.poll() is not None:
                self.fail(f"the run ended with {process.returncode}: {process.communicate()[1]}")
            time.sleep(0.001)

    def expect_as_undisturbed(self):
        undisturbed = HERE.folder / "undisturbed"
        self.assertEqual(content(self.save), content(undisturbed))
        self.assertEqual(shards(self.save), shards(undisturbed), "the hashes are equal")
        self.assertEqual(stable_metrics(self.save), stable_metrics(undisturbed))

    def test_undisturbed_run_is_complete(self):
        lines = metrics(HERE.folder / "undisturbed")
        self.assertEqual([line["step"] for line in lines if "loss" in line],
                         list(range(1, STEPS + 1)))
        self.assertEqual([line["step"] for line in lines if "val_loss" in line],
                         list(range(0, STEPS + 1, 20)))
        self.assertEqual(checkpoints(HERE.folder / "undisturbed"),
                         [f"step_{STEPS - 1:08d}", f"step_{STEPS:08d}"])
        step, training, tensors = content(HERE.folder / "undisturbed")
        self.assertEqual(step, STEPS)
        self.assertEqual(training["position"],
                         {"step": STEPS, "updates": STEPS, "consumed_samples": 4 * STEPS,
                          "scheduled_samples": 4 * STEPS, "skipped_in_row": 0})
        self.assertEqual({tensor["role"] for tensor in tensors.values()},
                         {"parameter", "optimizer"})

    def test_killed_at_random_moments(self):
        generator = random.Random(20)
        targets = sorted(generator.sample(range(1, STEPS - 4), KILLS))
        saving = 0
        for target in targets:
            process = self.start("--load", self.save, "--save-interval", "1",
                                 "--keep-checkpoints", "2")
            self.wait_until(process, lambda step=target: steps_done(self.save) >= step)
            # A step's line appears between its computation and its save.
            time.sleep(generator.random() * CYCLE_S)
            process.kill()
            process.communicate()
            self.assertEqual(process.returncode, -signal.SIGKILL)
            saving += bool(leftovers(self.save))
        print(f"killed at steps {targets}, {saving} times within a save", file=sys.stderr)
        self.finish("--save-interval", "1", "--keep-checkpoints", "2")
        self.assertEqual(leftovers(self.save), [])
        self.expect_as_undisturbed()

    def test_killed_before_the_first_checkpoint(self):
        process = self.start("--load", self.save)
        self.wait_until(process, lambda: steps_done(self.save) >= 3)
        process.kill()
        process.communicate()
        self.assertEqual(checkpoints(self.save), [])
        self.finish()
        self.expect_as_undisturbed()

    def test_interrupted(self):
        for signal_number, target in ((signal.SIGINT, 15), (signal.SIGTERM, 35)):
            process = self.start("--load", self.save)
            self.wait_until(process, lambda step=target: steps_done(self.save) >= step)
            process.send_signal(signal_number)
            errors = process.communicate()[1]
            self.assertEqual(process.returncode, 130, errors)
            self.assertEqual(checkpoints(self.save)[-1], f"step_{steps_done(self.save):08d}")
        self.assertLess(steps_done(self.save), STEPS, "nothing was left to be done")
        self.finish()
        self.expect_as_undisturbed()

    def expect_failed_saves(self, errors, reason, kept):
        """Each is a warning, and the run goes on to its end; the last one is tried again."""
        lines = errors.splitlines()
        for line in lines[:-1]:
            self.assertRegex(line, r"^\d\d:\d\d:\d\d Warning: ", errors)
        self.assertTrue(all(reason in line for line in lines[:-1]), errors)
        self.assertEqual(sum("Trying again" in line for line in lines), 2, errors)
        self.assertEqual(lines[-1], f"troupe: The last checkpoint, of step {STEPS}, could not be "
                                    f"saved. The checkpoint of step {kept} is kept.")

    def test_files_cannot_grow(self):
        self.finish("--exit-after-step", "5")
        earlier = content(self.save, 5)

        def limit():
            # Above the size of metrics.jsonl and below that of a shard. Without a handler the
            # signal ends the process; a full disk sends none.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

        done = run(*train(self.save, "--load", self.save, "--save-interval", "3"),
                   preexec_fn=limit)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.expect_failed_saves(done.stderr, "File too large", kept=5)
        self.assertEqual(checkpoints(self.save), ["step_00000005"])
        self.assertEqual(leftovers(self.save), [])
        self.assertEqual(content(self.save, 5), earlier)
        self.finish()
        self.expect_as_undisturbed()

    def test_disk_is_full(self):
        # The small disk exists only for the processes of one script and goes with them.
        self.save.mkdir()
        script = HERE.folder / "fill_disk.sh"
        script.write_text(f"""mount -t tmpfs -o size=1500k tmpfs '{self.save}' || exit 80
"$@"
[ $? -eq 1 ] || exit 81
'{HERE.troupe}' eval --quiet --json --load '{self.save}' --data-path '{HERE.folder / "corpus"}' \\
  --split 90,10,0 --eval-iters 1 || exit 82
""")
        # Room for two checkpoints: the third save fails, and the second one is loaded.
        if shutil.which("unshare") is None:
            self.skipTest("there is no unshare")
        done = subprocess.run(["unshare", "--map-root-user", "--mount", "sh", str(script),
                               *command(*train(self.save, "--save-interval", 1))],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode == 80 or done.stderr.startswith("unshare: "):
            self.skipTest("this system lets no user mount a small disk")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.expect_failed_saves(done.stderr, "are free there", kept=2)
        self.assertEqual(json.loads(done.stdout)["step"], 2)

    def test_threads_do_not_matter(self):
        done = run(*train(self.save, threads=1))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.expect_as_undisturbed()


if __name__ == "__main__":
    main()
