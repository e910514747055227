"""Devices that were found to be wrong, in a file that keeps them out of later runs until somebody removes it.

Concept: one line of JSON for each time that a worker was found to hold or to compute wrong bits. A bit of a memory
flips now and then in a device that is well; so a device is *out* after two such findings, or after one wrong
computation.

Contract: a file that cannot be read or written keeps nobody out, and costs no run: it is a warning.

Must not know: how anything was found, what a device is.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["FILE_NAME", "Quarantine"]

log = logging.getLogger(__name__)

FILE_NAME = "recycle_quarantine.jsonl"
"""In the Trainer's ``default_root_dir``."""

_WRONG_STATES = 2  # after which a device is out
_TOLD = ("kind", "proof", "cause")


class Quarantine:
    """The devices of the file ``path``; None for no file, and nobody is out."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def add(self, host: str, device: str, step: int, details: Mapping[str, Any]) -> None:
        """A worker on ``device`` of ``host`` was found wrong in ``step``; ``details`` as in the history."""
        if self._path is None:
            return
        told = {name: details[name] for name in _TOLD}
        line = {"time": time.time(), "host": host, "device": device, "step": step, **told}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.warning("%s on %s cannot be put into quarantine, in %s: %s", device, host, self._path, error)
            return
        if self.holds(host, device):
            log.warning("%s on %s is out until %s is removed, or its lines in it.", device, host, self._path)

    def holds(self, host: str, device: str) -> bool:
        """Whether ``device`` of ``host`` is out."""
        found = self._findings(host, device)
        return found["computation"] > 0 or found["state"] >= _WRONG_STATES

    def why(self, device: str) -> str:
        """Why a worker on ``device``, which is out, is missing."""
        return (
            f"its device {device} is in quarantine: it was found wrong, see {self._path}, and remove that if it is well"
        )

    def _findings(self, host: str, device: str) -> Counter[str]:
        """How often the device was found wrong, by proof."""
        found: Counter[str] = Counter()
        if self._path is None:
            return found
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return found
        except OSError as error:
            log.warning("The quarantine %s cannot be read: %s", self._path, error)
            return found
        for text in lines:
            try:
                line = json.loads(text)
                found[str(line["proof"])] += (line["host"], line["device"]) == (host, device)
            except (ValueError, KeyError, TypeError):
                log.warning("A line of the quarantine %s is none: %.80s", self._path, text)
        return found
