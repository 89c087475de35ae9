#!/usr/bin/env python3
"""What a person sees on a terminal of 80 columns, and Ctrl-C there.

Broken before: train opened with 196 lines of options, its live line was 121 columns wide and left
a wrapped half of itself at each step, no line of a step stayed, the expert loads took a line for
every expert of every layer, --json was ignored; eval, convert and bench showed nothing and died by
the signal."""

import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import (CONFIG, HERE, command, main, metrics, run,  # noqa: E402
                          write_config, write_corpus)
from safetensors_files import write_zeros  # noqa: E402
from terminal import Screen, Terminal  # noqa: E402

STEPS = 120


def train_flags(save, *more):
    return ["train", "--model", HERE.folder / "config.json", "--data-path", HERE.folder / "corpus",
            "--split", "80,20,0", "--seq-length", "32", "--micro-batch-size", "2", "--train-iters",
            str(STEPS), "--lr", "1e-3", "--eval-interval", "60", "--eval-iters", "2", "--save",
            HERE.folder / save, *more]


class TheScreenItself(unittest.TestCase):
    def test_it_counts_wraps_and_knows_a_rewritten_line(self):
        screen = Screen(10)
        screen.feed("1234567890\r\nabc\r\x1b[Jxy\r\n")
        self.assertEqual((screen.lines(), screen.wraps), (["1234567890", "xy", ""], []))
        screen.feed("12345678901")
        self.assertEqual(len(screen.wraps), 1)


class TerminalTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        write_config()
        write_corpus(40, 1500)
        cls.trained = Terminal(*train_flags("run"))

    def expect_no_wraps(self, terminal):
        self.assertEqual(terminal.screen.wraps, [], terminal.screen.text())

    def test_train(self):
        text = self.trained.screen.text()
        self.assertEqual(self.trained.status, 0, text)
        self.expect_no_wraps(self.trained)
        steps = re.findall(r"^step +(\d+)/120 \| loss \d", text, re.MULTILINE)
        self.assertTrue(20 <= len(steps) <= 51, text)
        self.assertEqual(steps[-1], str(STEPS))
        self.assertRegex(text, r"validation loss \d\.\d{4} nats per token \| \d\.\d{3} bits/byte")
        self.assertRegex(text, r"(?m)^  layer 1  \S+  largest/mean")
        self.assertRegex(text, r"Worst: layer \d, its busiest expert")
        self.assertIn("--lr 0.001", text)
        self.assertNotIn("--adam-eps", text, "only options that differ from their defaults")
        self.assertLess(len(self.trained.screen.lines()), 100)

    def test_verbose_shows_all_options(self):
        done = run(*train_flags("verbose", "--verbose", "--exit-after-step", "1"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("--adam-eps", done.stderr)

    def test_a_narrow_terminal(self):
        terminal = Terminal(*train_flags("narrow", "--exit-after-step", "30"), columns=50)
        self.assertEqual(terminal.status, 0, terminal.screen.text())
        steps = [line for line in terminal.screen.lines() if line.startswith("step ")]
        self.assertTrue(steps and all(len(line) < 50 for line in steps), terminal.screen.text())

    def test_what_matters_least_is_left_out_first(self):
        terminal = Terminal(*train_flags("least", "--exit-after-step", "30",
                                         "--log-num-zeros-in-grad"), columns=140)
        self.assertEqual(terminal.status, 0, terminal.screen.text())
        steps = [line for line in terminal.screen.lines() if line.startswith("step ")]
        self.assertTrue(any("bits/byte" in line and "zeros" not in line for line in steps), steps)
        for line in steps:
            self.assertFalse("zeros" in line and "bits/byte" not in line, line)

    def test_eval_convert_and_inspect(self):
        for arguments, phrase in [
                (["eval", "--load", HERE.folder / "run", "--data-path", HERE.folder / "corpus",
                  "--split", "80,20,0"], "bits/byte"),
                (["convert", "--load", HERE.folder / "run", "--save", HERE.folder / "hf"],
                 "parameters"),
                (["inspect", "--model", HERE.folder / "config.json", "--layer", "0"], "attention"),
                (["plan", "--model", HERE.folder / "config.json"], "It fits."),
                (["doctor"], "cores")]:
            with self.subTest(arguments[0]):
                terminal = Terminal(*arguments)
                self.assertEqual(terminal.status, 0, terminal.screen.text())
                self.assertIn(phrase, terminal.screen.text())
                # A path of the test's own folder may be longer than a line.
                wraps = [line for line in terminal.screen.wraps if str(HERE.folder) not in line]
                self.assertEqual(wraps, [], terminal.screen.text())

    def test_ctrl_c_saves_a_training_run(self):
        terminal = Terminal(*train_flags("stopped", "--train-iters", "100000"),
                            interrupt_at=r"step +\d+/100000 \| loss")
        self.assertEqual(terminal.status, 130, terminal.screen.text())
        self.assertIn("Interrupted after step", terminal.screen.text())
        self.assertIn("stopping after what is under way; interrupt again to stop at once",
                      terminal.screen.text())
        checkpoints = HERE.folder / "stopped" / "checkpoints"
        self.assertEqual(len(list(checkpoints.glob("step_*/COMMIT"))), 1)

    def test_ctrl_c_ends_what_takes_long(self):
        # What takes less than a second shows no line to be interrupted at: each of these takes
        # some twenty.
        sets = [f"{name}={HERE.folder}/corpus" for name in "abcdefghijklmnopqrstuvwxyz"]
        for arguments, live in [
                (["eval", "--load", HERE.folder / "run", "--valid-data-path", *sets,
                  "--eval-iters", "1000000"], r"evaluating \d+/\d+ batches"),
                (["bench", "--model", "quickstart", "--seq-length", "256", "--micro-batch-size",
                  "16"], r"measuring \d+/17 steps"),
                (["plan", "--model", "qwen3-30b-a3b", "--fake-process-group", "--ranks", "1024",
                  "--pipeline-model-parallel-size", "16", "--tensor-model-parallel-size", "4",
                  "--expert-model-parallel-size", "16", "--global-batch-size", "16384"],
                 r"planning \d+/\d+ programs"),
                (["generate", "--load", HERE.folder / "run", "--max-new-tokens", "10000000",
                  "--prompt", "a"], r"(?m)^a.")]:
            with self.subTest(arguments[0]):
                terminal = Terminal(*arguments, interrupt_at=live)
                self.assertTrue(terminal.interrupted, terminal.screen.text())
                self.assertEqual(terminal.status, 130, terminal.screen.text())
                self.expect_no_wraps(terminal)

    def test_a_search_counts_upwards(self):
        # Layouts that take some ten seconds; the first are shown after a second at most.
        terminal = Terminal("plan", "--model", "qwen3-30b-a3b", "--gpus", "16xh100",
                            "--global-batch-size", 1024, "--search", "--search-top", 20,
                            interrupt_at=r"planning (\d+)/(\d+) layouts")
        self.assertTrue(terminal.interrupted, terminal.screen.text())
        self.assertLess(int(terminal.seen[1]), int(terminal.seen[2]) / 2)
        self.assertEqual(terminal.status, 130, terminal.screen.text())
        self.expect_no_wraps(terminal)

    def test_ctrl_c_ends_what_shows_no_progress(self):
        layers = ["--model", "mixtral-8x7b", "--num-layers", 2000]  # half a minute
        reference = HERE.source / "tests/fixtures/hf/qwen2_moe"  # a few tenths of a second
        for arguments in (["inspect", *layers], ["plan", *layers], ["verify", reference]):
            with self.subTest(arguments[0]), subprocess.Popen(
                    command(*arguments), text=True, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE) as process:
                status = pathlib.Path(f"/proc/{process.pid}/status")
                while not (int(re.search(r"SigCgt:\s*(\w+)", status.read_text()).group(1), 16)
                           >> (signal.SIGINT - 1)) & 1:
                    self.assertIsNone(process.poll(), "it handles SIGINT")
                    time.sleep(0.01)
                process.send_signal(signal.SIGINT)
                output, errors = process.communicate()
                self.assertEqual((output, errors, process.returncode),
                                 ("", "\ntroupe: interrupted\n", 130))

    def test_tokenize_shows_its_progress_unless_it_is_to_be_quiet(self):
        out = HERE.folder / "many"
        many = ["tokenize", "--output-prefix", out, "--input",
                *[HERE.folder / "corpus.txt"] * 500]  # seconds; a line shows after 0.1 s
        live = r"^\d+% of [0-9.]+ MiB \| \d+ documents \| [0-9.]+ [kMG] tokens \| "
        terminal = Terminal(*many, interrupt_at=live)
        self.assertTrue(terminal.interrupted, terminal.screen.text())
        self.assertEqual(terminal.status, 130, terminal.screen.text())
        self.assertIn(f"Interrupted. Nothing was written to {out}.",
                      terminal.screen.text().replace("\n", ""))
        quiet = Terminal(*many[:100], "--quiet", interrupt_at=r"\S")
        self.assertFalse(quiet.interrupted, quiet.screen.text())
        self.assertEqual(quiet.status, 0, quiet.screen.text())

    def test_tokenize_shows_the_time_that_is_left(self):
        # When all files have been read it is none, however long it took.
        master, terminal = pty.openpty()
        process = subprocess.Popen(command("tokenize", "--output-prefix", HERE.folder / "left",
                                           "--input", "-", HERE.folder / "corpus.txt"),
                                   stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=terminal)
        os.close(terminal)
        time.sleep(0.8)
        process.stdin.close()
        shown = b""
        try:
            while piece := os.read(master, 65536):
                shown += piece
        except OSError:  # the program has ended
            pass
        os.close(master)
        self.assertEqual(process.wait(), 0, shown)
        self.assertRegex(shown.decode(), r"100% of .* \| 0 s left")

    def test_convert_leaves_nothing_when_interrupted(self):
        source = HERE.folder / "large"
        write_large_model(source)
        statuses = []
        for attempt in range(5):  # the signal may come too late
            out = HERE.folder / f"converted{attempt}"
            process = subprocess.Popen(command("convert", "--load", source, "--save", out),
                                       stderr=subprocess.PIPE, text=True)
            while process.poll() is None and not list(out.glob("*.tmp")):
                time.sleep(0.001)
            process.send_signal(signal.SIGINT)
            error = process.communicate()[1]
            statuses.append(process.returncode)
            if process.returncode == 130:
                self.assertIn("Nothing was written", error)
                self.assertFalse(out.exists())
                return
            self.assertEqual(process.returncode, 0, error)
            (out / "model.safetensors").unlink()
        self.fail(f"never interrupted: {statuses}")


def write_large_model(folder):
    """134 MB of zeros: two tensors are large, so that writing them takes a while."""
    folder.mkdir()
    config = CONFIG | {"vocab_size": 65536, "hidden_size": 256, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    expert = {f"model.layers.0.mlp.experts.{e}.{name}": shape for e in range(4)
              for name, shape in (("gate_proj.weight", [32, 256]), ("up_proj.weight", [32, 256]),
                                  ("down_proj.weight", [256, 32]))}
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": [65536, 256], "lm_head.weight": [65536, 256],
        "model.norm.weight": [256], layer + "input_layernorm.weight": [256],
        layer + "post_attention_layernorm.weight": [256],
        layer + "self_attn.q_proj.weight": [32, 256], layer + "self_attn.k_proj.weight": [16, 256],
        layer + "self_attn.v_proj.weight": [16, 256], layer + "self_attn.o_proj.weight": [256, 32],
        layer + "self_attn.q_norm.weight": [8], layer + "self_attn.k_norm.weight": [8],
        layer + "mlp.gate.weight": [4, 256]} | expert
    write_zeros(folder / "model.safetensors", tensors)


class WithoutATerminalTest(unittest.TestCase):
    def test_train_json_is_one_document(self):
        write_config()
        write_corpus(20, 200, name="small")
        done = run("train", "--json", "--model", HERE.folder / "config.json", "--data-path",
                   HERE.folder / "small", "--split", "80,20,0", "--seq-length", "32",
                   "--train-iters", "3", "--lr", "1e-3", "--eval-interval", "3", "--eval-iters",
                   "1", "--save", HERE.folder / "json")
        self.assertEqual(done.returncode, 0, done.stderr)
        document = json.loads(done.stdout)
        self.assertEqual((document["status"], document["step"], document["saved_step"]),
                         ("done", 3, 3))
        lines = metrics(HERE.folder / "json")
        self.assertEqual(document["loss"], [line for line in lines if "loss" in line][-1]["loss"])
        self.assertEqual(document["val_loss"],
                         [line for line in lines if "val_loss" in line][-1]["val_loss"])
        self.assertRegex(done.stderr, r"(?m)^\d\d:\d\d:\d\d step 3/3 \| loss")

    def test_help_fits_80_columns(self):
        commands = re.findall(r"^  ([a-z]+)  ", run("--help").stdout, re.MULTILINE)
        self.assertGreater(len(commands), 9)
        for arguments in [["--help"], *([name, "--help"] for name in commands)]:
            done = run(*arguments)
            for line in done.stdout.splitlines():
                # A word without blanks, such as a flag with its value, stays whole.
                self.assertTrue(len(line) <= 80 or len(line.split()) <= 2, line)

    def test_tables_fit_80_columns(self):
        layout = ["--ranks", "8", "--tensor-model-parallel-size", "2",
                  "--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"]
        for arguments in [
                ["plan", "--model", "mixtral-tiny", *layout, "--global-batch-size", "8"],
                ["plan", "--model", "quickstart", "--seq-length", "64"],
                ["bench", "--model", "mixtral-tiny", "--seq-length", "16", "--ranks", "2"],
                ["verify", HERE.source / "tests/fixtures/hf/mixtral"], ["doctor"]]:
            with self.subTest(arguments[0]):
                done = run(*arguments)
                self.assertEqual(done.returncode, 0, done.stderr)
                wide = [line for line in done.stdout.splitlines()
                        if len(line) > 80 and not line.startswith("  rank ")]  # the picture
                self.assertEqual(wide, [])
                if "--pipeline-model-parallel-size" in arguments:
                    self.assertRegex(done.stdout, r"(?m)^ +1 +7 +1( +[0-9.]+){8}$", "a row, whole")

    def test_what_does_not_fit_names_remedies_with_their_bytes(self):
        # State for no machine alone; a layer and its tokens, for nearly each.
        done = run("plan", "--model", "mixtral-8x7b", "--num-layers", "128", "--bf16",
                   "--seq-length", "64")
        self.assertEqual(done.returncode, 3, done.stderr)
        for flags in ["--use-precision-aware-optimizer --exp-avg-dtype bf16",
                      r"--ranks \d+ --use-megatron-fsdp"]:
            self.assertRegex(re.sub(r"\s+", " ", done.stdout), r"[0-9.]+ [GT]iB " + flags)
        long = run("plan", "--model", "mixtral-8x22b", "--num-layers", "4", "--seq-length", "65536",
                   "--micro-batch-size", "8")
        self.assertEqual(long.returncode, 3, long.stderr)
        for flags in ["--recompute-granularity full --recompute-method uniform",
                      "--micro-batch-size 4"]:
            self.assertRegex(re.sub(r"\s+", " ", long.stdout), r"[0-9.]+ [GT]iB " + flags)
        refused = run("bench", "--model", "mixtral-8x22b", "--bf16", "--seq-length", "4096")
        self.assertEqual(refused.returncode, 3, refused.stderr)
        self.assertIn("--exp-avg-dtype bf16", refused.stderr)


if __name__ == "__main__":
    main()
