#!/usr/bin/env python3
"""Whether a run fits this machine: what is said and with which status where all its memory suffices,
where one KiB of it is missing, and where the machine does not say how much it has.

Usage: machine_memory_test.py TROUPE SOURCE_FOLDER
"""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from faked_machine import memory_of, run_on_faked_machine
from program_runs import HERE, main, write_config, write_corpus

MODEL = ["--model", "mixtral-tiny", "--seq-length", 32, "--ranks", 4, "--threads", 4]
# Planned once for all ranks, and for each class of ranks.
LAYOUTS = {"replicas": [], "experts": ["--expert-model-parallel-size", 4]}
UNKNOWN = "This machine does not say how much memory is available."
LESS = ("Use a smaller --micro-batch-size or --seq-length, or more ranks, each with a part of the model "
        "(docs/layouts.md).")
SHORTER = ("Use a shorter --prompt, fewer --max-new-tokens, or more ranks, each with a part of the model "
           "(docs/layouts.md).")
REMEDIES = {
    "replicas": """\
What makes the 53.60 MiB of rank 0 smaller, one by one (docs/memory.md):
     18.21 MiB  --use-megatron-fsdp
     34.04 MiB  --use-distributed-optimizer
     40.56 MiB  --use-precision-aware-optimizer --exp-avg-dtype bf16
                --exp-avg-sq-dtype bf16
     11.70 MiB  --ranks 8 --use-megatron-fsdp (on as many machines of this size)
""",
    "experts": """\
What makes the 20.51 MiB of rank 0 smaller, one by one (docs/memory.md):
     16.48 MiB  --use-precision-aware-optimizer --exp-avg-dtype bf16
                --exp-avg-sq-dtype bf16
     17.41 MiB  --use-megatron-fsdp
     17.64 MiB  --recompute-granularity full --recompute-method uniform
                --recompute-num-layers 1
     18.09 MiB  --moe-expert-rank-capacity-factor 1.5
     18.64 MiB  --moe-paged-stash
     18.96 MiB  --use-distributed-optimizer
     19.45 MiB  --recompute-granularity selective --recompute-modules layernorm
                moe_act moe_permute
     11.14 MiB  --ranks 8 --use-megatron-fsdp (on as many machines of this size)
"""}


class MachineMemory(unittest.TestCase):
    def plan(self, memory, *flags):
        done = run_on_faked_machine("plan", *map(str, [*MODEL, *flags]), memory=memory)
        self.assertEqual(done.stderr, "")
        return done.returncode, done.stdout

    def needed_kib(self, layout):
        """What all ranks need; a whole number, so that the limit can be met to the byte."""
        status, printed = self.plan("", *LAYOUTS[layout], "--json")
        document = json.loads(printed)
        self.assertEqual((status, document["fits"], document["available_bytes"]), (0, True, None))
        needed = (document["needed_bytes"] if "needed_bytes" in document
                  else document["ranks"] * document["bytes"]["total"])
        self.assertEqual(needed % 1024, 0)
        return needed // 1024

    def check_document(self, layout, kib, fits):
        status, printed = self.plan(memory_of(kib), *LAYOUTS[layout], "--json")
        document = json.loads(printed)
        self.assertEqual((status, document["fits"], document["available_bytes"]),
                         (0 if fits else 3, fits, 1024 * kib))

    def test_a_document_says_whether_all_ranks_fit(self):
        for layout in LAYOUTS:
            with self.subTest(layout):
                needed = self.needed_kib(layout)
                self.check_document(layout, needed, True)
                self.check_document(layout, needed - 1, False)

    def ends(self, layout):
        """How the text ends where all fits, where 1 KiB is missing, and where this is not known."""
        needed = self.needed_kib(layout)
        texts = [self.plan(memory, *LAYOUTS[layout])
                 for memory in (memory_of(needed), memory_of(needed - 1), "")]
        self.assertEqual([status for status, _ in texts], [0, 3, 0])
        return [text for _, text in texts]

    def test_replicas(self):
        fits, missing, unknown = self.ends("replicas")
        total = "  4 ranks         214.38 MiB\n"
        whole, end = fits.split(total)
        available = "  available       214.38 MiB\n\n"
        self.assertEqual(end, f"{available}It fits.\n")
        self.assertEqual(missing, f"{whole}{total}{available}It does not fit: 1.00 KiB are missing.\n"
                                  + REMEDIES["replicas"])
        self.assertEqual(unknown, f"{whole}{total}\n{UNKNOWN}\n")

    def test_classes_of_ranks(self):
        together = "All ranks together need 82.05 MiB;"
        here = "82.05 MiB are available here: as threads of\n        one process they"
        ends = [f"{together} {here} fit.\n", f"{together} {here} do not fit.\n{REMEDIES['experts']}",
                f"{UNKNOWN}\n"]
        wholes = set()
        for text, end in zip(self.ends("experts"), ends, strict=True):
            self.assertTrue(text.endswith("\n\n" + end), text)
            wholes.add(text[:text.index("  built and checked in")])
        self.assertEqual(len(wholes), 1, "all else is the same")

    def test_a_run_is_refused_where_its_plan_is(self):
        bench = ["bench", *map(str, MODEL), *map(str, LAYOUTS["experts"]), "--quiet"]
        needed = self.needed_kib("experts")
        self.assertEqual(run_on_faked_machine(*bench, memory=memory_of(needed)).returncode, 0)
        refused = run_on_faked_machine(*bench, memory=memory_of(needed - 1))
        self.assertEqual((refused.returncode, refused.stdout), (3, ""))
        self.assertEqual(refused.stderr, """\
troupe: The run needs 82.05 MiB for 4 ranks, this machine has 82.05 MiB available; of rank 0:
  parameters         4.04 MiB
  gradients          4.04 MiB
  optimizer          8.07 MiB
  inputs             1.50 KiB
  metrics            4.00 KiB
  activations        4.36 MiB
  workspace          8.50 KiB
  total             20.51 MiB
""" + REMEDIES["experts"])

    def test_every_command_that_computes_is_refused(self):
        write_config()
        write_corpus(9, 40)
        train = ["train", "--model", HERE.folder / "config.json", "--data-path", HERE.folder / "corpus",
                 "--lr", "1e-3", "--train-iters", "1", "--seq-length", "16", "--quiet", "--threads", "1",
                 "--save", HERE.folder / "run"]
        self.check_refused(train, "869.50 KiB", "                --recompute-num-layers 1")
        self.assertEqual(run_on_faked_machine(*train, memory="").returncode, 0)
        load = ["--load", HERE.folder / "run", "--threads", "1"]
        evaluate = ["eval", *load, "--data-path", HERE.folder / "corpus", "--eval-iters", "1", "--split",
                    "1,1"]
        self.check_refused(evaluate, "215.25 KiB", LESS)
        self.check_refused(["generate", *load, "--prompt", "a"], "212.25 KiB", SHORTER)
        self.check_refused(["verify", HERE.source / "tests/fixtures/hf/mixtral", "--threads", "1"],
                           "2.96 MiB",
                           "Use more ranks, each with a part of the model (docs/layouts.md).")

    def check_refused(self, arguments, needed, remedy):
        done = run_on_faked_machine(*arguments, memory=memory_of(100))
        self.assertEqual((done.returncode, done.stdout), (3, ""), done.stderr)
        begin, *_, end = done.stderr.splitlines()
        self.assertEqual(begin.replace("; of rank 0", ""),
                         f"troupe: The run needs {needed}, this machine has 100.00 KiB available:")
        self.assertEqual(end, remedy)


if __name__ == "__main__":
    main()
