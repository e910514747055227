"""Somebody on the machine who has no key, and bothers a run: ``stranger.py PID SEED``.

To each new port of PID's tree it connects at once, with the numbers that Gloo's connections begin with, so that it may
be there before the worker that the number belongs to. To ports that it knows it comes back now and then.
"""

import contextlib
import os
import random
import socket
import struct
import sys
import time
from collections import deque

import psutil

_HELD = 400
"""Connections that it holds at a time; the oldest is given up for a new one."""

_GUESSES = 12
"""Numbers that it tries at a new port."""

_PAUSE_SECONDS = 0.01
_COMES_BACK = 0.03
"""The chance that it connects to a port that it knows, each time that it looks."""

_LISTENS = "0A"  # the state of a socket in /proc/net/tcp


def main(root: int, seed: int) -> None:
    rng = random.Random(seed)
    held: deque[socket.socket] = deque()
    known: set[tuple[str, int]] = set()
    while True:
        found = _listening(root)
        for address in found - known:
            for number in range(_GUESSES):
                _connect(address, struct.pack("<Q", number), held)
        for address in sorted(found & known):
            if rng.random() < _COMES_BACK:
                _connect(address, _something(rng), held)
        known = found
        while len(held) > _HELD:
            held.popleft().close()
        time.sleep(_PAUSE_SECONDS)


def _connect(address: tuple[str, int], data: bytes, held: deque[socket.socket]) -> None:
    sock = socket.socket()
    sock.settimeout(0.1)
    with contextlib.suppress(OSError):  # it is gone, full, or hung up
        sock.connect(address)
        held.append(sock)
        sock.sendall(data)


def _something(rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return b""
    if kind == 1:  # the length of a message that never comes
        return struct.pack("!I", rng.choice((5, 64, 1 << 20, 0x7FFFFFFF))) + rng.randbytes(4)
    if kind == 2:
        return b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return rng.randbytes(rng.randint(1, 4096))


def _listening(root: int) -> set[tuple[str, int]]:
    """Where the processes of the run listen."""
    addresses = {}
    with open("/proc/net/tcp") as file:
        for fields in map(str.split, file):
            if fields[3] == _LISTENS:
                host, port = fields[1].split(":")
                addresses[f"socket:[{fields[9]}]"] = (socket.inet_ntoa(struct.pack("=I", int(host, 16))), int(port, 16))
    found = set()
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(root)
        for process in [top, *top.children(recursive=True)]:
            folder = f"/proc/{process.pid}/fd"
            with contextlib.suppress(OSError):  # it ended meanwhile
                for name in os.listdir(folder):
                    with contextlib.suppress(OSError):  # it was closed meanwhile
                        found.add(addresses.get(os.readlink(f"{folder}/{name}")))
    return {(host.replace("0.0.0.0", "127.0.0.1"), port) for host, port in filter(None, found)}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
