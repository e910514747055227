"""How long a worker's handshake takes while strangers without the key flood the coordinator's port.

    python benchmarks/handshake_flood.py [--seconds 10] [--rate 4000]

The strangers are processes that connect, say nothing or something wrong, and go or stay. They come from the loopback
address, as the worker does, or from this machine's own other address, as from another machine.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import socket
import statistics
import time

from lightning_recycle.control.network.connection import connect
from lightning_recycle.control.network.handshake import Refused
from lightning_recycle.control.network.listener import Listener

KEY = b"the key of this benchmark"
KINDS = ("silent", "leaving", "speaking")
HELD = 400  # connections that a stranger keeps open


def flood(host: str, port: int, kind: str, made: object, rate: float) -> None:
    """Connects ``rate`` times a second, if it can; counts in ``made``."""
    held: list[socket.socket] = []
    began = time.monotonic()
    while True:
        ahead = made.value / rate - (time.monotonic() - began)  # type: ignore[attr-defined]
        if ahead > 0.002:
            time.sleep(ahead)
        sock = socket.socket()
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.connect_ex((host, port))
        held.append(sock)
        made.value += 1  # type: ignore[attr-defined]
        if kind == "speaking" and len(held) > 20:
            with contextlib.suppress(OSError):
                held[-20].send(b"GET / HTTP/1.1\r\n\r\n" * 8)
        if len(held) > (20 if kind == "leaving" else HELD):
            held.pop(0).close()


def serve(pipe: object) -> None:
    """A coordinator's door, with its log."""
    lines = 0

    class Counter(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            nonlocal lines
            lines += 1
            self.format(record)

    logging.getLogger("lightning_recycle").addHandler(Counter())
    listener = Listener(("0.0.0.0", 0), KEY, 8, lambda: None)
    listener.start()
    pipe.send(listener.address[1])  # type: ignore[attr-defined]
    while True:
        if pipe.poll(0.01):  # type: ignore[attr-defined]
            pipe.recv()  # type: ignore[attr-defined]
            pipe.send(lines)  # type: ignore[attr-defined]
        while not listener.accepted.empty():
            listener.accepted.get().close()


def measure(kind: str, source: str, seconds: float, rate: float) -> tuple[list[float], int, float, float]:
    """Seconds of each handshake, how many failed, strangers and log lines a second."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    made = [context.Value("Q", 0) for _ in range(2)]
    door = context.Process(target=serve, args=(theirs,), daemon=True)
    door.start()
    port = ours.recv()
    connect(("127.0.0.1", port), KEY).close()
    strangers = [
        context.Process(target=flood, args=(source, port, kind, count, rate / 2), daemon=True) for count in made
    ]
    if kind != "none":
        for stranger in strangers:
            stranger.start()
        time.sleep(2.0)
    ours.send(None)
    lines, began, before = ours.recv(), time.monotonic(), sum(count.value for count in made)
    took, failed = [], 0
    while (now := time.monotonic()) - began < seconds:
        try:
            connect(("127.0.0.1", port), KEY).close()
        except (OSError, Refused):
            failed += 1
        took.append(time.monotonic() - now)
        time.sleep(0.05)
    passed = time.monotonic() - began
    ours.send(None)
    rates = (sum(count.value for count in made) - before) / passed, (ours.recv() - lines) / passed
    for process in (*strangers, door):
        if process.pid is not None:
            process.kill()
            process.join()
    return took, failed, *rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=4000.0, help="connections of strangers a second")
    options = parser.parse_args()
    other = socket.gethostbyname(socket.gethostname())
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        other = str(probe.getsockname()[0])
    print("| strangers | from | a second | handshake, median | longest | failed | log lines a second |")
    print("|---|---|---|---|---|---|---|")
    for kind in ("none", *KINDS):
        for name, source in (("loopback", "127.0.0.1"), ("elsewhere", other)):
            if kind == "none" and name != "loopback":
                continue
            took, failed, strangers, lines = measure(kind, source, options.seconds, options.rate)
            median, longest = statistics.median(took), max(took)
            print(
                f"| {kind} | {name} | {strangers:,.0f} | {1e3 * median:,.1f} ms | {1e3 * longest:,.0f} ms |"
                f" {failed} of {len(took)} | {lines:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
