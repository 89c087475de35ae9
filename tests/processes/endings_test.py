#!/usr/bin/env python3
"""How runs of several processes end: interrupted, killed, stuck, refused. Nothing is left behind."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
import unittest.mock

from processes_test_support import (FOLDED, HERE, PROCESSES, ProcessesTest, left_behind, main, marked,
                              metrics, run, signals_of, tensors, train_arguments)


class Endings(ProcessesTest):
    def start_run(self, name, *flags):
        """A long run that has done a step; its ranks' processes."""
        save = HERE.folder / name
        process = HERE.launcher.start(PROCESSES, HERE.troupe, *train_arguments(
            save, *FOLDED, "--train-iters", 20000, "--quiet", "--collective-timeout-s", 5,
            *flags))
        deadline = time.monotonic() + 60
        while not (save / "metrics.jsonl").exists() or not metrics(save):
            self.assertLess(time.monotonic(), deadline, "no step was done")
            time.sleep(0.05)
        ranks = {}
        for pid in marked(process.mark):
            for entry in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(HERE.launcher.rank_variable.encode() + b"="):
                    ranks[int(entry.split(b"=")[1])] = pid
        self.assertEqual(len(ranks), PROCESSES)
        return save, process, ranks

    def wait(self, process):
        try:
            _, errors = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            signals = signals_of(process.mark)
            for pid in marked(process.mark):
                os.kill(pid, signal.SIGKILL)
            _, errors = process.communicate()
            self.fail(f"the run did not end: {errors}\n{signals}")
        self.assertEqual(left_behind(process.mark), [], "processes are left behind")
        return errors

    def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on_as_threads(self):
        save, process, ranks = self.start_run("interrupted")
        os.kill(ranks[2], signal.SIGINT)
        errors = self.wait(process)
        self.assertEqual(process.returncode, 130, errors)
        last = metrics(save)[-1]["step"]
        self.assertEqual(len(tensors(save, last)), PROCESSES, errors)
        result = run(*train_arguments(save, "--load", save, "--train-iters", 20000,
                                      "--exit-after-step", last + 1))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(metrics(save)[-1]["step"], last + 1)

    def test_an_interrupted_launcher_lets_ranks_save(self):
        # mpirun kills ranks a second after it asked them to end, which is short on a busy machine. It
        # waits as long as it is told, twice, also where they have ended.
        with unittest.mock.patch.dict(os.environ, {
                f"{name}_MCA_odls_base_sigkill_timeout": "8" for name in ("OMPI", "PRTE")}):
            save, process, _ = self.start_run("launcher_interrupted")
        process.send_signal(signal.SIGINT)
        errors = self.wait(process)
        self.assertNotEqual(process.returncode, 0, errors)
        last = metrics(save)[-1]["step"]
        self.assertEqual(len(tensors(save, last)), PROCESSES, errors)

    def test_a_request_that_the_launcher_passes_on_stops_all(self):  # only mpirun
        save, process, _ = self.start_run("requested")
        process.send_signal(signal.SIGUSR1)
        errors = self.wait(process)
        self.assertEqual(process.returncode, 130, errors)
        self.assertEqual(len(tensors(save, metrics(save)[-1]["step"])), PROCESSES, errors)

    def test_a_killed_rank_ends_all_and_checkpoints_stay(self):
        save, process, ranks = self.start_run("killed", "--save-interval", 1)
        os.kill(ranks[1], signal.SIGKILL)
        errors = self.wait(process)
        self.assertNotEqual(process.returncode, 0, errors)
        if not HERE.launcher.is_mpi:
            self.assertEqual(len(re.findall(r"troupe: Rank 1 \[.*\] has ended without a word", errors)),
                             1, errors)
        result = self.launch(0, *train_arguments(save, *FOLDED, "--load", save, "--train-iters",
                                                 20000, "--exit-interval", 1))
        self.assertIn("saved", result.stderr_text)

    def test_a_stopped_rank_is_named_and_all_end(self):
        _, process, ranks = self.start_run("stopped")
        os.kill(ranks[3], signal.SIGSTOP)
        errors = self.wait(process)
        self.assertEqual(process.returncode, 1, errors)
        self.assertEqual(errors.count("timed out (5 s) in"), 1, errors)
        # Ranks that wait themselves may be named beside it.
        self.assertRegex(errors, r"for: .*rank 3 \[[^]]*\] \((is missing|does not answer), last seen in")

    def test_what_is_wrong_is_said_once(self):
        cases = [
            (train_arguments(HERE.folder / "wrong", "--ranks", 3, "--train-iters", 1),
             "--ranks 3: a launcher has started 2 processes"),
            (["verify", HERE.folder / "nothing"], "nothing"),
            (["train", "--no-such-flag"], "Unknown flag --no-such-flag"),
        ]
        if HERE.launcher.is_mpi:
            cases.append((["plan", "--model", HERE.folder / "config.json"],
                          "troupe plan works in one"))
        for arguments, message in cases:
            with self.subTest(arguments=arguments):
                errors = self.launch(2, *arguments, processes=2).stderr_text
                self.assertEqual(errors.count("troupe: "), 1, errors)
                self.assertIn(message, errors)

    def test_ranks_that_start_differently_are_refused(self):
        script = HERE.folder / "rank.sh"
        script.write_text(
            f'if [ "${HERE.launcher.rank_variable}" = 1 ]; then seed=5; else seed=6; fi\n'
            f'exec "{HERE.troupe}" "$@" --seed $seed\n')
        result = HERE.launcher.run(2, "sh", script, *train_arguments(HERE.folder / "unlike", "--train-iters",
                                                                1))
        self.assertEqual(result.returncode, 2, result.stderr_text)
        self.assertRegex(result.stderr_text,
                         r"options of rank 0 \[.*\]: rank 1 \[.*, process \d+\] with "
                         "--seed 5 instead of 6")

    def start_in_copies(self, *arguments):
        """Rank 1 works in the folder `stale`, the others in `fresh`."""
        script = HERE.folder / "copies.sh"
        script.write_text(
            f'if [ "${HERE.launcher.rank_variable}" = 1 ]; then cd "{HERE.folder}/stale"\n'
            f'else cd "{HERE.folder}/fresh"; fi\n'
            f'exec "{HERE.troupe}" "$@"\n')
        return HERE.launcher.run(2, "sh", script, *arguments)

    def large_corpus(self):
        """Data whose bytes are not all sampled at the start; the place of a token that is not."""
        (HERE.folder / "large.jsonl").write_text((HERE.folder / "corpus.jsonl").read_text() * 20)
        done = run("tokenize", "--input", HERE.folder / "large.jsonl", "--output-prefix",
                   HERE.folder / "large")
        self.assertEqual(done.returncode, 0, done.stderr)
        # Sampled are 256 blocks of 4 KiB, the first and the last of the file among them.
        size = (HERE.folder / "large.bin").stat().st_size
        distance = (size - 4096) // 255
        self.assertGreater(distance, 4096 + 4)
        return distance // 2 * 2 - 2

    def test_ranks_with_stale_copies_are_refused(self):
        for folder in ("fresh", "stale"):
            (HERE.folder / folder).mkdir()
        for name, place in (("corpus", 3000), ("large", self.large_corpus())):
            for folder in ("fresh", "stale"):
                for extension in ("bin", "idx"):
                    shutil.copy(HERE.folder / f"{name}.{extension}", HERE.folder / folder)
            copy = HERE.folder / "stale" / f"{name}.bin"
            changed = bytearray(copy.read_bytes())
            changed[place] ^= 1
            copy.write_bytes(bytes(changed))
            save = HERE.folder / f"{name}_copies"
            arguments = train_arguments(save, "--train-iters", 1)
            arguments[arguments.index("--data-path") + 1] = name
            result = self.start_in_copies(*arguments)
            self.assertEqual(result.returncode, 2, result.stderr_text)
            self.assertIn(f"Rank 1 was not started as rank 0 was. On rank 1: the data set {name} is "
                          "one of", result.stderr_text)
            # Samples of the data are compared before anything is written, all of it after that.
            self.assertEqual(save.exists(), name == "large")
        # The same data, and other weights of the same step.
        shutil.copy(HERE.folder / "fresh" / "corpus.bin", HERE.folder / "stale")
        for name, seed in (("fresh", 1), ("stale", 2)):
            done = run(*train_arguments(HERE.folder / name / "run", "--train-iters", 1, "--seed", seed))
            self.assertEqual(done.returncode, 0, done.stderr)
        result = self.start_in_copies(*train_arguments(
            HERE.folder / "tuned", "--train-iters", 1, "--finetune", "--load", "run"))
        self.assertEqual(result.returncode, 2, result.stderr_text)
        self.assertIn("On rank 1: the checkpoint in run/checkpoints/step_00000001 is one whose index",
                      result.stderr_text)


if __name__ == "__main__":
    main()
