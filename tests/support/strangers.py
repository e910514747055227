"""Connections from somebody without the key of the run to ports of its workers."""

import contextlib
import os
import random
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

Address: TypeAlias = tuple[str, int]

_LISTEN = "0A"
_OPENING = 64  # bytes of the first message of a link


def listening(pids: Iterable[int]) -> set[Address]:
    """The TCP addresses at which the processes ``pids`` listen."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/net/{table}") as lines:  # without IPv6
            for line in list(lines)[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTEN and rest[5] in inodes:
                    host, port = local.split(":")
                    words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
                    found.add((socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)))
    return found


def _socket_inodes(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield target[8:-1]


def knock(address: Address, data: bytes = b"", seconds: float = 0.005) -> socket.socket | None:
    """Connects to ``address`` and says ``data``; None if nobody answers within ``seconds``."""
    host, port = address
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.settimeout(seconds)
    try:
        sock.connect((host, port))
        sock.sendall(data)
    except OSError:
        sock.close()
        return None
    return sock


def sequence_numbers(first: int, count: int) -> list[bytes]:
    """What Gloo's dialing side says first: which of the expected connections this is."""
    return [struct.pack("=q", number) for number in range(first, first + count)]


def _reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


KINDS: dict[str, Callable[[random.Random], list[bytes]]] = {
    "Gloo's sequence numbers": lambda draw: sequence_numbers(draw.randrange(200), 20),
    "a message of Gloo's": lambda draw: [
        number + struct.pack("=6Q", 48 + draw.getrandbits(40), 2, 0, 0, draw.getrandbits(40), 0)
        for number in sequence_numbers(draw.randrange(200), 10)
    ],
    "silence": lambda draw: [b""] * 20,
    "a part of an opening": lambda draw: [draw.randbytes(draw.randrange(1, _OPENING)) for _ in range(10)],
    "an opening": lambda draw: [draw.randbytes(_OPENING) for _ in range(10)],
    "garbage": lambda draw: [draw.randbytes(draw.randrange(1, 5000)) for _ in range(10)],
}
"""What strangers say, by its description: a draw of messages, each for a connection of its own."""


def attack(address: Address, draw: random.Random) -> tuple[int, list[socket.socket], bool]:
    """One draw of :data:`KINDS`: how many were tried, what is held, if all answered."""
    messages = KINDS[draw.choice(list(KINDS))](draw)
    held = []
    for number, message in enumerate(messages, start=1):
        sock = knock(address, message)
        if sock is None:
            return number, held, False
        if draw.random() < 0.3:
            _reset(sock)
        else:
            held.append(sock)
    return len(messages), held, True
