"""Attempts at a worker's work, which failures end and which are made again.

Contract: an attempt that ends with :class:`Interrupted` or :class:`CommunicationError` is made again after a recovery.
What a fault of this machine may explain is judged by the coordinator: this worker does the same again, is evicted, or
the exception is the user's own and is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lightning_recycle.control.client import ControlClient, Interrupted
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.fault_attribution import OUTSIDE
from lightning_recycle.data.steps import StepSource
from lightning_recycle.planning.grid import Worker
from lightning_recycle.runtime.comm.communicator import CommunicationError, UnreachableError
from lightning_recycle.runtime.executor.executor_callbacks import ExecutorCallbacks
from lightning_recycle.runtime.machine_errors import is_device_error, place_of, readers_may_die

__all__ = ["Attempt", "Retries"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_ANNOUNCEMENT_TIMEOUT = 60.0  # seconds from a broken connection to the coordinator's verdict


@dataclass
class Attempt:
    """Progress of a worker in what it attempts.

    Attributes:
        place: the step and the operation to which an exception belongs.
        is_past: whether it is past the point up to which it can do the same again.
        reads_from: the data that it reads.
    """

    place: tuple[int, str] = (0, "")
    is_past: bool = False
    reads_from: StepSource | None = None


class Retries:
    """The attempts of one worker.

    Args:
        worker: the worker's position.
        client: the connection to the coordinator.
        callbacks: knows which exceptions a fault of the machine may explain.
        attempt: how far the worker has come.
        recover: takes part in the announced generation.
        is_undone: whether a new generation drops what this worker has computed.
        done: called after an attempt without a failure.
    """

    def __init__(
        self,
        worker: Worker,
        client: ControlClient,
        callbacks: ExecutorCallbacks,
        attempt: Attempt,
        recover: Callable[[], None],
        is_undone: Callable[[], bool],
        done: Callable[[], None],
    ) -> None:
        self._worker, self._client, self._callbacks, self._attempt = worker, client, callbacks, attempt
        self._recover, self._is_undone, self._done = recover, is_undone, done
        self._has_own = False  # an exception was judged to be the user's own

    def run(self, attempt: Callable[[], _T], recover: bool = False) -> _T:
        """Returns ``attempt()``; when a failure ends it, this worker takes part in the recovery and attempts it again.

        Args:
            attempt: a function that may end with :class:`Interrupted` or :class:`CommunicationError`.
            recover: whether a recovery is due at once.
        """
        while True:
            try:
                if recover:
                    self._recover()
                    recover = False
                result = attempt()
            except Interrupted:
                recover = True
            except CommunicationError as error:
                self._await_verdict(error)
                recover = True
            except Exception as error:
                if not self._is_undone():
                    with readers_may_die():
                        self._await_another_try(error)
                recover = True
            else:
                self._done()
                return result

    def settle(self, error: Exception) -> None:
        """Returns if ``error``, which was raised outside of steps, is the user's own. Does not return if a fault of the
        machine may explain it and others go on without this worker.
        """
        with readers_may_die():
            self._is_own(error, (OUTSIDE, place_of(error)), exact=False)

    def _await_verdict(self, error: CommunicationError) -> None:
        """Reports to the coordinator that communication broke and waits for its verdict."""
        if not self._client.interrupted:
            log.debug("Worker %s: %s", self._worker, error)
            unreachable = error.ranks if isinstance(error, UnreachableError) else ()
            self._client.send(messages.Broken(self._client.rank, self._client.generation, str(error), unreachable))
            self._client.await_announcement(_ANNOUNCEMENT_TIMEOUT)

    def _is_own(self, error: Exception, place: tuple[int, str], exact: bool) -> bool:
        """Whether ``error`` is the user's own, which the coordinator decides if a fault of the machine may explain it.
        Does not return if this worker is evicted.

        Args:
            error: the exception.
            place: the step and the operation to which it belongs.
            exact: whether this worker can do the same again.
        """
        if not self._has_own:
            self._has_own = not self._callbacks.is_suspect(error) or self._client.is_own(
                *place, error, exact=exact, sticky=is_device_error(error)
            )
        return self._has_own

    def _await_another_try(self, error: Exception) -> None:
        """Returns if this worker is to do again what raised ``error``.

        Raises:
            Exception: ``error``, if it is the user's own.
        """
        # What the optimizer and the hooks of its step have done cannot be undone, nor what was reported to others.
        data = self._attempt.reads_from
        exact = not self._attempt.is_past and (data is None or data.can_read_again)
        if self._is_own(error, self._attempt.place, exact):
            raise error
        step, operation = self._attempt.place
        log.warning("Worker %s does %s of step %d once more after %r.", self._worker, operation, step, error)
        self._client.await_announcement(_ANNOUNCEMENT_TIMEOUT)
        if data is not None:
            data.read_again()
