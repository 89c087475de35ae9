#!/usr/bin/env python3
"""troupe train on several processes: the curve and the checkpoint of threads, to the bit."""

from mpi_test_support import (FOLDED, HERE, PIPELINE, PROCESSES, ProcessesTest, main, numbers, run,
                              tensors, train_arguments)


class Training(ProcessesTest):
    def test_training_has_the_curve_and_the_checkpoint_of_threads(self):
        layouts = {
            "sharded": [*FOLDED, "--use-distributed-optimizer", "--moe-token-dispatcher-type",
                        "flex"],
            "pipeline": [*PIPELINE, "--expert-model-parallel-size", 2],
            "context": ["--context-parallel-size", 2, "--rampup-batch-size", "4 4 8",
                        "--train-samples", 40],
        }
        for name, layout in layouts.items():
            with self.subTest(layout=name):
                flags = [*layout, "--eval-interval", 2, "--eval-iters", 1]
                if "--train-samples" not in layout:
                    flags += ["--train-iters", 4]
                threads = HERE.folder / f"{name}_threads"
                result = run(*train_arguments(threads, "--ranks", PROCESSES, *flags))
                self.assertEqual(result.returncode, 0, result.stderr)
                processes = HERE.folder / f"{name}_processes"
                result = self.launch(0, *train_arguments(processes, *flags))
                self.assertEqual(result.stderr_text.count("Options of troupe train"), 1)
                self.assertEqual(numbers(processes), numbers(threads))
                step = numbers(threads)[-1]["step"]
                self.assertTrue(tensors(threads, step))
                self.assertEqual(tensors(processes, step), tensors(threads, step))


if __name__ == "__main__":
    main()
