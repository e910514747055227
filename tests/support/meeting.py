"""A rendezvous of workers that are in one process."""

import threading
from collections.abc import Sequence

from lightning_recycle.runtime.communicator import CommunicationError


class Meeting:
    """A rendezvous in this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def publish(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def lookup(self, keys: Sequence[str], cancelled: threading.Event) -> list[bytes]:
        while not all(key in self._values for key in keys):
            if cancelled.wait(0.001):
                raise CommunicationError("cancelled")
        return [self._values[key] for key in keys]
