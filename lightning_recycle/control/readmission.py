"""Who may come back to a coordinator that was started again, and for how long the others are waited for.

Concept: the journal says which process held which position. Who returns is known by its token: one that was given up on
is not in the newest line, and is told so, though nobody may have told it before. Who was to join, and had not yet,
goes on setting up. Before the first generation nothing is decided but the positions that workers say they were given.

Contract: a missing worker is given up after the time for which a silent one is, or at once if its process, on this
machine, is gone; whoever a stage cannot do without gets as long as a silent last holder. A run of which nobody returns
is over as soon as others want to begin one, or all its processes are known to have ended.

Must not know: connections.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from lightning_recycle.control.journal import Journal, Process, SupersededError
from lightning_recycle.control.options import CoordinatorOptions
from lightning_recycle.control.protocol import messages, revival
from lightning_recycle.control.protocol.state import MembershipState, initial_state
from lightning_recycle.planning.grid import Grid
from lightning_recycle.process_spaces import has_ended

__all__ = ["NOBODY_SECONDS", "Place", "Readmission", "describe"]

NOBODY_SECONDS = 20.0
"""Until a run of which nobody returns is over, if others wait."""


class Place(Enum):
    """What a worker that returns is."""

    MEMBER = "it holds a position of the roster"
    STARTER = "it was given a position, and the training has not begun"
    CANDIDATE = "it was to join"
    LEFT = "it has left, as it asked"
    LOST = "it was given up, or is of another run"


class Readmission:
    """Judges those that return.

    Args:
        journal: what was written down.
        grid: the grid of the run.
        options: the time bounds.
    """

    def __init__(self, journal: Journal, grid: Grid, options: CoordinatorOptions) -> None:
        self._journal = journal
        self._grid = grid
        self._options = options
        self._written = dict(journal.processes)
        self._since: float | None = None  # when the newest worker returned
        self._others_since: float | None = None  # since when others wait, and nobody has returned
        self._holds_until = float("inf") if journal.is_continued and self.state().generation < 0 else 0.0

    def state(self) -> MembershipState:
        """The state with which this coordinator begins."""
        written, retries = self._journal.kept, self._options.machine_error_retries
        return initial_state(self._grid, retries) if written is None else revival.revived(self._grid, written, retries)

    def begin_anew(self) -> MembershipState:
        """The state of a run that nobody has been in."""
        self._journal.begin(self._journal.statuses)
        self._written = {}
        return self.state()

    @property
    def enrolled(self) -> messages.Enrolled:
        """What every worker is told first."""
        return messages.Enrolled(self._journal.run, self._journal.epoch)

    def judge(self, state: MembershipState, taken: Collection[int], returned: messages.Returned) -> Place:
        """What ``returned`` is. ``taken``: the positions whose worker is connected.

        Raises:
            SupersededError: if it has met a newer coordinator of this run.
        """
        rank = returned.rank
        if returned.run != self._journal.run or not 0 <= rank < self._grid.num_workers:
            return Place.LOST
        if returned.epoch > self._journal.epoch:
            raise SupersededError(f"worker {self._grid.worker(rank)} has met a newer coordinator of this run")
        is_free = rank not in taken
        if state.generation < 0:
            return Place.STARTER if is_free and rank in state.live and returned.generation < 0 else Place.LOST
        if rank in state.live:
            is_it = state.returned is not None and is_free and self._holds(rank, returned.token)
            return Place.MEMBER if is_it else Place.LEFT if returned.leave else Place.LOST
        if returned.leave:
            return Place.LEFT
        was_to_join = returned.joining and returned.generation < 0
        return Place.CANDIDATE if is_free and was_to_join else Place.LOST

    def position(self, state: MembershipState, hello: messages.Hello) -> int | None:
        """The position that the worker was given, which it has not heard of; None if there is none."""
        if state.returned is None or not hello.token:
            return None
        return next((r for r, one in self._written.items() if one.token == hello.token and r in state.live), None)

    def _holds(self, rank: int, token: str) -> bool:
        return rank in self._written and self._written[rank].token == token

    def heard(self, now: float) -> None:
        """A worker has returned."""
        self._since = now

    def may_place(self, now: float) -> bool:
        """Whether spares may be given positions: at first those that have one say so."""
        if self._holds_until == float("inf"):
            self._holds_until = now + self._options.heartbeat_timeout
        return now >= self._holds_until

    def is_deserted(self, now: float, others_wait: bool) -> bool:
        """Whether nobody has returned, and nobody can, or others want to begin."""
        if self._since is None and all(has_ended(one.pid, one.space) for one in self._written.values()):
            return True
        if self._since is not None or not others_wait:
            self._others_since = None
            return False
        if self._others_since is None:
            self._others_since = now
        return now - self._others_since > NOBODY_SECONDS

    def late(self, now: float, state: MembershipState) -> dict[int, str]:
        """The workers that are not waited for any more, with the reason."""
        if state.returned is None or self._since is None:
            return {}
        options, late = self._options, {}
        there = {state.stage_of(rank) for rank in state.returned if rank in state.live - state.joining}
        for rank in sorted(state.live - state.returned.keys()):
            has_peer = state.stage_of(rank) in there
            limit = options.heartbeat_timeout if has_peer else options.last_holder_timeout
            process = self._written.get(rank)
            if process is not None and has_ended(process.pid, process.space):
                late[rank] = "its process ended while the coordinator was gone"
            elif now - self._since > limit:
                late[rank] = f"it did not return within {limit:g} s after the coordinator was started again"
        return late


def describe(message: messages.Hello | messages.Returned, incarnation: int = 0) -> Process:
    """Who says ``message``."""
    return Process(message.token, message.pid, message.node, message.space, incarnation)
