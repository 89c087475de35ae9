#!/usr/bin/env python3
"""What somebody sends who is no rank, or a rank that has gone mad, to a rank's port: the run goes on,
or ends with one message and status 1, and takes no memory for it."""

import os
import pathlib
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import unittest

from processes_test_support import HERE, main, train_arguments

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
import rank_protocol as protocol
from rank_protocol import announcement, frame, message

SECRET = "a secret of the test's own"
HOST = "127.0.0.1"
MOST_GROWTH = 64 << 20
DESCRIPTORS = 64


class Rank:
    """A process of troupe train that is one of two ranks."""

    def __init__(self, rank, port, name, *flags, secret=SECRET):
        self.errors_file = HERE.folder / f"{name}_{rank}.err"
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": HOST,
                       "MASTER_PORT": str(port), "TROUPE_RENDEZVOUS_SECRET": secret}
        arguments = train_arguments(HERE.folder / name, "--train-iters", 2, *flags)
        with open(self.errors_file, "wb") as errors:
            self.process = subprocess.Popen(
                [HERE.troupe, *map(str, arguments)], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=errors, env=environment,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS,) * 2))

    def status_field(self, field):
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1])
        return 0

    def wait(self, seconds=60):
        """Its status, and the bytes of memory that it took at most."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.process.returncode = os.waitstatus_to_exitcode(status)
                return self.process.returncode, usage.ru_maxrss << 10
            time.sleep(0.02)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return "did not end", 0

    def errors(self):
        return self.errors_file.read_bytes()


def free_port():
    with socket.create_server((HOST, 0)) as server:
        return server.getsockname()[1]


def wait_for_port(port):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with socket.socket() as trial:
            if trial.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError("no rank listens")


def closed_hard(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def packets(speaker):
    """By name, what is sent to who listens: a function of the challenge's number."""
    drawn = random.Random(1).randbytes
    other = protocol.Speaker("another secret of length", "another run", 2)
    open_key = protocol.Speaker("", f"torch {HOST} 1 ", 2).key
    old = bytes(16)
    replayed = speaker.hello(old, 1)
    return {
        "nothing": lambda _: b"",
        "a byte": lambda _: b"\x50",
        "HTTP": lambda _: b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 40 + b"\r\n",
        "TLS": lambda _: bytes.fromhex("16030100c8010000c40303") + drawn(200),
        "zeros": lambda _: bytes(160),
        "ones": lambda _: b"\xff" * 160,
        "noise": lambda _: drawn(160),
        "a megabyte": lambda _: drawn(1 << 20),
        "the hello of an earlier build": lambda _: struct.pack("<QQQii", protocol.PROTOCOL - 1,
                                                              speaker.run, 7, 1, 4000) + bytes(200),
        "another protocol, signed": lambda c: speaker.hello(c, 1, protocol=protocol.PROTOCOL + 1),
        "another run": lambda c: other.hello(c, 1),
        "this run, another secret": lambda c: speaker.hello(c, 1, key=other.key),
        "this run, no secret": lambda c: speaker.hello(c, 1, key=open_key),
        "signed for another connection": lambda _: replayed,
        "a signature of zeros": lambda c: speaker.hello(c, 1)[:-32] + bytes(32),
        "changed after it was signed": lambda c: speaker.hello(c, 0)[:36] + struct.pack("<i", 1) +
                                                 speaker.hello(c, 0)[40:],
        "cut short": lambda c: speaker.hello(c, 1)[:-1],
        "for a rank that it is not": lambda c: speaker.hello(c, 1, purpose=protocol.CONNECT, to=5),
        "no purpose": lambda c: speaker.hello(c, 1, purpose=77),
        "a rank below zero": lambda c: speaker.hello(c, -2),
        "a rank that there is": lambda c: speaker.hello(c, 0, host=b"\x1b[2J" * 16),
        "a rank of 2^31 - 1": lambda c: speaker.hello(c, 2**31 - 1),
    }


def servers(speaker):
    """By name, what is sent by who listens where rank 0 is expected: functions of the numbers of
    challenge and hello. The last ones know the secret."""
    answer = protocol.ANSWER
    unsigned = lambda kind, length, payload=b"": lambda *_: answer.pack(
        protocol.PROTOCOL, kind, length, bytes(32), bytes(32)) + payload
    return {
        "silence": None,
        "noise": lambda *_: random.Random(2).randbytes(4096),
        "a welcome that is not signed": unsigned(protocol.WELCOME, 0),
        "4 GiB that are not signed": unsigned(protocol.MEMBERS, 2**32 - 1, bytes(1 << 20)),
        "a refusal that is not signed": unsigned(protocol.REFUSAL, 8, b"\x1b[2J\x1b[2J"),
        "another run": unsigned(protocol.OTHER_RUN, 0),
        "another secret": unsigned(protocol.OTHER_SECRET, 0),
        "no kind of answer": unsigned(99, 0),
        "a refusal with control characters": lambda c, n: speaker.answer(
            protocol.REFUSAL, c, n, b"\x1b[2J\x07 no"),
        "a list of no ranks": lambda c, n: speaker.answer(protocol.MEMBERS, c, n),
        "a list of 3 bytes": lambda c, n: speaker.answer(protocol.MEMBERS, c, n, b"abc"),
        "a list of 4 GiB": lambda c, n: speaker.answer(protocol.MEMBERS, c, n, length=2**32 - 1),
        "a list of nowhere": lambda c, n: speaker.answer(
            protocol.MEMBERS, c, n, bytes(16) + protocol.MEMBER.pack(
                b"\x1b[2J", b"\x1b[2J" * 16, 1, -1, 1) * 2),
    }


MAD = {
    "a frame of no kind": frame(9, 0, 0),
    "a message of 2^63 bytes": frame(0, 0, 2**63),
    "a message of 1 TiB": frame(0, 0, 2**40, bytes(1 << 20)),
    "a message of 3 bytes": message(b"abc"),
    "a transfer of 2^63 bytes": frame(1, 1, 2**63),
    "a piece that is not expected": frame(3, 1, 100, bytes(100)),
    "a channel below zero": frame(1, -5, 4, b"abcd"),
    "2^62 bytes expected": frame(2, 1, 2**63 + 1),
    "a text of 2^63 bytes": message(announcement(1, text_length=2**63)),
    "2^60 tensors": message(announcement(0, tensors=2**60)),
    "2^61 ranks": message(announcement(3, waits_for=2**61)),
    "an announcement of no kind": message(announcement(200)),
    "a failure of no rank": message(announcement(5, index=-7, text=b"x")),
    "a failure with control characters": message(announcement(5, index=1, number=1,
                                                              text=b"\x1b[2J\x07 over")),
    "2^63 gathered bytes": message(announcement(1, number=2**63)) * 40,
    "noise": random.Random(3).randbytes(1 << 16),
}


class Strangers(unittest.TestCase):
    def speaker(self, port):
        return protocol.Speaker(SECRET, f"torch {HOST} {port} ", 2)

    def check_ended(self, name, rank, baseline=0):
        status, memory = rank.wait()
        errors = rank.errors()
        self.assertEqual(status, 1, (name, errors))
        lines = [line for line in errors.splitlines() if line.startswith(b"troupe: ")]
        self.assertEqual(len(lines), 1, (name, errors))
        self.assertFalse(any(byte < 32 and byte != 10 or byte == 127 for byte in errors),
                         (name, errors))
        if baseline:
            self.assertLess(memory - baseline, MOST_GROWTH, name)

    def test_packets_to_a_rank_that_waits_for_others(self):  # only torchrun
        port = free_port()
        speaker = self.speaker(port)
        rank = Rank(0, port, "packets", "--rendezvous-timeout-s", 120)
        wait_for_port(port)
        before = rank.status_field("VmHWM")
        # More than the process may have descriptors, and they say nothing.
        silent = [protocol.connect((HOST, port)) for _ in range(300)]
        for name, packet in packets(speaker).items():
            with self.subTest(packet=name):
                connection = protocol.connect((HOST, port))
                try:
                    connection.sendall(packet(protocol.challenge_of(connection)))
                    connection.settimeout(0.2)
                    connection.recv(1000)
                except OSError:
                    pass  # it was thrown out
                closed_hard(connection)
                self.assertIsNone(rank.process.poll(), rank.errors())
        self.assertLess(rank.status_field("VmHWM") - before, MOST_GROWTH >> 10)
        # The run goes on.
        last = Rank(1, port, "packets", "--rendezvous-timeout-s", 120)
        self.assertEqual(last.wait()[0], 0, last.errors())
        self.assertEqual(rank.wait()[0], 0, rank.errors())
        for connection in silent:
            connection.close()

    def test_a_stranger_where_the_others_are_expected(self):  # only torchrun
        listeners, ranks = [], {}

        def serve(server, speak):
            server.settimeout(0.2)
            held, end = [], time.monotonic() + 20
            while time.monotonic() < end and server.fileno() >= 0:
                try:
                    connection, _ = server.accept()
                    held.append(connection)
                    if speak is None:
                        continue
                    connection.settimeout(2)
                    challenge = bytes(range(16))
                    connection.sendall(protocol.CHALLENGE.pack(protocol.PROTOCOL, challenge))
                    nonce = protocol.receive(connection, protocol.HELLO.size)[16:32]
                    connection.sendall(speak(challenge, nonce))
                except OSError:
                    pass
            for connection in held:
                connection.close()

        threads = []
        for name in servers(self.speaker(1)):
            server = socket.create_server((HOST, 0))
            port = server.getsockname()[1]
            speaker = self.speaker(port)
            listeners.append(server)
            threads.append(threading.Thread(target=serve,
                                            args=(server, servers(speaker)[name])))
            threads[-1].start()
            ranks[name] = Rank(1, port, "servers_" + name.replace(" ", "_"),
                               "--rendezvous-timeout-s", 4)
        for name, rank in ranks.items():
            with self.subTest(answer=name):
                # A refusal with the secret is a rank's word: it has told why.
                if name == "a refusal with control characters":
                    self.assertEqual(rank.wait()[0], 2, rank.errors())
                    self.assertIn(b"troupe: ?[2J? no", rank.errors())
                else:
                    self.check_ended(name, rank)
        for server in listeners:
            server.close()
        for thread in threads:
            thread.join()

    def test_a_rank_that_has_gone_mad(self):  # only torchrun
        port = free_port()
        sound = Rank(0, port, "sound")
        other = Rank(1, port, "sound")
        status, baseline = sound.wait()
        self.assertEqual((status, other.wait()[0]), (0, 0), sound.errors())
        for number, (name, packet) in enumerate(MAD.items()):
            with self.subTest(packet=name):
                port = free_port()
                rank = Rank(0, port, f"mad_{number}", "--collective-timeout-s", 5)
                wait_for_port(port)
                server, peer = self.speaker(port).join((HOST, port), 1)
                try:
                    peer.sendall(packet)
                    if name == "a message of 1 TiB":
                        for _ in range(200):
                            peer.sendall(bytes(1 << 20))
                except OSError:
                    pass  # it was thrown out
                self.check_ended(name, rank, baseline)
                peer.close()
                server.close()


if __name__ == "__main__":
    main()
