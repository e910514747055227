"""Commits between stages before they step, and steps on a guess about the norm.

A worker that is REDUCED reports to all others what its stage's gradient adds to the whole. If nothing but the norm of
the whole matters, and only if that is large, it may step on the guess that it is not. Its newest step is then
*unsettled* until all have reported. All workers of a generation find the same answer right or wrong; if a guess was
wrong, each worker that learns of it ends in the generation that is begun for that, whether it has guessed or not.
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
    """Needs of a step: the knowledge that stages must have of each other before it.

    Args:
        staggered: whether a stage may step before the others hold their gradients.
        presumes: norm of all gradients -> whether a step is what it is without knowing the norm. With it a stage steps
            on the guess that it is, unless what is known says otherwise; without it all stages know the norm first.
    """

    norm: bool = False
    overflow: bool = False
    staggered: bool = True
    presumes: Callable[[float], bool] | None = None


@dataclass(frozen=True)
class CommitPayload:
    """Report of a stage to the others before they step.

    Args:
        squared_norm: the squared norm of its gradient; NaN if it is not needed.
    """

    squared_norm: float = math.nan
    overflow: bool = False


def norm_of(payloads: Mapping[int, CommitPayload]) -> float:
    """The norm of all gradients, from the reports of the stages; NaN if none has."""
    return sum(payload.squared_norm for _, payload in sorted(payloads.items())) ** 0.5 if payloads else math.nan


class SpeculativeCommits:
    """A worker's guesses, and the reports that it knows.

    Args:
        hold: norm of all gradients -> whether a step is what it is without knowing the norm.

    Attributes:
        unsettled: whether the newest step was made on a guess that nothing has confirmed yet.
        reports: the reports of all stages, by column, of the newest step that all have reported.
    """

    def __init__(self, client: ControlClient, column: int, columns: int, hold: Callable[[float], bool]) -> None:
        self.unsettled = False
        self.reports: Mapping[int, CommitPayload] = {}
        self._client, self._column, self._columns, self._hold = client, column, columns, hold
        self._reported_in = (-1, -1)  # the generation and the step of the newest report

    def is_likely(self, own: CommitPayload) -> bool:
        """Whether a guess will hold, by the other stages' reports of the step before.

        The same in all workers of a column.
        """
        others = {column: payload for column, payload in self.reports.items() if column != self._column}
        enough = len(others) == self._columns - 1
        return enough and self._hold(_GROWTH * norm_of({**others, self._column: own}))

    def were_right(self, known: Mapping[int, CommitPayload]) -> bool:
        """Whether guesses about a step that all have reported were right."""
        return self._hold(norm_of(known))

    def report(self, step: int, own: CommitPayload | None, guesses: bool) -> None:
        """Reports ``step`` once in a generation; ``guesses``: and does not wait."""
        if self._reported_in != (self._client.generation, step):
            self._reported_in = (self._client.generation, step)
            self._client.tell(step, own, guesses)

    def is_reported(self, step: int) -> bool:
        """Whether all have reported ``step``."""
        return self._client.committed(step) is not None

    def await_reports(self, step: int) -> Mapping[int, CommitPayload]:
        """Waits until all have reported ``step``.

        Raises:
            Interrupted: when a generation was announced; if a guess was wrong, it is the generation for that.
        """
        answer = self._client.await_committed(step)
        self.reports = unpack_all(answer.payloads)
        if answer.guessed and not self.were_right(self.reports):
            self._client.undo(step, _ANNOUNCEMENT_TIMEOUT)
        return self.reports
