"""Validation of messages against the state of the run. Pure.

Concept: a message that arrived is well formed; it may still be one that no worker can send: for another rank, of a
generation that has not begun, about a step that lies far ahead, with a duration that is no number. :func:`objection`
says so, and the coordinator closes that connection, before the message can reach the state machine, the clocks or the
planner, which rely on what workers say.

Contract: never objects to a worker of this package, however late its messages arrive: messages of one worker arrive in
order, so each is judged by what the same worker has said before.

Who knows the key and follows the protocol is believed: it may report that its training failed, or different values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from functools import cache
from typing import Any, get_args, get_type_hints

from lightning_recycle.control.protocol import layout_change, messages
from lightning_recycle.control.protocol.control_collectives import last_point
from lightning_recycle.control.protocol.recovery import WorkerStatus
from lightning_recycle.control.protocol.state import MembershipState
from lightning_recycle.planning.grid import Grid

__all__ = ["objection", "objection_to_return"]

_AHEAD = 2  # steps beyond the newest applied one: it runs the next, and a hook within it is already in the one after
_OF_OTHERS = (
    messages.Heartbeat,
    messages.Ready,
    messages.Leave,
    messages.EndRun,
    messages.Confirm,
    messages.Crash,
    messages.FaultInjected,
)
"""Messages that may also come from a worker that is about to join, or has just been lost."""
_MAY_BE_ANY_NUMBER = ("losses", "facts")
"""Fields with what the user computes: a loss that diverges is the user's business."""

_SUMS = 8  # that there may be; two are usual
_PUBLISHED_BYTES = 1 << 20
_KEYS_PER_WORKER = 64  # that there may be; a few are usual


def objection(state: MembershipState, rank: int, message: Any) -> str | None:
    """Why the worker at ``rank`` cannot have sent ``message``; None if it can."""
    if message.rank != rank and not (isinstance(message, messages.Heartbeat) and message.rank == -1):
        return f"it speaks for rank {message.rank}"  # a heartbeat may be older than its position
    if not isinstance(message, _OF_OTHERS) and rank not in state.roster.live:
        return "it is not a member"
    generation = getattr(message, "generation", None)
    if generation is not None and not -1 <= generation <= state.generation.number:
        return f"generation {generation} has not begun"
    return _no_amount(message) or _out_of_range(state, rank, message)


def objection_to_return(grid: Grid, returned: messages.Returned) -> str | None:
    """Why no worker of ``grid`` can have returned with that; None if one can."""
    rank = returned.rank
    if not 0 <= rank < grid.num_workers:
        return f"there is no rank {rank}"
    one = (returned.arrival, returned.request, returned.raised, returned.confirm)
    measured = (returned.profiled, returned.measured, returned.layers, returned.tried)
    said = [*returned.facts, *returned.losses, *(message for message in (*one, *measured) if message is not None)]
    if any(message.rank != rank for message in said):
        return "it speaks for another rank"
    if (why := next(filter(None, map(_no_amount, said)), None)) is not None:
        return why
    if returned.layers is not None and not _tells_of_layers(returned.layers, grid):
        return "it tells of other layers than those of a stage"
    newest = returned.applied
    if [fact.step for fact in returned.facts] != list(range(newest + 1 - len(returned.facts), newest + 1)):
        return "it tells of other steps than those it has applied"
    if returned.losses and grid.worker(rank).stage != grid.stages - 1:
        return "it has no losses: it is not of the last stage"
    indices = {index for losses in returned.losses for index in (*losses.losses, *losses.outputs)}
    if not all(0 <= index < grid.global_microbatches for index in indices):
        return f"there are no micro-batches {sorted(indices)}"
    numbers = (
        newest + 1,
        returned.joins_after + 1,
        returned.generation + 1,
        returned.restored,
        returned.next_collective,
    )
    return _unless(min(numbers) >= 0, f"it counts to less than nothing: {numbers}")


def _out_of_range(state: MembershipState, rank: int, message: Any) -> str | None:
    applied = state.steps.applied.get(rank, state.steps.version - 1)
    newest = applied + _AHEAD
    match message:
        case messages.Applied():
            checked = message.facts.checked
            if checked is not None and (len(checked.sums) > _SUMS or any(len(s) != 16 for s in checked.sums.values())):
                return "what it tells are no checksums"
            if message.peak_bytes < 0:
                return f"its peak_bytes is {message.peak_bytes}"
            return _unless(0 <= message.step <= applied + 1, f"it has applied step {applied}, not {message.step}")
        case messages.Losses():
            indices = message.losses.keys() | message.outputs.keys()
            if any(not 0 <= index < state.grid.global_microbatches for index in indices):
                return f"there are no micro-batches {sorted(indices)}"
            if state.stage_of(rank) != state.grid.stages - 1:
                return "it has no losses: it is not of the last stage"
            # It applies a step only once the loss of that step is known.
            return _unless(0 <= message.step <= state.steps.summed, f"step {message.step} cannot have begun")
        case (
            messages.Commit()
            | messages.Undo()
            | messages.Paused()
            | messages.Reached()
            | messages.Saved()
            | messages.Raised()
            | messages.Disputed()
        ):
            return _unless(-1 <= message.step <= newest, f"step {message.step} cannot have begun")
        case messages.NotFinite():
            if not -1 <= message.microbatch < state.grid.global_microbatches:
                return f"there is no micro-batch {message.microbatch}"
            return _unless(0 <= message.step <= newest, f"step {message.step} cannot have begun")
        case messages.Report():
            return _impossible(state, rank, message.status, applied) or _unless(
                -1 <= message.begun <= newest, f"step {message.begun} cannot have begun"
            )
        case messages.Restored():
            # Not judged by the generation: loading a checkpoint has collectives, in which the first one may begin.
            if state.steps.applied or message.version < 0:
                return f"it cannot go on from version {message.version}: the training has begun"
        case messages.Arrive():
            number = message.number
            return _unless(0 <= number <= state.collectives.next, f"collective {number} cannot be the next one")
        case messages.Heartbeat():
            return _unless(-1 <= message.begun <= newest, f"step {message.begun} cannot have begun")
        case messages.StopWish():
            return _unless(0 <= message.point <= last_point(newest), f"stop point {message.point} cannot have come")
        case messages.LayerFacts():
            return _unless(_tells_of_layers(message, state.grid), "it tells of other layers than those of a stage")
        case messages.LayoutWanted():
            return _unless(layout_change.is_layout(message.cuts, state.grid.stages), f"{message.cuts} is no layout")
        case messages.Confirm():
            return _unless(message.number >= 0, f"there is no confirmation {message.number}")
        case messages.Broken():
            others = range(state.grid.num_workers)
            return _unless(all(r in others for r in message.unreachable), f"there are no ranks {message.unreachable}")
        case messages.Publish():
            size = len(message.key) + len(message.value)
            return _unless(size <= _PUBLISHED_BYTES, f"it publishes {size} bytes")
        case messages.LookUp():
            count, most = len(message.keys), _KEYS_PER_WORKER * state.grid.num_workers
            return _unless(count <= most, f"it looks {count} keys up, and there are no {most}")
        case messages.Profiled():
            return _unless(message.steps > 0, f"it measured {message.steps} steps")
    return None


def _tells_of_layers(facts: messages.LayerFacts, grid: Grid) -> bool:
    """Whether ``facts`` are those of the layers of one stage."""
    if not layout_change.is_layout(facts.cuts, grid.stages):
        return False
    own = layout_change.ranges(facts.cuts)[grid.worker(facts.rank).stage]
    told = (facts.seconds, facts.output_bytes, facts.parameter_bytes, facts.optimizer_bytes, facts.trains)
    sizes = (*facts.output_bytes, *facts.parameter_bytes, *facts.optimizer_bytes)
    is_tied = all(0 <= layer < facts.cuts[-1] for group in facts.tied for layer in group)
    return is_tied and facts.first == own.start and {len(each) for each in told} == {len(own)} and min(sizes) >= 0


def _impossible(state: MembershipState, rank: int, status: WorkerStatus, applied: int) -> str | None:
    """Why the worker cannot hold what it reports. It reports the next version from within the hooks of a step."""
    if status.stage != state.stage_of(rank):
        return f"it is of stage {state.stage_of(rank)}, not {status.stage}"
    if status.version == -1 and rank in state.roster.joining:
        return None
    possible = range(applied + 1, applied + 1 + _AHEAD)
    return _unless(status.version in possible, f"it has applied {applied + 1} steps, not {status.version}")


def _unless(condition: bool, why: str) -> str | None:
    return None if condition else why


def _no_amount(message: Any) -> str | None:
    """Why one of the floats in ``message``, which are amounts, is none; None if all are. Integers are always finite."""
    for name in _names(message.__class__):
        value = getattr(message, name)
        kind = value.__class__
        if kind is float:
            numbers: Iterable[Any] = (value,)
        elif kind is dict:
            numbers = value.values()
        elif kind is tuple:
            numbers = value
        elif dataclasses.is_dataclass(kind):
            if (why := _no_amount(value)) is not None:
                return why
            continue
        else:
            continue
        for number in numbers:
            if number.__class__ is float and not 0 <= number < math.inf:  # NaN is not, either
                return f"its {name} is {number!r}"
    return None


@cache
def _names(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass that may hold floats; every integer that arrives is a number."""
    hints = get_type_hints(kind)
    return tuple(name for name in hints if name not in _MAY_BE_ANY_NUMBER and _may_hold_floats(hints[name]))


def _may_hold_floats(hint: Any) -> bool:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return bool(_names(hint))
    return hint is float or any(_may_hold_floats(part) for part in get_args(hint))
