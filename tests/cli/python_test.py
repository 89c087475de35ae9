#!/usr/bin/env python3
"""The Python package (python/troupe) with this program: plans, runs, metrics.

Usage: python_test.py TROUPE SOURCE_FOLDER
"""

import json
import math
import pathlib
import signal
import subprocess
import sys
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python"))
import troupe
from program_runs import HERE, main, write_config, write_corpus

STEPS = 10
SEQUENCE = 32


def options(**changes):
    return {"program": HERE.troupe, "model": HERE.folder / "config.json", "seq_length": SEQUENCE,
            "micro_batch_size": 2, "global_batch_size": 4} | changes


def training(name, **changes):
    return options(data_path=HERE.folder / "corpus", split="80,20,0", lr=1e-3,
                   lr_decay_style="constant", train_iters=STEPS, eval_interval=5, eval_iters=1,
                   save=HERE.folder / name) | changes


def setUpModule():
    write_config()
    write_corpus(200, 20)
    HERE.lines = list(troupe.train(**training("run", ranks=2, expert_model_parallel_size=2)))


class Plans(unittest.TestCase):
    def test_a_plan_is_a_dictionary(self):
        plan = troupe.plan(**options())
        self.assertTrue(plan["fits"])
        self.assertEqual(plan["micro_batches"], 2)
        self.assertGreater(plan["bytes"]["total"], plan["bytes"]["parameters"])

    def test_a_step_is_a_dictionary(self):
        step = troupe.inspect(**options())
        self.assertIn("adamw", {each["kind"] for each in step["operations"]})

    def test_a_wrong_request_says_why(self):
        with self.assertRaises(troupe.TroupeError) as raised:
            troupe.plan(**options(model="nonsense"))
        self.assertEqual(raised.exception.status, 2)
        self.assertIn("no configuration of that name", str(raised.exception))


class Training(unittest.TestCase):
    def test_it_iterates_over_all_that_is_measured(self):
        steps = [line["step"] for line in HERE.lines if "loss" in line]
        self.assertEqual(steps, list(range(1, STEPS + 1)))
        self.assertEqual([line["step"] for line in HERE.lines if "val_loss" in line], [0, 5, 10])

    def test_a_run_that_fails_raises(self):
        with self.assertRaises(troupe.TroupeError) as raised:
            list(troupe.train(**training("refused", micro_batch_size=3)))
        self.assertEqual(raised.exception.status, 2)
        self.assertIn("--micro-batch-size", str(raised.exception))

    def test_leaving_the_loop_saves(self):
        run = HERE.folder / "left"
        for metrics in troupe.train(**training("left", train_iters=100000)):
            if metrics["step"] >= 2:
                break
        self.assertGreaterEqual(troupe.Run(run).steps()[-1], 2)

    def test_ctrl_c_is_passed_on(self):
        code = ("import sys, troupe\n"
                "try:\n"
                f"  for line in troupe.train(**{self.plain('interrupted')!r}):\n"
                "    print(line['step'], flush=True)\n"
                "except KeyboardInterrupt:\n"
                "  print('interrupted')\n")
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                                   text=True, env={"PYTHONPATH": str(HERE.source / "python")})
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        while process.stdout.readline().strip() not in ("2", ""):
            pass
        process.send_signal(signal.SIGINT)
        rest = process.communicate()[0].split()
        watchdog.cancel()
        self.assertEqual(rest[-1:], ["interrupted"])
        self.assertGreaterEqual(troupe.Run(HERE.folder / "interrupted").steps()[-1], 2)

    def plain(self, name):
        return {key: str(value) for key, value in training(name, train_iters=100000).items()}


class Metrics(unittest.TestCase):
    def test_columns_are_the_lines(self):
        run = troupe.Run(HERE.folder / "run")
        columns = run.columns()
        lines = [line for line in HERE.lines if "loss" in line]
        for name in ("step", "loss", "grad_norm", "tokens"):
            self.assertEqual(list(columns[name]), [line[name] for line in lines])
        self.assertNotIn("experts", columns)
        self.assertEqual(list(run.columns("val_loss")["step"]), [0, 5, 10])
        self.assertEqual(run.starts()[0]["ranks"], 2)

    def test_what_a_line_lacks_is_nan(self):
        folder = HERE.folder / "odd"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"step":1,"loss":2.0}\n{"step":2,"loss":1.5,"x":3}\n'
                                              '{"step":3,"lo')
        columns = troupe.Run(folder).columns()
        self.assertEqual(list(columns["step"]), [1, 2])
        self.assertTrue(math.isnan(columns["x"][0]))
        self.assertEqual(columns["x"][1], 3)


if __name__ == "__main__":
    main()
