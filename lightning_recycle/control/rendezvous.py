"""What the workers of a generation tell each other before they are connected: keys that some publish and some look up.

Concept: a question waits until all that it asks for is there, and is then answered by one message. So what passes is
proportional to what is asked for, which is a worker's neighbours, and not to the square of the number of workers; a
key, whoever published it, costs the same however many workers there are.

Contract: values are passed on unread. A new generation forgets those of the one before; what belongs to another
generation than the newest changes nothing.

Must not know: connections, what the keys mean.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from lightning_recycle.control.protocol.messages import Found, LookUp, Publish

__all__ = ["Rendezvous"]


@dataclass(eq=False)
class _Question:
    """One that cannot be answered yet; ``missing``: how many of its keys are not published."""

    message: LookUp
    missing: int


class Rendezvous:
    """The keys of the newest generation."""

    def __init__(self) -> None:
        self._generation = -1
        self._values: dict[str, bytes] = {}
        self._awaited: dict[str, list[_Question]] = defaultdict(list)
        self._published: dict[int, int] = defaultdict(int)

    def begin(self, generation: int) -> None:
        """From now on only ``generation`` counts."""
        self._generation = generation
        self._values.clear()
        self._awaited.clear()
        self._published.clear()

    def publish(self, message: Publish) -> list[tuple[int, Found]]:
        """The answers that are complete with it, by rank. A key that is published again has its newest value."""
        if message.generation != self._generation:
            return []
        self._published[message.rank] += len(message.key) + len(message.value)
        self._values[message.key] = message.value
        answers = []
        for question in self._awaited.pop(message.key, ()):
            question.missing -= 1
            if not question.missing:
                answers.append((question.message.rank, self._answer(question.message)))
        return answers

    def look_up(self, message: LookUp) -> list[tuple[int, Found]]:
        """The answer, if it is complete already."""
        if message.generation != self._generation:
            return []
        missing = [key for key in set(message.keys) if key not in self._values]
        if not missing:
            return [(message.rank, self._answer(message))]
        question = _Question(message, len(missing))
        for key in missing:
            self._awaited[key].append(question)
        return []

    def published_bytes(self, rank: int) -> int:
        """How much worker ``rank`` has published in the generation."""
        return self._published.get(rank, 0)

    def _answer(self, message: LookUp) -> Found:
        return Found(self._generation, {key: self._values[key] for key in message.keys})
