"""Payloads: pickled values that the coordinator never opens; exceptions as text.

A payload is a pickle, so only who runs the user's code may open it: workers and the launching process. The coordinator
never imports :func:`unpack`; it need not have the classes, and nothing that it receives can run in it.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping
from typing import Any

from lightning_recycle.control.protocol.messages import Payload

_PIECE = 1 << 30  # bytes; msgpack has no byte string of 4 GiB or more


def pack(value: Any) -> Payload | None:
    """Pickles ``value``, with its tensors on the host; None stays None. torch's own reducers might pass tensors as
    descriptors of this process, which die with it.
    """
    if value is None:
        return None
    # Who packs has torch; the module is imported where there is none, too.
    from lightning_recycle.tensor_memory import pack_tensors

    data = memoryview(pack_tensors(value))
    return tuple(bytes(data[begin : begin + _PIECE]) for begin in range(0, len(data), _PIECE))


def unpack(payload: Payload | bool | None) -> Any:
    """The value that :func:`pack` was given; what is no payload stays as it is."""
    if not isinstance(payload, tuple):
        return payload
    return pickle.loads(payload[0] if len(payload) == 1 else b"".join(payload))


def unpack_all(payloads: Mapping[int, Payload | None] | Mapping[int, Payload | bool | None]) -> dict[int, Any]:
    """The values of payloads by rank or by stage."""
    return {key: unpack(payload) for key, payload in payloads.items()}


def in_words(error: BaseException, shown: str | None = None) -> tuple[str, str]:
    """Class and message of ``error``, and its traceback, as text that can be sent: UTF-8 lacks some characters.

    ``shown``: the traceback, if it is not to be the whole one.
    """
    texts = (
        f"{type(error).__name__}: {error}",
        "".join(traceback.format_exception(error)) if shown is None else shown,
    )
    summary, text = (text.encode(errors="backslashreplace").decode() for text in texts)
    return summary, text
