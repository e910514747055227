"""Somebody on the machine who has no key, and bothers a run: ``stranger.py PID SEED``.

It connects to every TCP port that a process below PID listens on, again and again until it is ended, and does there
what is drawn: hangs up, holds the connection, sends garbage, sends the numbers with which Gloo's connections begin,
sends the beginning of a message and waits. It is a process of its own and imports nothing of the project.
"""

import contextlib
import random
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator

import psutil

_HELD = 24
"""Connections that it holds at a time; the oldest is given up for a new one."""

_PAUSE_SECONDS = 0.05


def main(root: int, seed: int) -> None:
    rng = random.Random(seed)
    held: deque[socket.socket] = deque()
    numbers: dict[tuple[str, int], Iterator[int]] = {}
    while True:
        for address in _listening(root):
            sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
            sock.settimeout(0.2)
            with contextlib.suppress(OSError):  # gone, full, or it hung up: the next
                sock.connect(address)
                sock.sendall(_what_to_say(rng, numbers.setdefault(address, iter(range(1 << 30)))))
                held.append(sock)
                if len(held) > _HELD or rng.random() < 0.3:
                    held.popleft().close()
        time.sleep(_PAUSE_SECONDS)


def _what_to_say(rng: random.Random, sequence: Iterator[int]) -> bytes:
    kind = rng.randrange(5)
    if kind == 0:
        return b""
    if kind == 1:  # Gloo's connections begin with a number of 8 bytes that counts them
        return struct.pack("<Q", next(sequence))
    if kind == 2:
        return struct.pack("!I", rng.choice((5, 64, 1 << 20, 0x7FFFFFFF))) + rng.randbytes(4)  # the rest never comes
    if kind == 3:
        return b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return rng.randbytes(rng.randint(1, 4096))


def _listening(root: int) -> list[tuple[str, int]]:
    """Where the processes of the run listen."""
    found = set()
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(root)
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                found |= {c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return sorted((address.ip.replace("0.0.0.0", "127.0.0.1"), address.port) for address in found)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
