"""Writes a file so that a reader sees the old content or the new, never half of it.

Contract: the new content is on disk before the name points to it; nothing is left behind after an error.

Must not know: what is in the file.
"""

from __future__ import annotations

import json
import os
import secrets
from os import PathLike
from pathlib import Path
from typing import Any

__all__ = ["write_atomically", "write_json"]


def write_atomically(path: str | PathLike[str], content: bytes) -> None:
    """Replace the content of ``path``, creating its directory if needed.

    Raises:
        OSError: when the file system refuses; the old file is then unchanged.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: str | PathLike[str], data: Any) -> None:
    """:func:`write_atomically` of ``data`` as one line of JSON."""
    write_atomically(path, (json.dumps(data, allow_nan=False, separators=(",", ":")) + "\n").encode())
