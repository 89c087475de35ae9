#!/usr/bin/env python3
"""Ranks on two hosts, which are network namespaces (tests/support/two_hosts.py): the bits of threads,
and how they end when the cable between them is pulled."""

import pathlib
import sys
import time
import unittest

from processes_test_support import (FOLDED, HERE, PIPELINE, main, metrics, numbers, run, tensors,
                                    train_arguments)

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from two_hosts import Hosts, NoHosts, Ranks

LIMIT_S = 5
NODES = ["--expert-model-parallel-size", 4, "--moe-token-dispatcher-type", "hierarchical",
         "--moe-dispatch-ranks-per-node", 2]


class TwoHosts(unittest.TestCase):
    def setUp(self):
        try:
            self.hosts = Hosts(HERE.source)
        except NoHosts as error:
            self.skipTest(str(error))
        self.addCleanup(self.hosts.close)

    @classmethod
    def setUpClass(cls):
        cls.secret = HERE.folder / "secret"
        cls.secret.write_text("of the test's own, and long enough\n")
        cls.secret.chmod(0o600)
        cls.ports = iter(range(29500, 29600))

    def start(self, per_host, *arguments, secret=True, variables=lambda rank: {}):
        if secret:
            arguments = [*arguments, "--rendezvous-secret-file", self.secret]
        return Ranks(self.hosts, per_host, next(self.ports), [HERE.troupe, *arguments], HERE.folder,
                     variables)

    def launch(self, per_host, *arguments, **options):
        ranks = self.start(per_host, *arguments, **options)
        statuses = ranks.wait(100)
        self.assertEqual(statuses, [0] * (2 * per_host), ranks.all_errors())
        return ranks

    def test_training_has_the_bits_of_threads(self):  # only torchrun
        for name, flags in (("folded", FOLDED), ("pipeline", PIPELINE), ("nodes", NODES),
                            ("fsdp", ["--use-megatron-fsdp"])):
            with self.subTest(layout=name):
                flags = [*flags, "--train-iters", 3]
                threads, hosts = HERE.folder / f"{name}_threads", HERE.folder / f"{name}_hosts"
                done = run(*train_arguments(threads, "--ranks", 4, *flags))
                self.assertEqual(done.returncode, 0, done.stderr)
                ranks = self.launch(2, *train_arguments(hosts, *flags))
                self.assertNotIn("without a secret", ranks.all_errors())
                self.assertEqual(numbers(hosts), numbers(threads))
                self.assertTrue(tensors(threads, 3))
                self.assertEqual(tensors(hosts, 3), tensors(threads, 3))

    def test_references_have_the_bits_of_threads(self):  # only torchrun
        for layout in (FOLDED, PIPELINE):
            arguments = ["verify", HERE.source / "tests/fixtures/hf/mixtral", "--compute-dtype",
                         "fp64", *layout, "--json"]
            threads = run(*arguments, "--ranks", 4)
            self.assertEqual(threads.returncode, 0, threads.stderr)
            self.assertEqual(self.launch(2, *arguments).out(0), threads.stdout)

    def test_a_calibration_measures_both_links(self):  # only torchrun
        path = HERE.folder / "links.toml"
        ranks = self.launch(2, "bench", "--calibrate", path, "--threads", 2)
        self.assertIn("2 ranks of a machine", ranks.out(0))
        self.assertIn("2 ranks of as many machines", ranks.out(0))
        self.assertEqual(ranks.out(1), "")
        written = path.read_text()
        self.assertEqual(written.count("# measured: collectives of 2 ranks"), 4)
        self.assertNotIn("an estimate\n", written.split("gpus_per_nvlink")[1].split("\n", 1)[1])

    def test_without_a_secret_there_is_a_warning(self):  # only torchrun
        save = HERE.folder / "open"
        ranks = self.launch(1, *train_arguments(save, "--train-iters", 1), secret=False)
        self.assertEqual(ranks.errors(0).count("--rendezvous-secret-file FILE or "
                                               "TROUPE_RENDEZVOUS_SECRET"), 1, ranks.all_errors())
        self.assertNotIn("secret", ranks.errors(1))

    def test_other_secrets_are_refused_at_once(self):  # only torchrun
        ranks = self.start(1, *train_arguments(HERE.folder / "others", "--train-iters", 1),
                           "--rendezvous-timeout-s", 3, secret=False, variables=lambda rank: {
                               "TROUPE_RENDEZVOUS_SECRET": f"the secret of rank {rank}"})
        self.assertEqual(ranks.wait(30), [1, 1], ranks.all_errors())
        self.assertRegex(ranks.errors(1), r"^troupe: Rank 1 \(beta, process \d+\) has another secret")
        self.assertRegex(ranks.errors(1), r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}\]\n$")
        self.assertRegex(ranks.errors(0), "1 connection from 10.77.0.2 had another secret")

    def test_other_options_are_named_with_host_and_process(self):  # only torchrun
        script = HERE.folder / "rank.sh"
        script.write_text(f'exec "{HERE.troupe}" "$@" --seed $((5 + RANK))\n')
        ranks = Ranks(self.hosts, 1, next(self.ports),
                      ["sh", script, *train_arguments(HERE.folder / "unlike", "--train-iters", 1)],
                      HERE.folder)
        self.assertEqual(ranks.wait(60), [2, 2], ranks.all_errors())
        said = ranks.messages(0) + ranks.messages(1)
        self.assertEqual(len(said), 1, ranks.all_errors())
        self.assertRegex(said[0], r"--seed")
        self.assertRegex(said[0], r"rank 1 \[beta, process \d+\]")

    def check_pulled_cable(self, per_host, *flags):
        save = HERE.folder / f"pulled_{per_host}"
        ranks = self.start(per_host, *train_arguments(
            save, "--train-iters", 200000, "--collective-timeout-s", LIMIT_S, *flags))
        self.addCleanup(ranks.kill)
        deadline = time.monotonic() + 60
        while not metrics(save):
            self.assertTrue(ranks.all_run(), ranks.all_errors())
            self.assertLess(time.monotonic(), deadline, ranks.all_errors())
            time.sleep(0.05)
        self.hosts.pull_cable()
        statuses = ranks.wait(60)
        self.assertEqual(statuses, [1] * (2 * per_host), ranks.all_errors())
        for host, other in ((0, "beta"), (1, "alpha")):
            of_host = range(host * per_host, (host + 1) * per_host)
            said = [line for rank in of_host for line in ranks.messages(rank)]
            self.assertEqual(len(said), 1, ranks.all_errors())
            self.assertRegex(said[0], rf"timed out \({LIMIT_S} s\) in .* waiting for: .*rank \d "
                                      rf"\[{other}, process \d+\] \(is missing")

    def test_a_pulled_cable_ends_both(self):  # only torchrun
        self.check_pulled_cable(1, "--expert-model-parallel-size", 2)

    def test_a_pulled_cable_ends_all_ranks_of_both_hosts(self):  # only torchrun
        self.check_pulled_cable(2, *FOLDED)


if __name__ == "__main__":
    main()
