"""The state of NumPy's global generator, read and set as a block of memory.

Concept: NumPy reads and sets the 624 words of its Mersenne Twister one by one, as Python objects: 45 microseconds each
way, more than the generators of Python and torch take together, and a worker keeps the states of all three around each
micro-batch that it computes. NumPy shows where the words are (``BitGenerator.ctypes``), so its global generator gets a
subclass of its own kind that copies them at once. Numbers, states and functions stay the same.

Contract: :func:`quicken` changes nothing unless what is read in this way is what NumPy says, for several states.

Must not know: what is drawn.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["MT19937", "quicken"]

_WORDS = 624
_Memory = ctypes.c_uint32 * (_WORDS + 1)  # mt19937_state: the words, and the position among them
_numpys: Any = np.random.MT19937.state


class MT19937(np.random.MT19937):
    """NumPy's, with a faster ``state``. The name is the same because a state contains it."""

    @property
    def state(self) -> Any:
        words = np.frombuffer(self._memory(), np.uint32).copy()
        return {"bit_generator": "MT19937", "state": {"key": words[:_WORDS], "pos": int(words[_WORDS])}}

    @state.setter
    def state(self, value: Any) -> None:
        inner: Any = value.get("state") if isinstance(value, Mapping) else None
        key: Any = inner.get("key") if isinstance(inner, Mapping) else None
        is_usual = isinstance(key, np.ndarray) and key.dtype == np.uint32 and key.shape == (_WORDS,)
        if not is_usual or value.get("bit_generator") != "MT19937":
            _numpys.__set__(self, value)  # converts, or says what is wrong
            return
        memory = np.frombuffer(self._memory(), np.uint32)
        memory[:_WORDS] = key
        memory[_WORDS] = inner["pos"]

    def _memory(self) -> Any:
        return _Memory.from_address(self.ctypes.state_address)


def quicken() -> None:
    """Gives NumPy's global generator, in this process, the faster state; its own stays what it is."""
    numpys: Any = np.random  # its stubs lack what it has since 1.24
    if not hasattr(numpys, "set_bit_generator"):
        return
    if type(numpys.get_bit_generator()) is not np.random.MT19937 or not _is_right():
        return  # already done, or the user's choice; or an unknown NumPy
    state = np.random.get_state()
    numpys.set_bit_generator(MT19937())
    np.random.set_state(state)


def _is_right() -> bool:
    """Whether the memory of NumPy's generators is as it is expected here."""
    generator = MT19937(1)
    draws = np.random.RandomState(generator)
    for count in (0, 3, 700):
        draws.random_sample(count)
        theirs, mine = _numpys.__get__(generator), generator.state
        if theirs["state"]["pos"] != mine["state"]["pos"] or (theirs["state"]["key"] != mine["state"]["key"]).any():
            return False
    return True
