#!/usr/bin/env python3
"""troupe train on several processes: the curve and the checkpoint of threads, to the bit."""

from processes_test_support import (FOLDED, HERE, PIPELINE, PROCESSES, ProcessesTest, main, numbers, run,
                              tensors, train_arguments)


class Training(ProcessesTest):
    def check_same_run(self, name, *flags):
        flags = [*flags, "--eval-interval", 2, "--eval-iters", 1]
        threads = HERE.folder / f"{name}_threads"
        result = run(*train_arguments(threads, "--ranks", PROCESSES, *flags))
        self.assertEqual(result.returncode, 0, result.stderr)
        processes = HERE.folder / f"{name}_processes"
        result = self.launch(0, *train_arguments(processes, *flags))
        self.assertEqual(result.stderr_text.count("Options of troupe train"), 1, "one rank speaks")
        self.assertEqual(numbers(processes), numbers(threads))
        step = numbers(threads)[-1]["step"]
        self.assertTrue(tensors(threads, step))
        self.assertEqual(tensors(processes, step), tensors(threads, step))

    def test_experts_over_ranks_with_copies_and_a_sharded_optimizer(self):
        self.check_same_run("sharded", *FOLDED, "--use-distributed-optimizer",
                            "--moe-token-dispatcher-type", "flex", "--moe-expert-clones", 2,
                            "--train-iters", 4)

    def test_a_pipeline(self):
        self.check_same_run("pipeline", *PIPELINE, "--expert-model-parallel-size", 2,
                            "--train-iters", 4)

    # A new program is built, and verified, when the batch grows.
    def test_shared_sequences_and_a_batch_that_grows(self):  # only torchrun
        self.check_same_run("context", "--context-parallel-size", 2, "--rampup-batch-size",
                            "4 4 8", "--train-samples", 40)


if __name__ == "__main__":
    main()
