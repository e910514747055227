"""The callback in a worker, and where it must do nothing, on fakes of the strategy and its executor."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_recycle.callbacks import Fault, FaultInjectionCallback, injection
from lightning_recycle.control.protocol.messages import FaultInjected
from lightning_recycle.errors import ConfigurationError, InjectedFaultError
from lightning_recycle.planning.grid import Grid, Microbatch, Op, OpKind, Positions, Worker
from lightning_recycle.traces import Trace, load_trace

GRID = Grid(2, 2, 2)
POSITIONS = Positions(GRID)
HERE = Worker(0, 1)
F, REDUCE, STEP = OpKind.FORWARD, OpKind.REDUCE, OpKind.STEP
PROGRAM = (Op(F, 1, Microbatch(0, 0)), Op(F, 1, Microbatch(0, 1)), Op(REDUCE, 1), Op(STEP, 1))


class FakeExecutor:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.version = 0
        self.before_operation: list[Callable[[int, Op], None]] = []
        self.after_operation: list[Callable[[int, Op], None]] = []
        self.runner = SimpleNamespace(timings=SimpleNamespace(stretch=None))
        self.communicator = SimpleNamespace(seconds_for_siblings=0.0)
        self.announced: list[FaultInjected] = []
        self.client = SimpleNamespace(send=self.announced.append)

    def run(self, steps: int = 1, seconds: float = 0.01, for_siblings: float = 0.0) -> None:
        for _ in range(steps):
            for op in PROGRAM:
                for before in self.before_operation:
                    before(self.version, op)
                self.communicator.seconds_for_siblings += for_siblings
                if self.runner.timings.stretch is not None:
                    self.runner.timings.stretch(seconds)
                for after in self.after_operation:
                    after(self.version, op)
            self.version += 1


class FakeStrategy:
    strategy_name = "recycle"
    grid = GRID
    session = SimpleNamespace(run=SimpleNamespace(positions=POSITIONS))

    def __init__(self, incarnation: int = 0, grid_rank: int = 0) -> None:
        self.executor: FakeExecutor | None = None
        self.grid_rank = grid_rank
        self.incarnation = incarnation
        self.at_point: list[Callable[[str, int], None]] = []

    def reach(self, point: str, step: int = 0) -> None:
        for hook in self.at_point:
            hook(point, step)


class FakeWorker:
    """A worker process as far as it has come: the callback travelled to it and its setup is over."""

    def __init__(self, callback: FaultInjectionCallback, worker: Worker, incarnation: int = 0) -> None:
        self.callback = pickle.loads(pickle.dumps(callback))
        self.strategy = FakeStrategy(incarnation, GRID.rank(worker))
        self.trainer: Any = SimpleNamespace(strategy=self.strategy)
        self.callback.setup(self.trainer, None, "fit")
        self.executor = self.strategy.executor = FakeExecutor(worker)

    def start(self) -> FakeWorker:
        self.callback.on_fit_start(self.trainer, None)
        return self

    @property
    def announced(self) -> list[tuple[str, str]]:
        return [(fault.kind, fault.operation) for fault in self.executor.announced]


def worker(*faults: Fault, place: Worker = HERE, incarnation: int = 0, **options: Any) -> FakeWorker:
    callback = FaultInjectionCallback(faults, **options)
    callback.check(POSITIONS)
    return FakeWorker(callback, place, incarnation).start()


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


# ---------------------------------------------------------------------- at exact points


def test_one_fault_is_a_list_of_one() -> None:
    fault = Fault("kill", 0, 0, 0)
    assert FaultInjectionCallback(fault).faults == (fault,)


@pytest.mark.parametrize(
    ("fault", "steps_done", "where"),
    [
        (Fault("exception", 0, 1, 0), 0, "F(0, 0)@1"),
        (Fault("exception", 0, 1, 2, microbatch=1), 2, "F(0, 1)@1"),
        (Fault("exception", 0, 1, 1, at="reduce"), 1, "REDUCE@1"),
        (Fault("exception", 0, 1, 1, at="optimizer", when="after"), 1, "after STEP@1"),
    ],
)
def test_a_fault_strikes_at_its_point_and_is_announced(fault: Fault, steps_done: int, where: str) -> None:
    process = worker(fault)
    with pytest.raises(InjectedFaultError, match="Injected: Fault"):
        process.executor.run(5)
    assert process.executor.version == steps_done
    assert process.announced == [("exception", where)]
    assert process.executor.announced[0].rank == 1
    assert abs(process.executor.announced[0].time - time.time()) < 5


def test_a_fault_strikes_once() -> None:
    process = worker(Fault("exception", 0, 1, 0))
    with pytest.raises(InjectedFaultError):
        process.executor.run()
    process.executor.run(3)  # the step is redone, by chance in the same process
    assert len(process.announced) == 1


@pytest.mark.parametrize("place", [Worker(0, 0), Worker(1, 0), Worker(1, 1)])
def test_other_workers_do_not_fail(place: Worker) -> None:
    process = worker(Fault("exception", 0, 1, 0), Fault("exception", 0, 1, at="end"), place=place)
    process.executor.run(3)
    process.strategy.reach("end", 3)
    assert process.announced == []


def test_a_replacement_does_not_die_of_the_same_fault() -> None:
    faults = (Fault("exception", 0, 1, 0), Fault("exception", 0, 1, at="setup"))
    replacement = worker(*faults, incarnation=1)
    replacement.strategy.reach("setup")
    replacement.executor.run(3)
    assert replacement.announced == []


def test_faults_stay_with_the_process_when_it_moves_to_another_position() -> None:
    process = worker(Fault("exception", 0, 1, 1), Fault("exception", 1, 0, 1))
    process.executor.run(1)
    process.executor.worker = Worker(1, 0)
    with pytest.raises(InjectedFaultError, match="pipeline=0, stage=1"):
        process.executor.run(1)
    process.executor.run(2)
    assert len(process.announced) == 1


def test_several_faults_at_one_point_all_strike(sleeps: list[float]) -> None:
    slow = Fault("slow", 0, 1, 0, factor=2.0, steps=1)
    process = worker(slow, slow, Fault("exception", 0, 1, 0, at="reduce"))
    with pytest.raises(InjectedFaultError):
        process.executor.run()
    assert process.announced == [("slow", "F(0, 0)@1")] * 2 + [("exception", "REDUCE@1")]


def test_slow_sleeps_after_each_operation_from_its_point_on(sleeps: list[float]) -> None:
    process = worker(Fault("slow", 0, 1, 1, at="reduce", factor=3.0, steps=2))
    process.executor.run(1, seconds=0.5)
    assert sleeps == []
    process.executor.run(1, seconds=0.5)
    assert sleeps == [1.0] * 2  # REDUCE and STEP
    process.executor.run(3, seconds=0.25)
    assert sleeps == [1.0] * 2 + [0.5] * 4


def test_slow_does_not_stretch_the_wait_for_siblings(sleeps: list[float]) -> None:
    process = worker(Fault("slow", 0, 1, 1, at="reduce", factor=3.0, steps=1))
    process.executor.run(2, seconds=0.5, for_siblings=0.25)
    assert sleeps == [0.5] * 2


def test_slow_after_an_operation_spares_that_operation(sleeps: list[float]) -> None:
    process = worker(Fault("slow", 0, 1, 0, at="reduce", when="after", factor=2.0, steps=1))
    process.executor.run(1, seconds=0.5)
    assert sleeps == [0.5]


def test_a_fault_that_never_happened_is_reported_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    process = worker(Fault("kill", 0, 1, 7), Fault("kill", 1, 1, 7), Fault("exception", 0, 1, 0))
    with pytest.raises(InjectedFaultError):
        process.executor.run()
    process.callback.teardown(process.trainer, None, "fit")
    kill, ends = Fault("kill", 0, 1, 7), Fault("exception", 0, 1, 0)
    assert [record.args for record in caplog.records] == [(kill, ends), (kill,)]


# ---------------------------------------------------------------------- by time


class Clocks:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "time", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def seconds_to_failure(process: FakeWorker, clocks: Clocks, most: float = 200.0) -> float | None:
    """Runs operations for ``most`` seconds; the seconds until the worker fails."""
    began = clocks.now
    while clocks.now < began + most:
        try:
            process.executor.run(seconds=0.0)
        except InjectedFaultError:
            return clocks.now - began
        clocks.now += 0.5
    return None


def test_mtbf_strikes_at_the_first_operation_after_the_drawn_time(clocks: Clocks) -> None:
    found = {}
    for rank in range(4):
        process = worker(place=GRID.worker(rank), mtbf=5.0, kinds=("exception",), seed=2)
        clocks.now += 50.0  # start-up does not count
        found[rank] = seconds_to_failure(process, clocks)
        drawn = injection.random_faults(5.0, 4, ("exception",), 2, rank)[0].time
        assert found[rank] is not None
        assert drawn <= found[rank] < drawn + 0.5
    assert len(set(found.values())) == 4


def test_a_trace_strikes_on_the_clock_of_the_run(clocks: Clocks) -> None:
    options: dict[str, Any] = {"trace": "aws-p3", "time_scale": 0.01, "kinds": ("exception",), "seed": 5}
    callback = FaultInjectionCallback(**options)
    callback.check(POSITIONS)
    plan = injection.trace_faults(load_trace("aws-p3").availability, 4, ("exception",), 5, 0.01)
    launched = clocks.now
    for rank in range(4):
        past, *expected = [fault.time for fault in plan if fault.rank == rank]
        clocks.now = launched + past + 0.01
        process = FakeWorker(callback, GRID.worker(rank), incarnation=rank % 2).start()  # a replacement is like others
        for moment in expected:
            clocks.now = launched + moment - 0.01
            process.executor.run()
            clocks.now = launched + moment + 0.01
            with pytest.raises(InjectedFaultError):
                process.executor.run()
        assert len(process.announced) == len(expected) > 0


def test_a_trace_is_read_where_the_callback_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read: list[str] = []

    def load(name: str, _: str) -> Trace:
        read.append(name)
        return load_trace("aws-g4dn")

    monkeypatch.setattr(injection, "load_trace", load)
    callback = FaultInjectionCallback(trace=tmp_path / "mine.csv")
    FakeWorker(callback, Worker(0, 0))
    assert read == [str(tmp_path / "mine.csv")]


# ---------------------------------------------------------------------- where nothing may happen


ALWAYS = {"mtbf": 1e-9, "kinds": ("exception",)}


def test_the_launching_process_never_fails() -> None:
    callback = FaultInjectionCallback([Fault("exception", 0, 0, 0), Fault("exception", 0, 0, at="setup")], **ALWAYS)
    callback.check(POSITIONS)
    strategy = FakeStrategy()  # without an executor
    trainer: Any = SimpleNamespace(strategy=strategy)
    callback.setup(trainer, None, "fit")
    callback.on_fit_start(trainer, None)
    for point in ("setup", "recovery", "checkpoint", "validation", "end"):
        strategy.reach(point)
    callback.teardown(trainer, None, "fit")


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_only_fit_is_disturbed(stage: str) -> None:
    callback = FaultInjectionCallback([Fault("kill", 0, 0, 0)], **ALWAYS)
    strategy = FakeStrategy()
    callback.setup(SimpleNamespace(strategy=strategy), None, stage)
    assert strategy.at_point == []


def test_without_faults_nothing_is_attached_and_any_strategy_will_do() -> None:
    callback = FaultInjectionCallback()
    trainer: Any = SimpleNamespace(strategy=object())
    callback.setup(trainer, None, "fit")
    callback.on_fit_start(trainer, None)
    callback.teardown(trainer, None, "fit")


def test_a_fault_of_one_member_leaves_the_others_of_its_position_alone() -> None:
    positions = Positions(GRID, 2)
    callback = FaultInjectionCallback([Fault("exception", 0, 1, 0, member=1), Fault("exception", 0, 1, 1)])
    callback.check(positions)
    steps = []
    for rank in positions.ranks(HERE):
        process = FakeWorker(callback, HERE)
        process.strategy.session = SimpleNamespace(run=SimpleNamespace(positions=positions))
        process.strategy.grid_rank, process.strategy.at_point = rank, []
        process.callback.setup(process.trainer, None, "fit")
        process.start()
        with pytest.raises(InjectedFaultError):
            process.executor.run(2)
        steps.append(process.executor.version)
    assert steps == [1, 0]
    with pytest.raises(ConfigurationError, match="member must be 0"):
        callback.check(POSITIONS)


@pytest.mark.parametrize("options", [{"faults": [Fault("kill", 0, 0, 0)]}, {"mtbf": 5.0}, {"trace": "aws-p3"}])
def test_another_strategy_is_refused(options: dict[str, Any]) -> None:
    class SingleDeviceStrategy:
        strategy_name = "single_device"

    callback = FaultInjectionCallback(**options)
    with pytest.raises(ConfigurationError, match="needs strategy='recycle', not SingleDeviceStrategy"):
        callback.setup(SimpleNamespace(strategy=SingleDeviceStrategy()), None, "fit")


def test_the_callback_travels_without_what_it_is_attached_to() -> None:
    process = worker(Fault("exception", 0, 1, 0), mtbf=5.0)
    process.strategy.at_point.append(lambda *_: None)  # cannot be pickled
    copy = pickle.loads(pickle.dumps(process.callback))
    assert copy.faults == process.callback.faults
    copy.on_fit_start(process.trainer, None)
    assert len(process.executor.before_operation) == 1


# ---------------------------------------------------------------------- wrong values


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"faults": ["kill"]}, ["FaultInjectionCallback(faults=['kill']): give a list", "Fault("]),
        ({"faults": [Fault("kill", 0, 0, 0), 1]}, ["[Fault(kind='kill', pipeline=0, stage=0, step=0), 1]): give"]),
        ({"mtbf": 0}, ["mtbf=0", "above 0"]),
        ({"mtbf": float("inf")}, ["mtbf=inf", "above 0"]),
        ({"mtbf": "1h"}, ["mtbf='1h'", "above 0"]),
        ({"mtbf": 1.0, "kinds": ("murder",)}, ["'murder'", "'kill'"]),
        ({"mtbf": 1.0, "kinds": ("slow",)}, ["'slow'", "'kill'"]),
        ({"mtbf": 1.0, "kinds": "kill"}, ["kinds='kill'", "sequence"]),
        ({"mtbf": 1.0, "kinds": ()}, ["kinds=()", "'kill'"]),
        ({"mtbf": 1.0, "seed": "x"}, ["seed='x'", "integer"]),
        ({"mtbf": 1.0, "max_faults": 0}, ["max_faults=0", "at least 1"]),
        ({"mtbf": 1.0, "max_faults": 1.5}, ["max_faults=1.5", "at least 1"]),
        ({"max_faults": 3}, ["max_faults=3", "mtbf or trace"]),
        ({"mtbf": 1.0, "trace": "aws-p3"}, ["mtbf=1.0", "trace='aws-p3'", "leave one out"]),
        ({"trace": "aws-p3", "time_scale": -1}, ["time_scale=-1", "above 0"]),
        ({"trace": "aws-p33"}, ["aws-p33", "aws-p3,"]),
    ],
)
def test_nonsense_is_refused_with_the_value_and_the_remedy(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        FaultInjectionCallback(**options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("kill", 2, 0, 1), ["(2, 0)", "2 pipelines"]),
        (Fault("kill", 0, 2, at="end"), ["(0, 2)", "2 stages"]),
        (Fault("kill", 1, 0, 1, microbatch=2), ["microbatch", "0 to 1"]),
    ],
)
def test_a_fault_outside_the_grid_is_refused(fault: Fault, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        FaultInjectionCallback([fault]).check(POSITIONS)
    assert all(word in str(caught.value) for word in words), caught.value
