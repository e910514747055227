"""``recycle-coordinator``: the coordinator for workers that others start.

    RECYCLE_KEY=... recycle-coordinator --listen 10.0.0.1:29400

Every worker (of SLURM, Kubernetes, torchrun) runs the training script with ``RECYCLE_COORDINATOR=10.0.0.1:29400`` and
the same ``RECYCLE_KEY``. The first one asks for grid, planner and time bounds
(:mod:`~lightning_recycle.control.options`); the command line overrules it. Workers beyond the D * S of the grid are
spares. Each entry point of a script is a run of its own; runs are served until SIGINT, SIGTERM or ``--runs`` of them,
and none after SIGUSR1. Needs neither torch nor Lightning.

Restarted at the same address with the same options, it goes on with the run: workers wait for it
(``RECYCLE_CONNECT_SECONDS``), and the rest of its state is in the file ``--state``
(:mod:`~lightning_recycle.control.journal`).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lightning_recycle.arguments import (
    Check,
    command_parser,
    exit_without_reader,
    flag_value,
    integer,
    shared_options,
    typed_value,
    unknown_variables,
)
from lightning_recycle.control.coordinator.admission import Reception
from lightning_recycle.control.coordinator.coordinator import Coordinator
from lightning_recycle.control.journal import Journal, default_path
from lightning_recycle.control.monitoring.history import summary
from lightning_recycle.control.monitoring.logs import install_if_wanted
from lightning_recycle.control.monitoring.monitor import Monitor, served
from lightning_recycle.control.network.addresses_and_keys import (
    address_from,
    http_address,
    http_address_from_environment,
    key_from_environment,
    shown,
)
from lightning_recycle.control.options import (
    GROUPS,
    RunConfig,
    Settings,
    check_settings,
    difference,
    settings_of,
    settle,
)
from lightning_recycle.control.plans.drift import DriftOptions
from lightning_recycle.control.plans.plan_provider import PlanProvider
from lightning_recycle.control.protocol.messages import Enrolled, StopReason, Unfit
from lightning_recycle.control.protocol.state import Crashed, Failed, Finished, Outcome, StageLost
from lightning_recycle.errors import ConfigurationError, ReCycleError, counted
from lightning_recycle.files import check_writable
from lightning_recycle.processes import die_with_parent, has_ended

log = logging.getLogger(__name__)

_WORKERS = 4096  # nobody knows how many there will be
_OTHER_DESCRIPTORS = 256  # besides one for each worker: strangers, planners in other processes

# The settings that have a flag, by name.
_FLAGS = {
    f"{group}.{item.name}": item
    for group, (kind, _) in GROUPS.items()
    if group != "monitor"  # --monitor-plan is all of it
    for item in shared_options(kind)
}
# Of the values of flags; those of all others are seconds.
_UNITS = {
    "planner": "NAME",
    "memory": "LIMIT",
    "checksum_every": "STEPS",
    "verify": "SHARE",
    "min_pipelines": "N",
    "machine_error_retries": "N",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0 if every run finished."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    monitor = Monitor(options.name, awaits_runs=True)
    try:
        if not install_if_wanted() and (options.obey or sys.stderr.isatty()):
            logging.getLogger("lightning_recycle.events").setLevel(logging.WARNING)  # JSON is for programs
        for warning in [] if options.obey else unknown_variables():  # recycle-run has shown them
            log.warning("%s", warning)
        http = _shown_at(options.http)
        settings = _checked(options)
        most_runs = None if options.runs is None else flag_value("--runs", options.runs, integer(1))
        address, key = address_from(options.listen, "--listen"), key_from_environment()
        setting = "RECYCLE_HTTP" if options.http is None else "--http"
        if http is not None and _are_exclusive(http, address):
            raise ConfigurationError(f"{setting} and --listen have the same address: give another port.")
        reception = Reception(address, key, _WORKERS)
        journal = _journal(options.state, address, key)
    except ConfigurationError as error:
        print(f"recycle-coordinator: {error}", file=sys.stderr)
        return 2
    allow_descriptors(_WORKERS + _OTHER_DESCRIPTORS)
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in a background job of a script
            signal.signal(number, lambda signum, _: sys.exit(128 + signum))
    serving = Serving(
        reception,
        settings,
        journal,
        lambda run: monitor.show(None if run is None else run.view),
        check=partial(_check_started, options),
    )
    finished = serving.statuses

    was_last = threading.Event()

    def settle_end() -> None:
        """Ends the service if a run has finished: newcomers learn of it."""
        reception.is_over = was_last.is_set() and 0 in finished

    def end_after_this(*_: object) -> None:
        was_last.set()
        settle_end()

    signal.signal(signal.SIGUSR1, end_after_this)

    def note_no_run(_: object, error: BaseException | None, *__: object) -> None:
        if not isinstance(error, SystemExit) or finished or serving.has_met or reception.has_met:
            return
        if not options.obey:
            assert isinstance(error.code, int)
            log.info("Ended by %s: no worker has come.", signal.Signals(error.code - 128).name)
        elif was_last.is_set():
            each = "its process" if options.started == 1 else f"each of its {options.started} processes"
            log.warning(
                "No worker joined a run: if the program trained, %s trained by itself. Give its Trainer"
                " strategy='recycle'.",
                each,
            )

    with contextlib.ExitStack() as stack:
        stack.push(note_no_run)
        if journal is not None:
            stack.callback(journal.leave)
        stack.enter_context(contextlib.closing(reception))
        if options.obey:
            die_with_parent()
            _read_orders(end_after_this)
        try:
            stack.enter_context(served(monitor, http, setting=setting))
        except ConfigurationError as error:
            print(f"recycle-coordinator: {error}", file=sys.stderr)
            return 2
        try:
            print(f"listening on {shown(reception.listener.address)}", *options.invitation, sep="\n", flush=True)
        except BrokenPipeError:
            exit_without_reader()
        while most_runs is None or len(finished) < most_runs:
            if not (finished and options.obey):  # then its parent is about to end it
                log.info("Waiting for workers.")
            try:
                if not serving.meet():
                    continue
            except SystemExit:  # nobody is left alone: how the runs went is what counts
                if not finished:
                    raise
                break
            ended = serving.serve()
            if ended is not None:  # otherwise it did not begin
                _tell(*ended, with_traceback=not options.obey)  # workers of recycle-run print their own
                settle_end()
            serving.begin_next()
    return max(finished, default=0)


def _journal(state: str | None, address: tuple[str, int], key: bytes) -> Journal | None:
    """Journal of the coordinator; none at a port that no other one would have."""
    if state == "none" or (state is None and not address[1]):
        log.info("This coordinator keeps no state: if it dies, the run ends.")
        return None
    if state is not None:
        check_writable("--state", state)
    journal = Journal(default_path(address) if state is None else Path(state), key)
    log.info("Its state is in %s.", journal.path)
    if journal.kept is not None:
        log.warning("This coordinator goes on with run %s, whose coordinator was killed.", journal.run)
    return journal


def _shown_at(option: str | None) -> tuple[str, int] | None:
    """Address of page and metrics, from the command line or the environment."""
    return http_address_from_environment() if option is None else http_address(option, "--http")


def _are_exclusive(one: tuple[str, int], other: tuple[str, int]) -> bool:
    """Whether no process could listen at both addresses at once."""
    return one[1] == other[1] != 0 and (one[0] == other[0] or not {one[0], other[0]}.isdisjoint({"0.0.0.0", "::"}))


def _read_orders(end_after_this: Callable[[], None]) -> None:
    """Reads the orders ``over`` and ``end`` from standard input; ignores signals."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(128 + signal.SIGTERM))

    main = threading.main_thread().ident
    assert main is not None

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == "over":
                end_after_this()
            elif line.strip() == "end":
                signal.pthread_kill(main, signal.SIGALRM)  # wherever it waits
                return

    threading.Thread(target=listen, name="recycle-obey", daemon=True).start()


def _tell(terms: RunConfig, outcome: Outcome, with_traceback: bool) -> None:
    if isinstance(outcome, Finished):
        log.info("The run finished.")
    elif isinstance(outcome, StageLost):
        log.error(
            "All replicas of stage %d are lost (%s). Started again, the script resumes from the newest checkpoint by"
            " trainer.fit(..., ckpt_path='last').",
            outcome.stage,
            outcome.causes_in(terms.positions),
        )
    elif isinstance(outcome, Crashed):
        crash = outcome.crash
        name = terms.positions.name(crash.rank)
        traceback = f"\n{crash.traceback}" if with_traceback else ""
        log.error("%s", f"Worker {name} ended the run: {crash.summary}{traceback}".rstrip())
    elif isinstance(outcome, Failed):
        log.error("The run ended: %s", outcome.reason)
    else:
        log.warning("The run ended after the step in progress, as its workers were asked to.")


def _check_started(options: argparse.Namespace, terms: RunConfig) -> None:
    """Warns of too few workers of recycle-run; refuses them if no others can come."""
    needed = terms.options().recovery.least(terms.wants.grid.pipelines) * terms.wants.grid.stages * terms.wants.members
    if options.started is None or options.started >= needed:
        return
    more = f"--nproc-per-node {needed}" if options.invitation else f"srun --ntasks={needed}"
    short = f"The script needs {counted(needed, 'worker')}, and recycle-run has started {options.started}"
    text = " ".join([f"{short}: give {more}, or the script fewer devices.", *options.invitation])
    if options.alone:
        raise ConfigurationError(text)
    log.warning("%s", text)


def allow_descriptors(count: int) -> None:
    """Lets this process open ``count`` files and sockets, or as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if most < count:
        log.warning(
            "This process may open %d files and sockets, and needs %d: raise the limit (ulimit -n).", most, count
        )
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _checked(options: argparse.Namespace) -> Settings:
    """Settings of the command line; ConfigurationError for values that cannot work."""
    typed = {name: text for name in _FLAGS if (text := getattr(options, name)) is not None}
    settings = {name: typed_value(text) for name, text in typed.items()}
    if options.monitor_plan:
        settings |= settings_of("monitor", DriftOptions())
    try:
        check_settings(settings)
    except ConfigurationError as error:
        for name, text in typed.items():
            if _FLAGS[name].name == error.option:
                raise ConfigurationError(error.as_typed(f"{_flag(name)} {text}")) from error
        raise
    return settings


def _flag(name: str) -> str:
    return f"--{_FLAGS[name].name.replace('_', '-')}"


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "recycle-coordinator",
        "Run the coordinator for workers started elsewhere. Settings that are not given are those of"
        " their script, whose defaults stand in brackets.",
        "recycle-coordinator --listen 10.0.0.1:29400",
        "recycle-coordinator --listen 10.0.0.1:29400 --http 0.0.0.0:8080",
        "recycle-coordinator --listen 10.0.0.1:29400 --timeout 30 --runs 1",
        statuses={
            0: "every run finished",
            1: "one did not",
            143: "SIGTERM in a run or before the first (130: Ctrl-C); between two runs 0 or 1",
        },
        variables=("KEY", "KEY_FILE", "HTTP", "LOG", "NODE"),
    )
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="address for the workers")
    parser.add_argument(
        "--http", metavar="HOST:PORT", help="address of its page, /status and /metrics; a port alone: on this machine"
    )
    for name, item in _FLAGS.items():
        check: Check | None = item.metadata["check"]
        choices = "|".join(map(str, check.choices)).lower() if check is not None else ""
        values = choices or _UNITS.get(item.name, "SECONDS")
        default = "" if item.default is None else f" [{str(item.default).lower().removesuffix('.0')}]"
        parser.add_argument(_flag(name), dest=name, metavar=values, help=f"{item.metadata['shared']}{default}")
    parser.add_argument("--runs", metavar="N", help="end after this many runs; by default never")
    parser.add_argument(
        "--state",
        metavar="FILE",
        help="state for the next coordinator if this one is killed; by default in"
        " ~/.local/state/lightning_recycle, named by machine and address; none for nothing",
    )
    parser.add_argument(
        "--obey",
        action="store_true",
        help="end with the process that started this one, and take commands from standard input, not signals",
    )
    parser.add_argument("--name", default="recycle-coordinator", help=argparse.SUPPRESS)  # in the status
    parser.add_argument("--invitation", nargs=1, default=[], help=argparse.SUPPRESS)  # printed when it listens
    parser.add_argument("--started", type=int, help=argparse.SUPPRESS)  # how many workers its parent has started
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # no others can join
    parser.add_argument("--monitor-plan", action="store_true", help="change the plan when workers become slow or fast")
    return parser


_LOOK_SECONDS = 0.5  # between two looks whether all workers have gone before the run began
_NOBODY_SECONDS = 20.0  # until a run of which nobody returns is over, if others wait
_OVER_SECONDS = 3.0  # for those who return to a run whose end is known


class Serving:
    """Serves the runs of the workers at ``reception``, in one thread.

    Each is :meth:`meet`, :meth:`serve`, :meth:`begin_next`. ``given``: the command line, whatever the script asks for.
    ``journal``: the log from which another process can go on; None without one. ``on_run``: called with the coordinator
    of each run, and with None right before its workers learn the end. ``check``: raises for a run that cannot begin.

    Attributes:
        statuses: of the finished runs, also those of earlier processes: 0 for success.
        has_met: whether a worker has come.
    """

    def __init__(
        self,
        reception: Reception,
        given: Settings,
        journal: Journal | None,
        on_run: Callable[[Coordinator | None], None] = lambda _: None,
        check: Callable[[RunConfig], None] = lambda _: None,
    ) -> None:
        self.given, self.has_met = given, False
        self.statuses = [] if journal is None else list(journal.statuses)
        self._reception = reception
        reception.listener.start()
        self._journal = journal
        self._on_run = on_run
        self._check = check

    def meet(self) -> bool:
        """Waits for the first worker of the next run, or of an earlier process's run.

        Returns False if no worker returns to that one, which is over.
        """
        if (journal := self._journal) is not None:
            self._reception.run, self._reception.enrolled = journal.run, Enrolled(journal.run)
            if self._is_gone(journal):
                self.statuses[:] = journal.statuses
                return False
        self._reception.await_first()
        self.has_met = True
        return True

    def serve(self) -> tuple[RunConfig, Outcome] | None:
        """Serves a run to its end; None if it did not begin: no worker stayed or fits."""
        reception, hello = self._reception, self._reception.await_first()
        try:
            terms = settle(self.given, hello.wants)
            self._check(terms)
            planner = terms.planner()
            _prepare(planner, reception)
        except Exception as error:  # whatever a worker wants costs that worker, and not the others
            if not isinstance(error, ReCycleError):
                log.exception("There is no run as the first worker wants it: %s", hello.wants)
            reception.send_away(Unfit(str(error) or type(error).__name__))
            return None
        for text in terms.overruled:
            log.warning("%s, which counts.", text)
        log.info("A run of %s waits for %d workers.", terms.wants.grid, terms.positions.num_workers)
        log.debug("Its settings: %s", terms.wants)
        coordinator = Coordinator(
            terms.wants.grid,
            planner,
            terms.options(),
            authkey=reception.key,
            reception=reception,
            objection=lambda hello: difference(self.given, terms, hello.wants),
            staggered=bool(terms.planning.staggered),
            journal=self._journal,
            takes_results=False,
            members=terms.wants.members,
        )
        try:
            coordinator.start({})
            self._on_run(coordinator)
            while (outcome := coordinator.wait(_LOOK_SECONDS)) is None:
                if coordinator.is_deserted or (reception.is_over and not coordinator.has_begun):
                    return None
            self.statuses.append(int(not isinstance(outcome, Finished)))
            for line in summary(coordinator.history, terms.positions):
                log.info("%s", line)
            return terms, outcome
        finally:
            self._on_run(None)
            coordinator.close()  # which takes a while: the workers are told

    def begin_next(self) -> None:
        if self._journal is not None:
            self._journal.begin(tuple(self.statuses))

    # ------------------------------------------------------------------ an earlier process

    def _is_gone(self, journal: Journal) -> bool:
        """Waits for workers of an earlier process's run; True if none returns: it is over."""
        journaled = journal.kept
        if journaled is None or journaled.generation < 0:
            return False
        since = None if journaled.over is None else time.monotonic()
        limit = _NOBODY_SECONDS if journaled.over is None else _OVER_SECONDS
        while not self._reception.has_returned:
            if since is None and self._reception.has_met:
                since = time.monotonic()
            have_ended = all(has_ended(process.pid, process.space) for process in journal.processes.values())
            if have_ended or (since is not None and time.monotonic() - since > limit):
                log.warning("No worker returned to the run that was going on here: it is over.")
                status = () if journaled.over is None else (int(journaled.over.reason is not StopReason.FINISHED),)
                journal.begin((*journal.statuses, *status))
                return True
            self._reception.look()
        return False


def _prepare(planner: PlanProvider, reception: Reception) -> None:
    """Makes the first plan while the workers get signs of life."""
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


if __name__ == "__main__":
    sys.exit(main())
