"""Run-length coding of what repeats: kinds of operations, numbers of micro-batches.

Concept: the steady state of a pipeline is one pattern many times, and micro-batches come in the order of their numbers.
A text of letters is written as repeated words, ``"64F 130FBW B"``; numbers are runs of consecutive ones,
``[[first, count], ...]``.

Contract: decoding inverts encoding; what is damaged raises ValueError. Nothing decodes to more than ``most`` items, so
that a damaged file cannot take all memory.

Must not know: operations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["decode_letters", "decode_numbers", "encode_letters", "encode_numbers"]

# A letter five times or more; else a word of up to eight letters twice or more; else one letter.
_REPEATED = re.compile(r"([A-Z])\1{4,}|([A-Z]{2,8}?)\2+|[A-Z]")
_WORD = re.compile(r"([1-9][0-9]*)?([A-Z]+)")


def encode_letters(letters: str) -> str:
    """Words and how often each comes, e.g. ``"FFFFFBWBWB"`` as ``"5F 2BW B"``."""
    words: list[str] = []
    literal = ""
    for match in _REPEATED.finditer(letters):
        word = match.group(1) or match.group(2)
        if word is None:
            literal += match.group()
            continue
        if literal:
            words.append(literal)
            literal = ""
        words.append(f"{len(match.group()) // len(word)}{word}")
    return " ".join([*words, literal] if literal else words)


def decode_letters(text: str, most: int) -> str:
    """The inverse of :func:`encode_letters`.

    Raises:
        ValueError: when ``text`` is no such code, or stands for more than ``most`` letters.
    """
    parts, left = [], most
    for word in text.split():
        match = _WORD.fullmatch(word)
        if match is None or len(word) > most + 20:
            raise ValueError(f"{word[:40]!r} is no repeated word")
        count, unit = int(match.group(1) or 1), match.group(2)
        left -= count * len(unit)
        if left < 0:
            raise ValueError(f"{text[:40]!r}... stands for more than {most} letters")
        parts.append(unit * count)
    return "".join(parts)


def encode_numbers(numbers: Iterable[int]) -> list[list[int]]:
    """Runs of consecutive numbers, as ``[first, count]``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs


def decode_numbers(runs: Sequence[Sequence[int]], most: int) -> list[int]:
    """The inverse of :func:`encode_numbers`.

    Raises:
        ValueError: when a run is none, or there are more than ``most`` numbers.
    """
    numbers: list[int] = []
    for first, count in runs:
        if count < 1 or len(numbers) + count > most:
            raise ValueError(f"the run [{first}, {count}] is empty or leads to more than {most} numbers")
        numbers += range(first, first + count)
    return numbers
