"""Functions that run in turns, each up to the next point where all of them meet.

Concept: the training steps of a worker's micro-batches compute in turns, and do some things together: they reduce their
gradients, and step an optimizer once. :meth:`Turns.meet` is such a point. Each function runs until it calls it; when
all of them have, what they do together is done once, by the thread that called :meth:`Turns.run`, with what each of
them brought; and all go on with the answer.

Contract: never do two of them run at the same time, and their order is fixed. One alone runs in the caller's thread;
several have a thread each, as Python can suspend a function that calls user's code no other way. Functions that take
different ways (one meets where another ends) are an error. If one raises, or what is done together does, the others
end where they met.

Must not know: tensors, steps, workers.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from lightning_recycle.errors import UnsupportedFeatureError

__all__ = ["Turns"]

_T = TypeVar("_T")
_END = "the end of the step"


class _Ended(BaseException):
    """Ends a function at a meeting that will not take place; no ``except Exception`` of the user's stops it."""


@dataclass(frozen=True)
class _Met:
    """A function has come to a meeting."""

    what: str
    part: Any
    together: Callable[[list[Any]], Any]


@dataclass(frozen=True)
class _Done(Generic[_T]):
    """A function has returned, or raised."""

    value: _T | None = None
    error: BaseException | None = None
    what: str = _END


class _Coroutine(Generic[_T]):
    """One function with a thread of its own, which runs only within :meth:`resume`."""

    def __init__(self, body: Callable[[], _T], number: int) -> None:
        self.number = number
        self._body = body
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._states: SimpleQueue[_Met | _Done[_T]] = SimpleQueue()
        self._has_ended = False
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._main,), name=f"recycle-step-{number}", daemon=True)
        self._thread.start()

    def resume(self, answer: Any) -> _Met | _Done[_T]:
        """Lets it run with the answer of its meeting; returns at the next one, or at its end."""
        self._answers.put(answer)
        state = self._states.get()
        if isinstance(state, _Done):
            self._has_ended = True
            self._thread.join()
            if state.error is not None:
                raise state.error
        return state

    def meet(self, state: _Met) -> Any:
        """Within the thread: what :meth:`resume` is called with next."""
        self._states.put(state)
        return self._answered()

    def end(self) -> None:
        """Ends it where it met."""
        if not self._has_ended:
            self._has_ended = True
            self._answers.put(_Ended)
            self._thread.join()

    def _answered(self) -> Any:
        answer = self._answers.get()
        if answer is _Ended:
            self._answers.put(_Ended)  # for any further meeting, in a ``finally`` of the user's
            raise _Ended
        return answer

    def _main(self) -> None:
        _here.coroutine = self
        try:
            self._answered()
            self._states.put(_Done(self._body()))
        except _Ended:
            pass
        except BaseException as error:  # raised again in the thread that waits for it
            self._states.put(_Done(error=error))


_here = threading.local()


class Turns:
    """Functions that run in turns.

    Args:
        places: what is entered while each function runs, one for each of several; what they do together is done in the
            first of them.
    """

    def __init__(self, places: Sequence[AbstractContextManager[Any]] = ()) -> None:
        self._places = places

    @property
    def number(self) -> int:
        """The number of the function that calls this; 0 in what they do together."""
        coroutine = getattr(_here, "coroutine", None)
        return 0 if coroutine is None else coroutine.number

    def meet(self, what: str, part: Any, together: Callable[[list[Any]], _T]) -> _T:
        """A point where all functions meet.

        Args:
            what: names it; all must come to the same.
            part: what this function brings.
            together: called once, with what each of them brought; one that calls it again is not met again.

        Returns:
            What ``together`` returned, to each of them.

        Raises:
            UnsupportedFeatureError: if they come to different points.
        """
        coroutine: _Coroutine[Any] | None = getattr(_here, "coroutine", None)
        if coroutine is None:
            return together([part])
        return coroutine.meet(_Met(what, part, together))  # type: ignore[no-any-return]

    def run(self, bodies: Sequence[Callable[[], _T]]) -> list[_T]:
        """Runs all of ``bodies``; returns what they returned."""
        if len(bodies) == 1:
            return [bodies[0]()]
        coroutines = [_Coroutine(body, number) for number, body in enumerate(bodies)]
        answer: Any = None
        try:
            while True:
                states: list[_Met | _Done[_T]] = []
                for coroutine, place in zip(coroutines, self._places, strict=True):
                    with place:
                        states.append(coroutine.resume(answer))
                ways = list(dict.fromkeys(state.what for state in states))
                if len(ways) > 1:
                    raise UnsupportedFeatureError(different_ways(ways))
                first = states[0]
                if isinstance(first, _Done):
                    return [state.value for state in states]  # type: ignore[union-attr, misc]
                with self._places[0]:
                    answer = first.together([state.part for state in states])  # type: ignore[union-attr]
        finally:
            for coroutine, place in zip(coroutines, self._places, strict=True):
                with place:
                    coroutine.end()


def different_ways(ways: Sequence[str]) -> str:
    """What is said of training steps that take different ways."""
    return (
        f"The training steps of the micro-batches of one batch do different things: {' and '.join(ways)} come at the"
        " same time. With manual optimization all of them must step the same optimizers with the same backward passes"
        " in between. Decide by what they have in common, such as batch_idx, and not by their data."
    )
