#!/usr/bin/env python3
"""troupe verify on several processes: every number that threads give."""

import json

from processes_test_support import FOLDED, HERE, PIPELINE, PROCESSES, ProcessesTest, main, run


class References(ProcessesTest):
    def test_references_in_layouts_have_the_bits_of_threads(self):
        mixtral = HERE.source / "tests/fixtures/hf/mixtral"
        for layout, dispatcher in ((FOLDED, "allgather"), (FOLDED, "flex"),
                                   (PIPELINE, "alltoall")):
            with self.subTest(layout=layout, dispatcher=dispatcher):
                arguments = ["verify", mixtral, "--compute-dtype", "fp64", *layout,
                             "--moe-token-dispatcher-type", dispatcher, "--json"]
                threads = run(*arguments, "--ranks", PROCESSES)
                self.assertEqual(threads.returncode, 0, threads.stderr)
                self.assertEqual(self.launch(0, *arguments).stdout_text, threads.stdout)

    def test_references_in_bf16_with_oracle(self):  # only torchrun
        fixture = HERE.source / "tests/fixtures/hf/olmoe"
        arguments = ["verify", fixture, "--compute-dtype", "bf16", "--oracle",
                     "--expert-model-parallel-size", 2, "--json"]
        threads = run(*arguments, "--ranks", 2)
        self.assertEqual(self.launch(threads.returncode, *arguments, processes=2).stdout_text,
                         threads.stdout)
        self.assertTrue(json.loads(threads.stdout)["oracle_identical"])


if __name__ == "__main__":
    main()
