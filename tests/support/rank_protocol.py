"""What ranks say to each other over TCP (src/comm/post/handshake.h), for tests that play a rank,
or a stranger who knows how ranks speak."""

import hashlib
import hmac
import os
import socket
import struct

PROTOCOL = 0x54524F5550450002
JOIN, CONNECT = 0, 1
WELCOME, MEMBERS, REFUSAL, OTHER_RUN, OTHER_SECRET = range(5)
CHALLENGE = struct.Struct("<Q16s")
HELLO = struct.Struct("<QQ16sIiiiiiQ64s32s")
ANSWER = struct.Struct("<QII32s32s")
MEMBER = struct.Struct("<64s64sQii")
NO_SIGNATURE = bytes(32)


def sign(key, *parts):
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


class Speaker:
    def __init__(self, secret, run, size):
        self.key = sign(secret.encode(), b"troupe ranks of " + run.encode())
        self.run = int.from_bytes(hashlib.sha256(run.encode()).digest()[:8], "little")
        self.size = size

    def hello(self, challenge, rank, *, key=None, protocol=PROTOCOL, run=None, purpose=JOIN, to=-1,
              size=None, port=1, host=b"stranger", nonce=None):
        fields = [protocol, self.run if run is None else run, nonce or os.urandom(16), purpose, rank,
                  self.size if size is None else size, port, 1, to, 7, host]
        signature = sign(key or self.key, b"hello ", challenge, HELLO.pack(*fields, NO_SIGNATURE))
        return HELLO.pack(*fields, signature)

    def answer(self, kind, challenge, nonce, payload=b"", *, length=None):
        """`length`: what is said of the payload's, if it is a lie."""
        fields = [PROTOCOL, kind, len(payload) if length is None else length,
                  hashlib.sha256(payload).digest()]
        signature = sign(self.key, b"answer ", challenge, nonce,
                         ANSWER.pack(*fields, NO_SIGNATURE))
        return ANSWER.pack(*fields, signature) + payload

    def join(self, address, rank):
        """As a rank that takes part in the rendezvous: the connections to the server and, after it,
        to rank 0, which must be the server."""
        server = connect(address)
        server.sendall(self.hello(challenge_of(server), rank))
        assert ANSWER.unpack(receive(server, ANSWER.size))[1] == WELCOME
        answer = ANSWER.unpack(receive(server, ANSWER.size))
        assert answer[1] == MEMBERS, answer
        token = receive(server, answer[2])[:16]
        peer = connect(address)
        peer.sendall(self.hello(challenge_of(peer), rank, purpose=CONNECT, to=0,
                                key=sign(self.key, b"token ", token)))
        assert ANSWER.unpack(receive(peer, ANSWER.size))[1] == WELCOME
        return server, peer


def connect(address):
    return socket.create_connection(address, timeout=20)


def receive(connection, count):
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


def challenge_of(connection):
    protocol, nonce = CHALLENGE.unpack(receive(connection, CHALLENGE.size))
    assert protocol == PROTOCOL, hex(protocol)
    return nonce


def frame(kind, channel, length, payload=b""):
    return struct.pack("<IiQ", kind, channel, length) + payload


def message(payload):
    return frame(0, 0, len(payload), payload)


def room_of(ranks):
    """The number of the room in which these ranks call each other: FNV-1a."""
    number = 0xCBF29CE484222325
    for rank in ranks:
        for byte in struct.pack("<i", rank):
            number = (number ^ byte) * 0x100000001B3 % 2**64
    return number


def announcement(kind, *, number=0, channel=1, index=0, text=b"", text_length=None, tensors=0,
                 waits_for=0, room=room_of([0, 1])):
    return (struct.pack("<BQQiiii", kind, room, number, channel, index, -1, -1) +
            struct.pack("<Q", len(text) if text_length is None else text_length) + text +
            struct.pack("<QQ", tensors, waits_for))
