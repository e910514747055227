"""What many processes print, as one stream for people: whole lines, each with the name of who printed it."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from typing import IO, BinaryIO

__all__ = ["Printer"]

_LONGEST_LINE = 1 << 16  # bytes, of a line without an end


class Printer:
    """Passes on what processes print.

    Args:
        names: whether each line begins with the name of the process.
        folder: where, besides, a file for each process holds what it printed; None for nowhere.
    """

    def __init__(self, names: bool, folder: Path | None = None) -> None:
        self._names = names
        self._folder = folder
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def follow(self, name: str, stream: IO[bytes], to_stderr: bool) -> None:
        """Passes on what ``stream`` says until it ends, in a thread of its own."""
        thread = threading.Thread(target=self._pass_on, args=(name, stream, to_stderr), daemon=True)
        thread.start()
        self._threads = [*(t for t in self._threads if t.is_alive()), thread]

    def say(self, text: str) -> None:
        """A line of this program itself."""
        self._write(sys.stderr.buffer, f"recycle-run: {text}\n".encode())

    def finish(self, seconds: float) -> None:
        """Waits until what the processes printed is passed on; a descendant that lives on may hold a stream open."""
        for thread in self._threads:
            thread.join(seconds)

    def _pass_on(self, name: str, stream: IO[bytes], to_stderr: bool) -> None:
        prefix = f"[{name}] ".encode() if self._names else b""
        target = sys.stderr.buffer if to_stderr else sys.stdout.buffer
        with contextlib.ExitStack() as stack:
            stack.enter_context(stream)
            file = None
            if self._folder is not None:
                file = stack.enter_context((self._folder / f"{name}.log").open("ab", buffering=0))
            while line := stream.readline(_LONGEST_LINE):
                if file is not None:
                    file.write(line)
                end = b"" if line.endswith(b"\n") or not prefix else b"\n"
                self._write(target, prefix + line + end)

    def _write(self, target: BinaryIO, line: bytes) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):  # nobody reads any more; the run goes on
            target.write(line)
            target.flush()
