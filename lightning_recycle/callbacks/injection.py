"""Fault injection: workers fail at points of the schedule, at random, or by trace."""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from lightning_recycle.arguments import Check, at_least, integer, is_integer, suggests_options
from lightning_recycle.callbacks.faults import (
    EFFECTS,
    KINDS_AT_TIMES,
    Agenda,
    Fault,
    WrongArithmetic,
    flip,
    flip_in_next_output,
    flipped,
    random_faults,
    trace_faults,
)
from lightning_recycle.control.protocol.messages import FaultInjected
from lightning_recycle.errors import ConfigurationError, InjectedFaultError, counted
from lightning_recycle.planning.grid import Op, OpKind, Positions, Worker
from lightning_recycle.traces import load_trace

if TYPE_CHECKING:
    from lightning_recycle.runtime.executor import Executor

log = logging.getLogger(__name__)

_OWNER = "FaultInjectionCallback"


@suggests_options
class FaultInjectionCallback(pl.Callback):
    """Makes workers fail during ``fit``.

    ``faults`` happen at exact points; in addition, workers fail at random times (``mtbf``) or as a real cluster lost
    them (``trace``). Each worker decides from the arguments alone: the same arguments give the same faults. The
    launching process never fails. Nothing prevents random failures and traces from taking all replicas of a stage;
    ``max_faults`` and ``RecoveryOptions(max_restarts=...)`` make that unlikely.

    Args:
        faults: faults at exact points, or one. Each happens once, to the first process of its position, wherever it
            moves.
        mtbf: mean seconds between two failures anywhere in the grid; by default there are none at random. Each
            worker fails at its first operation after a random time, counted from its first operation; replacements draw
            again.
        kinds: kinds of the failures at random and of the trace, drawn with equal probability: all but "slow" and
            "bitflip".
        trace: the name of a shipped trace (see :func:`lightning_recycle.traces.available_traces`), or a path; by
            default none. At its peak all workers are available, otherwise a proportional number; when that number
            falls, workers fail, see :func:`~lightning_recycle.callbacks.faults.trace_faults`. Its clock starts when the
            run is launched; what falls due before a worker's first operation does not hit it. Use
            ``kinds=("preempt",)`` for a cloud that gives notice.
        time_scale: wall-clock seconds per second of the trace: 0.01 plays an hour in 36 s.
        seed: seed of the draws.
        max_faults: the most failures at random or of the trace in the whole run; by default no limit. With ``mtbf``,
            the first ones drawn for the initial workers count; replacements then do not fail.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    def __init__(
        self,
        faults: Fault | Sequence[Fault] = (),
        *,
        mtbf: float | None = None,
        kinds: Sequence[str] = ("kill",),
        trace: str | os.PathLike[str] | None = None,
        time_scale: float = 1.0,
        seed: int = 0,
        max_faults: int | None = None,
    ) -> None:
        if isinstance(faults, Fault):
            faults = (faults,)
        if not isinstance(faults, Sequence) or not all(isinstance(fault, Fault) for fault in faults):
            _refuse(f"{faults=}", "give a list of faults, such as [Fault('kill', pipeline=1, stage=0, step=3)]")
        self.faults = tuple(faults)
        if mtbf is not None and trace is not None:
            _refuse(f"{mtbf=}, {trace=}", "these exclude each other; leave one out")
        if mtbf is None and trace is None and max_faults is not None:
            _refuse(f"{max_faults=}", "this limits random failures: give mtbf or trace, or leave it out")
        if mtbf is not None:
            at_least(_OWNER, "mtbf", mtbf, above=True)
        at_least(_OWNER, "time_scale", time_scale, above=True)
        Check(is_integer, "give an integer").checked(_OWNER, "seed", seed)
        integer(1, otherwise="for no limit").checked(_OWNER, "max_faults", max_faults)
        if isinstance(kinds, str) or not kinds or not all(kind in KINDS_AT_TIMES for kind in kinds):
            known = ", ".join(map(repr, KINDS_AT_TIMES))
            _refuse(f"{kinds=}", f"give a sequence of some of {known}, e.g. ('kill',)")
        self.mtbf = mtbf
        self.kinds = tuple(kinds)
        self.trace = None if trace is None else os.fspath(trace)
        self.time_scale = time_scale
        self.seed = seed
        self.max_faults = max_faults
        self._availability = () if self.trace is None else load_trace(self.trace, _OWNER).availability
        self._launched: float | None = None
        self._injector: _Injector | None = None

    def check(self, positions: Positions) -> None:
        """Starts the trace's clock; ConfigurationError for faults outside ``positions``."""
        self._launched = time.time()
        grid = positions.grid
        for fault in self.faults:
            if Worker(fault.pipeline, fault.stage) not in grid:
                raise ConfigurationError(
                    f"{fault}: there is no worker ({fault.pipeline}, {fault.stage}) in a grid of"
                    f" {counted(grid.lanes, 'pipeline')} x {counted(grid.stages, 'stage')}: pipeline must be"
                    f" {_below(grid.lanes)}, stage {_below(grid.stages)}."
                )
            if fault.microbatch is not None and fault.microbatch >= grid.microbatches:
                raise ConfigurationError(f"{fault}: microbatch must be {_below(grid.microbatches)}.")
            if fault.member is not None and fault.member >= positions.members:
                raise ConfigurationError(f"{fault}: member must be {_below(positions.members)}.")
        ends = [fault for fault in self.faults if fault.kind in KINDS_AT_TIMES]
        for one, other in itertools.combinations(ends, 2):
            if (one.pipeline, one.stage, one.member) == (other.pipeline, other.stage, other.member):
                log.warning(
                    "At most one of %s and %s happens: faults strike the first process of a position, and each of these"
                    " ends it. Give them different positions.", one, other,
                )  # fmt: skip

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Prepares this process, which may fail in the middle of the strategy's own setup."""
        if stage != "fit" or not (self.faults or self.mtbf is not None or self.trace is not None):
            return
        if getattr(trainer.strategy, "strategy_name", None) != "recycle":
            raise ConfigurationError(
                f"FaultInjectionCallback needs strategy='recycle', not {type(trainer.strategy).__name__}:"
                " with another strategy a fault would end the run."
            )
        strategy: Any = trainer.strategy
        rank = strategy.grid_rank
        positions: Positions = strategy.session.run.positions
        agenda = self._agenda(positions.num_workers, rank, strategy.incarnation)
        faults = [fault for fault in self.faults if fault.member in (None, positions.member(rank))]
        self._injector = _Injector(faults, agenda, strategy, rank)
        strategy.at_point.append(self._injector.at_point)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._injector is not None:
            self._injector.watch_operations()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._injector is not None and stage == "fit":
            for fault in self._injector.left_over():
                log.warning("%s never happened: its worker ended the run without reaching that point.", fault)

    def _agenda(self, num_workers: int, rank: int, incarnation: int) -> Agenda:
        """The timed failures of one process."""
        if self.mtbf is not None:
            drawn = random_faults(self.mtbf, num_workers, self.kinds, self.seed, rank, incarnation, self.max_faults)
            return Agenda(drawn, clock=time.monotonic)
        plan = trace_faults(self._availability, num_workers, self.kinds, self.seed, self.time_scale, self.max_faults)
        # Without a launching process (a worker started by hand), the clock starts with the worker.
        launched = time.time() if self._launched is None else self._launched
        return Agenda((fault for fault in plan if fault.rank == rank), origin=launched, clock=time.time)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_injector": None}


# ---------------------------------------------------------------------- in a worker


class _Injector:
    """Makes this process fail when one of its faults is due.

    Args:
        faults: faults of all workers that are the same member of their position; this process picks its own when it
            first acts.
        strategy: strategy of this process. Without an executor this is not a worker, and nothing ever happens.
    """

    def __init__(self, faults: Sequence[Fault], agenda: Agenda, strategy: Any, rank: int) -> None:
        self._all_faults = faults
        self._faults: list[Fault] | None = None
        self._agenda = agenda
        self._strategy = strategy
        self._rank = rank
        self._slowdowns: list[tuple[Fault, int]] = []  # with the step in which they began
        self._waited = 0.0  # for siblings, before the operation that runs
        self._arithmetic: WrongArithmetic | None = None
        self._errs = False  # in the operation that runs

    def watch_operations(self) -> None:
        executor = self._strategy.executor
        if executor is not None:
            executor.before_operation.append(self.before_operation)
            executor.after_operation.append(self.after_operation)
            executor.runner.timings.stretch = self.stretch

    def left_over(self) -> tuple[Fault, ...]:
        """The faults at exact points that this process has not suffered."""
        return tuple(self._mine())

    def at_point(self, point: str, step: int) -> None:
        self._strike_all(lambda fault: fault.matches_point(point, step), step, point)

    def before_operation(self, step: int, op: Op) -> None:
        self._strike_all(lambda fault: fault.matches(step, op, "before"), step, str(op))
        timed = self._agenda.take_due()
        if timed is not None:
            place: Worker = self._strategy.executor.worker
            self._strike(Fault(timed.kind, place.pipeline, place.stage, step), step, str(op))
        self._err(op.kind not in (OpKind.REDUCE, OpKind.STEP))
        self._waited = self._strategy.executor.communicator.seconds_for_siblings

    def _err(self, errs: bool) -> None:
        """From now on arithmetic is wrong, or right, if this device is broken."""
        if self._arithmetic is None or errs == self._errs:
            return
        self._errs = errs
        if errs:
            self._arithmetic.__enter__()
        else:
            self._arithmetic.__exit__(None, None, None)

    def stretch(self, seconds: float) -> None:
        """Prolongs the operation that has just computed for ``seconds``.

        The wait for siblings is not prolonged: two slow ones would slow each other down without end.
        """
        executor = self._strategy.executor
        own = seconds - (executor.communicator.seconds_for_siblings - self._waited)
        for fault, first in self._slowdowns:
            if first <= executor.version < first + (fault.steps or 0):
                time.sleep(((fault.factor or 1.0) - 1) * max(0.0, own))

    def after_operation(self, step: int, op: Op) -> None:
        self._err(False)
        self._strike_all(lambda fault: fault.matches(step, op, "after"), step, f"after {op}")

    def _strike_all(self, is_due: Callable[[Fault], bool], step: int, where: str) -> None:
        faults = self._mine()
        for fault in [fault for fault in faults if is_due(fault)]:
            faults.remove(fault)
            self._strike(fault, step, where)

    def _mine(self) -> list[Fault]:
        """The faults that this process has yet to suffer, by its initial position."""
        executor = self._strategy.executor
        if executor is None:
            return []
        if self._faults is None:
            first = self._strategy.incarnation == 0
            worker = executor.worker
            self._faults = [f for f in self._all_faults if first and Worker(f.pipeline, f.stage) == worker]
        return self._faults

    def _strike(self, fault: Fault, step: int, where: str) -> None:
        executor = self._strategy.executor
        executor.client.send(FaultInjected(self._rank, fault.kind, where, time.time()))
        match fault.kind:
            case "exception":
                raise InjectedFaultError(f"Injected: {fault}")  # counts as a failure of the infrastructure
            case "slow":
                self._slowdowns.append((fault, step))
            case "bitflip":
                self._flip(fault, executor)
            case kind:
                EFFECTS[kind]()

    def _flip(self, fault: Fault, executor: Executor) -> None:
        draw = random.Random(str(fault))
        match fault.target:
            case "parameter":
                flip(self._strategy.lightning_module.parameters(), fault.bit, draw)
            case "optimizer":
                states = (state for optimizer in self._strategy.optimizers for state in optimizer.state.values())
                flip([t for state in states for t in state.values() if _is_moment(t)], fault.bit, draw)
            case "activation":
                leaves = [m for m in self._strategy.lightning_module.modules() if not any(m.children())]
                flip_in_next_output(leaves, fault.bit, draw)
            case "gradient":
                flip([p.grad for p in self._strategy.lightning_module.parameters()], fault.bit, draw)
            case "message":
                executor.communicator.alter_next = lambda value: flipped(value, fault.bit, draw)
            case "matmul":
                assert fault.every is not None
                self._arithmetic = WrongArithmetic(fault.every, fault.bit, draw)


def _is_moment(value: Any) -> bool:
    """Whether a part of an optimizer's state is a tensor as large as a parameter."""
    return isinstance(value, Tensor) and value.dim() > 0


# ---------------------------------------------------------------------- checks


def _below(count: int) -> str:
    return "0" if count == 1 else f"one of 0 to {count - 1}"


def _refuse(given: str, reason: str) -> NoReturn:
    raise ConfigurationError(f"{_OWNER}({given}): {reason}.")
