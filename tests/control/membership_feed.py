"""What the tests of the membership state machine feed it with, and what they read from its commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from lightning_recycle.control.protocol import messages as m
from lightning_recycle.control.protocol import state as s
from lightning_recycle.control.protocol.membership import transition
from lightning_recycle.planning.grid import Grid

GRID = Grid(2, 2, 2)  # ranks 0 and 2 are stage 0, ranks 1 and 3 stage 1
ALL = (0, 1, 2, 3)


def feed(state: s.MembershipState, *events: s.MembershipEvent) -> tuple[s.MembershipState, list[s.Command]]:
    """The state after ``events``, and all commands that they caused. No worker applies a step before its loss is known:
    losses that are not among the events come before the first that has.
    """
    caused: list[s.Command] = []
    for event in events:
        if isinstance(event, m.Applied):
            state = _with_losses(state, event.step)
        elif isinstance(event, m.Reached) and event.milestone is m.Milestone.AT_BOUNDARY:
            state = _with_losses(state, event.step - 1)
        state, commands = transition(state, event)
        caused += commands
    return state, caused


class Scene:
    """A state and what the newest events have caused: ``given(state, *events).when(*events).then(*commands)``."""

    def __init__(self, state: s.MembershipState, *events: s.MembershipEvent) -> None:
        self.state, self.commands = feed(state, *events)

    def when(self, *events: s.MembershipEvent) -> Scene:
        self.state, self.commands = feed(self.state, *events)
        return self

    def then(self, *expected: Any, no: type | None = None) -> Scene:
        """The commands, or messages to workers, of each kind among ``expected`` are these; there is none of ``no``."""
        for kind in {*map(type, expected), *([no] if no else [])}:
            found = messages(self.commands, kind) or [c for c in self.commands if type(c) is kind]
            assert found == [one for one in expected if type(one) is kind]
        return self


given = Scene

_PLAIN = {
    "int": 0,
    "float": 0.0,
    "str": "",
    "bool": False,
    "Mapping": {},
    "tuple": (),
    "Activity": m.Activity(0, "F"),
    "Process": m.Process("", 1),
}


def dummy(kind: type, **fields: Any) -> Any:
    """A message of ``kind`` with ``fields``, and plain values where it has no default and the test does not care."""
    for field in dataclasses.fields(kind):
        if field.name not in fields and field.default is field.default_factory is dataclasses.MISSING:
            name = str(field.type).partition("[")[0]
            fields[field.name] = None if "None" in str(field.type) else _PLAIN[name]
    return kind(**fields)


def _with_losses(state: s.MembershipState, newest: int) -> s.MembershipState:
    """The losses of all steps up to ``newest`` are known."""
    of_all = dict.fromkeys(range(state.positions.grid.global_microbatches), 0.5)
    for step in range(state.steps.summed, newest + 1):
        state, _ = transition(state, m.Losses(min(state.roster.live), step, of_all))
    return state


def messages(commands: Iterable[s.Command], kind: type) -> list[Any]:
    return [c.message for c in commands if isinstance(c, s.Send) and isinstance(c.message, kind)]


def records(commands: Iterable[s.Command], kind: str) -> list[s.Record]:
    return [c for c in commands if isinstance(c, s.Record) and c.kind == kind]


def report(rank: int, generation: int, version: int = 0, reduced: bool = False) -> m.Report:
    status = m.WorkerStatus(GRID.worker(rank).stage, version, reduced)
    return m.Report(rank, generation, status, f"commit of {rank}" if reduced else None)


def reports(ranks: Iterable[int], generation: int, version: int = 0, reduced: bool = False) -> list[m.Report]:
    return [report(rank, generation, version, reduced) for rank in ranks]


def commits(ranks: Iterable[int], generation: int, step: int) -> list[m.Commit]:
    return [m.Commit(rank, generation, step, f"payload of {rank}") for rank in ranks]


def applied(ranks: Iterable[int], step: int) -> list[m.Applied]:
    return [m.Applied(rank, step, {}) for rank in ranks]


def all_losses(step: int, rank: int = 1) -> m.Losses:
    """Known to the coordinator before anybody can be REDUCED in ``step``, unless their sender ``rank`` dies."""
    return m.Losses(rank, step, dict.fromkeys(range(4), 0.5))


def running() -> s.MembershipState:
    """All four workers run step 0 in generation 0."""
    state, _ = feed(s.initial_state(GRID), *map(s.Joined, ALL), *reports(ALL, 0))
    assert (state.generation.number, state.generation.regrouping) == (0, False)
    return state


def running_without_3(version: int = 0) -> s.MembershipState:
    """Worker 3 was lost; the others run in generation 1."""
    state, _ = feed(running(), s.Lost(3, "gone"), *reports((0, 1, 2), 1, version))
    return state
