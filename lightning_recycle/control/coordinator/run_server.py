"""Serves runs one after the other, each from its first worker to its end.

Concept: the first worker settles what the run is to be (:mod:`~lightning_recycle.control.joining.run_config`), a
coordinator serves it, and what another process needs to go on with it is in the journal.

Contract: used by one thread. Each run is :meth:`Serving.meet`, :meth:`Serving.serve`, :meth:`Serving.begin_next`;
``on_run`` is called in that thread, too.

Must not know: command lines, signals.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from lightning_recycle.control.coordinator.coordinator import Coordinator
from lightning_recycle.control.joining.admission import describe
from lightning_recycle.control.joining.reception import Reception
from lightning_recycle.control.joining.run_config import Overrides, RunConfig, difference, settle
from lightning_recycle.control.journal import Journal, adopted_state
from lightning_recycle.control.monitoring.history import summary
from lightning_recycle.control.plans.plan_provider import PlanProvider
from lightning_recycle.control.protocol.messages import Enrolled, Stop, StopReason, Unfit
from lightning_recycle.control.protocol.state import Finished, Outcome
from lightning_recycle.errors import ReCycleError
from lightning_recycle.planning.grid import Positions
from lightning_recycle.processes import has_ended

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5  # between two looks whether all workers have gone before the run began
_RETURN_SECONDS = 1.0  # for those who have lost a coordinator of which this one knows nothing; others come first
_NOBODY_SECONDS = 20.0  # until a run of which nobody returns is over, if others wait
_OVER_SECONDS = 3.0  # for those who return to a run whose end is known


class Serving:
    """Serves the runs of those who come to ``reception``.

    Args:
        reception: where workers come; it stays open.
        given: what counts whatever the workers' script says.
        journal: what is written down, so that another process can go on; None if the end of this one is that of the
            run.
        on_run: called with the coordinator of each run, and with None when its workers are about to be told its end.

    Attributes:
        statuses: of the runs that are over, also those of earlier processes: 0 for one that finished.
    """

    def __init__(
        self,
        reception: Reception,
        given: Overrides,
        journal: Journal | None,
        on_run: Callable[[Coordinator | None], None] = lambda _: None,
    ) -> None:
        self.given = given
        self.statuses = [] if journal is None else list(journal.statuses)
        self._reception = reception
        reception.listener.start()
        self._journal = journal
        self._knows_nothing = journal is not None and journal.kept is None and not journal.statuses
        self._on_run = on_run

    def meet(self) -> bool:
        """Waits for the first worker of the next run, or of the one that was going on here; returns False if nobody
        returns to that one, which is over.
        """
        if (journal := self._journal) is not None:
            adopts, self._knows_nothing = self._knows_nothing, False
            self._reception.run, self._reception.enrolled = None if adopts else journal.run, Enrolled(journal.run)
            if self._is_gone(journal):
                self.statuses[:] = journal.statuses
                return False
            if adopts:
                self._reception.first()
                self._adopt(journal)
                self._reception.run = journal.run
        self._reception.first()
        return True

    def serve(self) -> tuple[RunConfig, Outcome] | None:
        """Serves the run of those who have come to its end; None if it did not begin, because all of its workers went,
        or none fits.
        """
        reception, hello = self._reception, self._reception.first()
        try:
            terms = settle(self.given, hello.wants)
            planner = terms.planner()
            _prepare(planner, reception)
        except Exception as error:  # whatever a worker wants costs that worker, and not the others
            if not isinstance(error, ReCycleError):
                log.exception("There is no run as the first worker wants it: %s", hello.wants)
            reception.send_away(Unfit(str(error) or type(error).__name__))
            return None
        for text in terms.overruled:
            log.warning("%s, which counts.", text)
        log.info("A run of %s waits for %d workers.", terms.grid, terms.num_workers)
        log.debug("Its settings: %s", terms.wants)
        coordinator = Coordinator(
            terms.grid,
            planner,
            terms.options(),
            authkey=reception.key,
            reception=reception,
            objection=lambda hello: difference(self.given, terms, hello.wants),
            staggered=bool(terms.planning.staggered),
            journal=self._journal,
            takes_results=False,
            members=terms.members,
        )
        try:
            coordinator.start({})
            self._on_run(coordinator)
            while (outcome := coordinator.wait(_LOOK_SECONDS)) is None:
                if coordinator.is_deserted or (reception.is_over and not coordinator.has_begun):
                    return None
            self.statuses.append(int(not isinstance(outcome, Finished)))
            for line in summary(coordinator.history, Positions(terms.grid, terms.members)):
                log.info("%s", line)
            return terms, outcome
        finally:
            self._on_run(None)
            coordinator.close()  # which takes a while: the workers are told

    def begin_next(self) -> None:
        """Forgets the run that is over: who comes from now on is of another one."""
        if self._journal is not None:
            self._journal.begin(tuple(self.statuses))

    # ------------------------------------------------------------------ an earlier process

    def _adopt(self, journal: Journal) -> None:
        """If workers return to a run of which this process knows nothing, finds out what they know of it: it goes on if
        that is enough.
        """
        reception, began = self._reception, time.monotonic()
        while not reception.returned and time.monotonic() - began < _RETURN_SECONDS:
            reception.look()
        if not reception.returned or reception.returned[0].run == journal.run:
            return
        while isinstance(found := adopted_state(reception.returned), str):
            if time.monotonic() - began >= _NOBODY_SECONDS:
                break
            reception.look()
        if isinstance(found, str):
            log.error(
                "Workers return to a run of which %s has no record, and they do not know enough to go on: %s. They end."
                " Start the run again from its newest checkpoint; with the file of their coordinator it would have gone"
                " on.",
                journal.path,
                found,
            )
            reception.send_away(Stop(StopReason.LOST), returned_only=True)
            return
        kept, members = found
        log.warning("%s has no record of the run whose workers return: it goes on from their reports.", journal.path)
        processes = {rank: describe(one, one.incarnation) for rank, one in members.items()}
        journal.adopt(reception.returned[0].run, kept, processes)

    def _is_gone(self, journal: Journal) -> bool:
        """Waits for workers that return to the run of an earlier process; whether there are none, and it is over."""
        kept = journal.kept
        if kept is None or kept.generation < 0:
            return False
        since = None if kept.over is None else time.monotonic()
        limit = _NOBODY_SECONDS if kept.over is None else _OVER_SECONDS
        while not self._reception.returned:
            if since is None and self._reception.has_met:
                since = time.monotonic()
            have_ended = all(has_ended(process.pid, process.space) for process in journal.processes.values())
            if have_ended or (since is not None and time.monotonic() - since > limit):
                log.warning("No worker returned to the run that was going on here: it is over.")
                status = () if kept.over is None else (int(kept.over.reason is not StopReason.FINISHED),)
                journal.begin((*journal.statuses, *status))
                return True
            self._reception.look()
        return False


def _prepare(planner: PlanProvider, reception: Reception) -> None:
    """Makes the first plan, however long it takes, while the workers get signs of life."""
    failure: list[BaseException] = []

    def work() -> None:
        try:
            planner.prepare()
        except BaseException as error:  # raised below, in the thread that serves
            failure.append(error)

    thread = threading.Thread(target=work, name="recycle-first-plan", daemon=True)
    thread.start()
    while thread.is_alive():
        reception.look()
    if failure:
        raise failure[0]
