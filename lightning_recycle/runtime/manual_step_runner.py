"""Steps that optimize by themselves, on each of a worker's micro-batches.

Only the user's code defines such a step; the schedule deals micro-batches to workers. There is one stage: every worker
does the whole step, and all hold the same afterwards. A step works on the parameters in place, with a copy of the whole
initial state to which a failure rewinds all. For the protocol a worker is REDUCED when it has done its step, and holds
the state before and after it. Before losses are known, and before the vote for the commit, all
workers have reported that they are done: no worker ever needs another's state.

All workers must reduce the same gradients in the same order. Each reduction, and the end of the step, is preceded by a
check of that, which raises an error instead of a deadlock.
"""

from __future__ import annotations

import contextvars
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.member import Interrupted
from lightning_recycle.errors import ReCycleError, UnsupportedFeatureError
from lightning_recycle.planning.grid import Grid, Microbatch, OpKind, Worker, global_index
from lightning_recycle.runtime.commit_reports import CommitPayload, CommitRules, ExecutorCallbacks
from lightning_recycle.runtime.communicator import Communicator
from lightning_recycle.runtime.stage_bundle import StageBundle
from lightning_recycle.runtime.step_runner import StepRunner

_MOST_SHOWN = 4  # of the newest things that a worker has done, in errors
_HASHES = 2


class RewindableState(Protocol):
    """All state that a step may change, on this worker."""

    def keep(self) -> None:
        """Copies the state; called right before a step."""

    def rewind(self) -> None:
        """Restores the copy."""


class StepPath:
    """Record of a worker's calls in a step so far: equal on all workers."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)
        self._newest: deque[str] = deque(maxlen=_MOST_SHOWN)

    def add(self, what: str) -> None:
        self._digest.update(what.encode() + b"\0")
        self._newest.append(what)

    def numbers(self) -> list[int]:
        """Numbers of 20 bits, almost certainly different for different ways."""
        whole = int.from_bytes(self._digest.digest(), "little")
        return [whole >> (20 * part) & 0xFFFFF for part in range(_HASHES)]

    def __str__(self) -> str:
        return ", ".join(self._newest) or "nothing"


@dataclass(frozen=True)
class ManualStepMicrobatch:
    """A micro-batch of a worker in a step.

    ``counts``: whether it contributes. A worker without work repeats another's, as its optimizers must step, too.
    """

    index: int
    inputs: tuple[Any, ...]
    samples: int
    counts: bool = True


class ManualStepRunner(StepRunner):
    """A runner whose steps are run by ``body``, with ``state`` kept before them.

    ``body``: the user's step: (number, this worker's micro-batches, this runner for common work, the way) -> of each
    its loss (NaN for none), and bytes for all workers.
    """

    def __init__(
        self,
        worker: Worker,
        grid: Grid,
        client: ControlClient,
        communicator: Communicator,
        bundle: StageBundle,
        callbacks: ExecutorCallbacks,
        body: Callable[[int, Sequence[ManualStepMicrobatch], ManualStepRunner, StepPath], list[tuple[float, bytes]]],
        state: RewindableState,
    ) -> None:
        super().__init__(worker, grid, client, communicator, bundle, callbacks, CommitRules(staggered=False))
        self._body, self._state = body, state
        self.redoes_whole_steps = True
        self._has_begun = False  # the state is in the middle of a step, or after one that is not committed
        self._broken: Exception | None = None  # what ended an exchange of this attempt
        self._waited_seconds = 0.0  # seconds in exchanges of this attempt

    @override
    def run_program(self, step: int) -> None:
        self._rewind()
        self._broken, self._waited_seconds = None, 0.0
        self.forget_gradient()
        microbatches = self._read(step)
        self.client.doing(step, "keeping the state")
        self._state.keep()
        self._has_begun = True
        step_path = StepPath()
        for task in self._of_kind(OpKind.FORWARD):
            self.client.doing(step, task.label, task.op.kind.value, task.index)
            self.attempt.place = (step, task.label)
            for hook in self.before_operation:
                hook(step, task.op)
        started = time.perf_counter()
        try:
            returned = self._body(step, microbatches, self, step_path)
        except Exception:
            if self._broken is not None:  # whatever the user's code made of it is not an error of its own
                raise self._broken from None
            raise
        if self._broken is not None:  # the user's code has caught it
            raise self._broken
        counted = {m.index: result for m, result in zip(microbatches, returned, strict=True) if m.counts}
        self.timings.add(OpKind.FORWARD, (time.perf_counter() - started - self._waited_seconds) / len(microbatches))
        self._run_hooks(step, OpKind.FORWARD, OpKind.REDUCE)
        self.reduced, self.payload = True, CommitPayload()
        step_path.add("the end of the step")
        self.check(step_path)
        if counted:
            losses = {i: loss for i, (loss, _) in counted.items()}
            outputs = {i: output for i, (_, output) in counted.items()}
            self.client.send(messages.Losses(self.client.rank, step, losses, outputs))
        self._run_hooks(step, OpKind.REDUCE, OpKind.STEP)
        self._commit_and_apply()
        self._run_hooks(step, OpKind.STEP, None)
        self.communicator.end_step()

    def _read(self, step: int) -> list[ManualStepMicrobatch]:
        handle = self.steps[step].handle
        self.attempt.place = (step, "reading data")
        wanted = [
            op.microbatch for op in (task.op for task in self._of_kind(OpKind.FORWARD)) if op.microbatch is not None
        ]
        found = []
        with self.client.busy("reading data"):
            for microbatch in wanted or [Microbatch(0, 0)]:
                inputs, _ = self.callbacks.split(handle.loader.fetch(handle, microbatch), handle.index)
                samples = handle.loader.num_samples(handle, microbatch)
                index = global_index(self.grid, microbatch)
                found.append(ManualStepMicrobatch(index, inputs, samples, counts=bool(wanted)))
        return found

    def _of_kind(self, kind: OpKind) -> list[Any]:
        return [task for task in self.program if task.op.kind is kind]

    def _run_hooks(self, step: int, after: OpKind, before: OpKind | None) -> None:
        for task in self._of_kind(after):
            for hook in self.after_operation:
                hook(step, task.op)
        for task in self._of_kind(before) if before is not None else ():
            self.client.doing(step, task.label)
            self.attempt.place = (step, task.label)
            for hook in self.before_operation:
                hook(step, task.op)

    # ------------------------------------------------------------------ what the workers do together

    def all_reduce(self, tensor: Tensor) -> None:
        if self._broken is None and self.client.is_interrupted:
            self._broken = Interrupted()
        if self._broken is not None:
            raise self._broken
        started = time.perf_counter()
        try:
            with self.client.waiting("peers"):
                self.communicator.all_reduce(tensor)
        except Exception as error:
            self._broken = error
            raise
        finally:
            self._waited_seconds += time.perf_counter() - started

    def check(self, step_path: StepPath) -> None:
        """Raises UnsupportedFeatureError, on all workers, unless all have done the same."""
        # Numbers are equal if and only if their number times the sum of their squares is the square of their sum.
        numbers = step_path.numbers()
        sums = torch.tensor([1, *numbers, *(number**2 for number in numbers)], dtype=torch.int64)
        self.all_reduce(sums)
        count, *totals = sums.tolist()
        for total, squares in zip(totals[:_HASHES], totals[_HASHES:], strict=True):
            if count * squares != total**2:
                ways: Mapping[int, str] = self.client.arrive_in_generation("way of a step", str(step_path))
                raise UnsupportedFeatureError(
                    different_ways([f"{step_path} (worker {rank})" for rank, step_path in sorted(ways.items())])
                )

    # ------------------------------------------------------------------ a failure

    def _rewind(self) -> None:
        if self._has_begun:
            self._state.rewind()
            self._has_begun = False

    @override
    def before_recovery(self) -> None:
        if not self.reduced:
            self._rewind()
        super().before_recovery()

    @override
    def adopt(self, step: int, donor: int, lacks: bool, is_committed: bool) -> None:
        if is_committed and lacks:
            raise ReCycleError(
                f"No recovery: worker {self.worker} has not done step {step}, although its losses are known:"
                " the commit protocol was violated."
            )

    @override
    def apply(self, payloads: Mapping[int, CommitPayload], speculative: bool = False) -> None:
        """Makes the finished step count."""
        self._has_begun = False
        super().apply(payloads, speculative)


_T = TypeVar("_T")
_END = "the end of the step"


class _Ended(BaseException):
    """Ends a function at its meeting; no ``except Exception`` of the user's stops it."""


@dataclass(frozen=True)
class _MeetingState:
    """State of a function: at a meeting, or (without ``together``) returned ``part``."""

    what: str
    part: Any
    together: Callable[[list[Any]], Any] | None = None


class _Coroutine:
    """One function with a thread of its own, which runs only within :meth:`resume`."""

    def __init__(self, body: Callable[[], Any], number: int) -> None:
        self.number, self._body = number, body
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._states: SimpleQueue[_MeetingState | BaseException] = SimpleQueue()
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._main,), name=f"recycle-step-{number}", daemon=True)
        self._thread.start()

    def resume(self, answer: Any) -> _MeetingState:
        """Runs the thread with the answer of its meeting, to the next one or its end."""
        self._answers.put(answer)
        state = self._states.get()
        if isinstance(state, BaseException):
            raise state
        return state

    def meet(self, state: _MeetingState) -> Any:
        """Within the thread: the argument of the next :meth:`resume`."""
        self._states.put(state)
        return self._answered()

    def end(self) -> None:
        self._answers.put(_Ended)
        self._thread.join()

    def _answered(self) -> Any:
        answer = self._answers.get()
        if answer is _Ended:
            self._answers.put(_Ended)  # for any further meeting, in a ``finally`` of the user's
            raise _Ended
        return answer

    def _main(self) -> None:
        _thread_state.coroutine = self
        try:
            self._answered()
            self._states.put(_MeetingState(_END, self._body()))
        except _Ended:
            pass
        except BaseException as error:  # raised again in the thread that waits for it
            self._states.put(error)


_thread_state = threading.local()


class Lockstep:
    """Functions that run in turns and meet for common work.

    Each runs until it calls :meth:`meet`; when all have, the common work is done once, by the thread that called
    :meth:`run`, and all go on with the answer. Never do two of them run at the same time, and their order is fixed. A
    single function runs in the caller's thread; several have a thread each, as Python can suspend a function that calls
    user's code no other way. If one raises, or the common work does, the others end where they met.

    ``places``: the context of each of several functions; the common work is in the first.
    """

    def __init__(self, places: Sequence[AbstractContextManager[Any]] = ()) -> None:
        self._contexts = places

    @property
    def number(self) -> int:
        """The number of the calling function; 0 in common work."""
        coroutine = getattr(_thread_state, "coroutine", None)
        return 0 if coroutine is None else coroutine.number

    def meet(self, what: str, contribution: Any, combine: Callable[[list[Any]], _T]) -> _T:
        """A point where all functions meet; the result of ``combine``, for each of them.

        ``combine`` is called once, with all parts; a call of ``meet`` within it is not a meeting. Raises
        UnsupportedFeatureError if the functions come to different points.
        """
        coroutine: _Coroutine | None = getattr(_thread_state, "coroutine", None)
        if coroutine is None:
            return combine([contribution])
        return coroutine.meet(_MeetingState(what, contribution, combine))  # type: ignore[no-any-return]

    def run(self, bodies: Sequence[Callable[[], _T]]) -> list[_T]:
        if len(bodies) == 1:
            return [bodies[0]()]
        coroutines = [_Coroutine(body, number) for number, body in enumerate(bodies)]
        answer: Any = None
        try:
            while True:
                states: list[_MeetingState] = []
                for coroutine, context in zip(coroutines, self._contexts, strict=True):
                    with context:
                        states.append(coroutine.resume(answer))
                ways = list(dict.fromkeys(state.what for state in states))
                if len(ways) > 1:
                    raise UnsupportedFeatureError(different_ways(ways))
                combine, contributions = states[0].together, [state.part for state in states]
                if combine is None:
                    return contributions
                with self._contexts[0]:
                    answer = combine(contributions)
        finally:
            for coroutine, context in zip(coroutines, self._contexts, strict=True):
                with context:
                    coroutine.end()


def different_ways(ways: Sequence[str]) -> str:
    """The message about training steps that take different ways."""
    return (
        f"The training steps of the micro-batches of one batch do different things: {' and '.join(ways)} come at the"
        " same time. With manual optimization all of them must step the same optimizers with the same backward passes"
        " in between. Decide by what they have in common, such as batch_idx, and not by their data."
    )
