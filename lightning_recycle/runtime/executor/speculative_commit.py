"""Commits between stages before they step, and steps on a guess about the norm.

A REDUCED worker reports its stage's part of the whole gradient. If only the norm matters, and only a large one, it may
step on the guess that it is small. Its newest step is then *unsettled* until all have reported. All workers of a
generation find the same answer right or wrong; each that learns of a wrong guess ends in the generation begun for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_recycle.control.client import ControlClient, unpack_all

_GROWTH = 1.1  # of the norm since the step before, which a guess allows for
_ANNOUNCEMENT_TIMEOUT = 60.0  # seconds from the proof of a wrong guess to the new generation


@dataclass(frozen=True)
class CommitRules:
    """Knowledge that stages must have of each other before a step.

    Args:
        staggered: whether a stage may step before the others hold their gradients.
        presumes: norm of all gradients -> whether the step is the same without knowing the norm. With it a stage
            guesses so, unless reports say otherwise; without it all stages know the norm first.
    """

    norm: bool = False
    overflow: bool = False
    staggered: bool = True
    presumes: Callable[[float], bool] | None = None


@dataclass(frozen=True)
class CommitPayload:
    """A stage's report before they step; ``squared_norm``: NaN if it is not needed."""

    squared_norm: float = math.nan
    overflow: bool = False


def norm_of(payloads: Mapping[int, CommitPayload]) -> float:
    """Norm of all gradients from the stages' reports; NaN if none has one."""
    return sum(payload.squared_norm for _, payload in sorted(payloads.items())) ** 0.5 if payloads else math.nan


class SpeculativeCommits:
    """A worker's guesses, and its known reports.

    ``hold``: norm -> whether the step is the same without knowing it. ``unsettled``: the newest step is an unconfirmed
    guess. ``reports``: by column, for the newest step that all have reported.
    """

    def __init__(self, client: ControlClient, column: int, columns: int, hold: Callable[[float], bool]) -> None:
        self.unsettled = False
        self.reports: Mapping[int, CommitPayload] = {}
        self._client, self._column, self._columns, self._hold = client, column, columns, hold
        self._reported_in = (-1, -1)  # the generation and the step of the newest report

    def is_likely(self, own: CommitPayload) -> bool:
        """Whether a guess will hold, by the previous reports; the same in all of a column."""
        others = {column: payload for column, payload in self.reports.items() if column != self._column}
        enough = len(others) == self._columns - 1
        return enough and self._hold(_GROWTH * norm_of({**others, self._column: own}))

    def were_right(self, known: Mapping[int, CommitPayload]) -> bool:
        """Whether guesses about a step that all have reported were right."""
        return self._hold(norm_of(known))

    def report(self, step: int, own: CommitPayload | None, guesses: bool) -> None:
        """Reports ``step`` once in a generation; ``guesses``: without waiting."""
        if self._reported_in != (self._client.generation, step):
            self._reported_in = (self._client.generation, step)
            self._client.tell(step, own, guesses)

    def is_reported(self, step: int) -> bool:
        return self._client.committed(step) is not None

    def await_reports(self, step: int) -> Mapping[int, CommitPayload]:
        """Waits until all have reported ``step``; Interrupted by a new generation."""
        answer = self._client.await_committed(step)
        self.reports = unpack_all(answer.payloads)
        if answer.guessed and not self.were_right(self.reports):
            self._client.undo(step, _ANNOUNCEMENT_TIMEOUT)
        return self.reports
