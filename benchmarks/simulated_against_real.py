"""The simulator against real processes: the same failures and rejoins in both.

    .venv/bin/python benchmarks/simulated_against_real.py            # eight scenarios, about seven minutes
    .venv/bin/python benchmarks/simulated_against_real.py --quick    # two of them, a minute and a half

Each scenario is a real run, ``strategy="recycle"`` with ``max_restarts=10`` and layers whose F, B and W sleep
(``emulated.py``), in which workers are killed in the middle of a step and their replacements come back later; and a
simulated one, ``lightning_recycle.simulation`` with the policy ``Recycle``. Compared are the seconds for the same
number of steps over the whole history (goal: within 3 %), the steps of each phase, and each stop.

What the simulator is told, and nothing else:

- grid, techniques, and what F, B and W of each stage cost: what the layers sleep. Both sides plan for that, without a
  limit of micro-batches in flight, with the same planner; messages, all-reduce and optimizer cost nothing.
- in which step each worker died and how many seconds into it, and how many seconds later its replacement was set up,
  read from the real run: how long a process takes to start is up to the machine, not to the policy. (Replacements wait
  for some seconds more, so that there is a phase without them.)
- what a failure and a rejoin cost beyond the steps: ``DETECTION``, ``REGROUP`` and ``REJOIN``, one number each for all
  scenarios, from medians of ``recovery.py`` (another model, another run).

The step that a failure undoes, the empty pipelines after each stop and the step at whose end a rejoin takes place are
the simulator's own to find. A history begins with the commit of the last warm-up step.

The runtime is Python between the slots, of all workers on the cores of one machine, and takes about as long whatever
the slot. A second simulation ("with overhead") knows what a trace of one worker says that it costs: ``OPERATION``,
``MESSAGE`` and ``BETWEEN_STEPS``, from RESULTS.md as well. What is left then is neither slots nor those costs.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from emulated import SleepingModel, profile_of
from harness import console, describe_machine, fit
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle import PlanningOptions, RecoveryOptions, ReCycleStrategy
from lightning_recycle.callbacks import Fault, FaultInjectionCallback
from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.planning import Costs, Grid, Worker, save_profile
from lightning_recycle.planning.heuristic_planner import DEFAULT_EFFORT
from lightning_recycle.simulation import (
    Cluster,
    MeasuredModel,
    Outage,
    Recycle,
    Scripted,
    SimulationResult,
    State,
    Transformer,
    simulate,
)

DETECTION = 0.037
"""Seconds from a SIGKILL until the coordinator declares the worker dead: a median of ``recovery.py``."""
REGROUP = 0.006 + 0.007
"""Seconds to agree, with the plan, and to connect anew: the same table."""
REJOIN = 0.172
"""Seconds that the survivors wait for a replacement to enter: a median of ``recovery.py``."""
OPERATION, MESSAGE, BETWEEN_STEPS = 0.0004, 0.0006, 0.005
"""Seconds between two operations of a worker, what they are more if a message comes in between, and between two steps:
the trace of one worker of four under "The schedule is what runs" in RESULTS.md (0.4, 1 - 0.4 and 5 ms)."""
GOAL = 0.03
WARMUP = 4  # steps before the history begins
BEFORE = 8  # steps of the history before the first failure
AFTER = 10  # steps after the last rejoin
MOST = 400  # steps; a replacement that does not come is an error


@dataclass(frozen=True)
class Scenario:
    """A run with failures and rejoins.

    Args:
        name: in few words.
        grid: of the run; one process per worker.
        kills: the workers that are killed, with the step of the history before whose end that happens.
        split_backward: as in the strategy and the policy.
        staggered: as in the strategy and the policy.
        slot: seconds of an operation that costs 1.
        costs: of the stages, in slots; None: one for each of F, B and W.
        away: seconds that a replacement waits when it is set up.
    """

    name: str
    grid: Grid
    kills: tuple[tuple[Worker, int], ...]
    split_backward: bool = True
    staggered: bool = True
    slot: float = 0.080
    costs: Costs | None = None
    away: float = 6.0

    @property
    def techniques(self) -> str:
        """The last one that is on; each needs those before it."""
        return "+ staggered" if self.staggered else "+ split backward" if self.split_backward else "adaptive"

    @property
    def slots(self) -> Costs:
        """What each stage's operations cost, in slots."""
        return self.costs or Costs.uniform(self.grid.stages)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What is injected: each worker dies before the backward of a micro-batch in the middle of the step."""
        middle = self.grid.microbatches // 2
        return tuple(
            Fault("kill", worker.pipeline, worker.stage, WARMUP + step, "backward_input", middle)
            for worker, step in self.kills
        )


_SMALL, _UNEVEN = Grid(3, 2, 6), Grid(3, 3, 6)
SCENARIOS = (
    Scenario("one technique", _SMALL, ((Worker(2, 1), BEFORE),), split_backward=False, staggered=False),
    Scenario("two techniques", _SMALL, ((Worker(2, 1), BEFORE),), staggered=False),
    Scenario("three techniques", _SMALL, ((Worker(2, 1), BEFORE),)),
    Scenario("few workers", Grid(2, 2, 4), ((Worker(1, 0), BEFORE),)),
    Scenario("half of a stage", Grid(2, 4, 8), ((Worker(1, 2), BEFORE),), away=10.0),
    Scenario(
        "unequal stages",
        _UNEVEN,
        ((Worker(2, 0), BEFORE),),
        costs=Costs((1.0, 0.75, 1.25), (1.0, 0.75, 1.5), (1.0, 0.5, 1.0), (0.0,) * 3, (0.0,) * 3),
    ),
    Scenario("two failures", Grid(4, 2, 4), ((Worker(3, 0), BEFORE), (Worker(2, 0), BEFORE + 3))),
    Scenario("running example", Grid(3, 4, 6), ((Worker(1, 2), BEFORE),), away=8.0),
)
QUICK = ("one technique", "few workers")


# ---------------------------------------------------------------------- the real run


@dataclass(frozen=True)
class Absence:
    """A worker that died in the middle of a step, and came back.

    Args:
        rank: of the worker.
        steps: of the history that were committed before.
        into_step: seconds from the last of those commits to the death.
        seconds: from the death until the replacement was set up.
    """

    rank: int
    steps: int
    into_step: float
    seconds: float


@dataclass(frozen=True)
class RealRun:
    """A history as it happened, in seconds since it began.

    Args:
        commits: when each step was committed.
        absences: in the order of the deaths.
        stops: when training stood still: from a death, or from the last commit before a rejoin, to the next commit.
    """

    commits: tuple[float, ...]
    absences: tuple[Absence, ...]
    stops: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        """Until the last commit."""
        return self.commits[-1]

    @property
    def undisturbed(self) -> tuple[tuple[float, ...], ...]:
        """Seconds of the steps in which nothing happened, before the first stop, between stops, and after the last."""
        phases: list[list[float]] = [[] for _ in range(len(self.stops) + 1)]
        for begin, end in zip((0.0, *self.commits), self.commits, strict=False):
            if not any(begin < stop_end and end > stop_begin for stop_begin, stop_end in self.stops):
                phases[sum(stop_end <= begin for _, stop_end in self.stops)].append(end - begin)
        return tuple(map(tuple, phases))


class _Replacement(L.Callback):
    """In a replacement: waits when it is set up, and writes to ``directory`` when it asked to be let in; in all
    workers: ends the training some steps after the last rejoin.
    """

    def __init__(self, directory: str, away: float, rejoins: int) -> None:
        self._directory, self._away, self._rejoins = directory, away, rejoins
        self._last: int | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.strategy.incarnation:
            time.sleep(self._away)
            (Path(self._directory) / str(trainer.strategy.grid_rank)).write_text(repr(time.time()))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self._last is None and trainer.strategy.counters.get("rejoined_workers", 0) >= self._rejoins:
            self._last = trainer.global_step + AFTER
        if self._last is not None and trainer.global_step >= self._last:
            trainer.should_stop = True


def run(scenario: Scenario) -> RealRun:
    """Trains through ``scenario`` in worker processes.

    Raises:
        RuntimeError: when a replacement did not come.
    """
    grid = scenario.grid
    samples = torch.zeros(MOST * grid.global_microbatches, 4)
    loader = DataLoader(TensorDataset(samples, samples), batch_size=grid.microbatches)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as arrivals:
        profile = Path(directory) / "profile.json"
        save_profile(profile, profile_of(scenario.slots, scenario.slot))
        strategy = ReCycleStrategy(
            grid.stages,
            grid.microbatches,
            planning=PlanningOptions(
                split_backward=scenario.split_backward,
                staggered=scenario.staggered,
                profile=profile,
                memory=f"{grid.global_microbatches} micro-batches",
            ),
            recovery=RecoveryOptions(max_restarts=10),
        )
        trainer = fit(
            SleepingModel(grid.stages, scenario.slot, costs=scenario.slots),
            loader,
            strategy,
            devices=grid.num_workers,
            steps=MOST,
            callbacks=[
                FaultInjectionCallback(scenario.faults),
                _Replacement(arrivals, scenario.away, len(scenario.kills)),
            ],
        )
        ready = {int(path.name): float(path.read_text()) for path in Path(arrivals).iterdir()}
    rejoined = sum(event.kind == "rejoined" for event in trainer.strategy.history)
    if rejoined != len(scenario.kills):
        raise RuntimeError(f"{scenario.name}: {rejoined} replacements entered, {len(scenario.kills)} were wanted.")
    return read_history(trainer.strategy.history, grid, ready)


def read_history(history: Sequence[Event], grid: Grid, ready: dict[int, float]) -> RealRun:
    """The part of a run's ``history`` after the warm-up; ``ready``: when each rank's replacement was set up."""
    steps = [event for event in history if event.kind == "step"]
    origin = next(event.time for event in steps if event.step == WARMUP - 1)
    commits = [event.time for event in steps if event.step >= WARMUP]
    absences, stops = [], []
    for event in history:
        if event.kind == "failure":
            assert event.worker is not None
            assert event.seconds is not None
            rank, died = grid.rank(Worker(*event.worker)), event.time - event.seconds
            before = [origin, *(time for time in commits if time <= died)]
            absences.append(Absence(rank, len(before) - 1, died - before[-1], ready[rank] - died))
            stops.append((died, min(time for time in commits if time > event.time)))
        elif event.kind == "paused":
            last = max(time for time in commits if time <= event.time)
            stops.append((last, min(time for time in commits if time > event.time)))
    return RealRun(
        tuple(time - origin for time in commits),
        tuple(absences),
        tuple((begin - origin, end - origin) for begin, end in stops),
    )


# ---------------------------------------------------------------------- the simulated one


def simulated(
    scenario: Scenario, absences: Sequence[Absence], seconds: float, *, overhead: bool = False
) -> SimulationResult:
    """What the simulator makes of ``absences`` within ``seconds``; nodes are ranks.

    Each worker dies in the step in which it really died, and as many seconds into it.

    Args:
        scenario: what is trained.
        absences: in the order of the deaths.
        seconds: of simulated time.
        overhead: whether the costs of the runtime are added to those of the operations.
    """
    grid = scenario.grid
    nothing = Transformer(layers=1, width=1, heads=1, sequence=1, vocabulary=1)  # REJOIN includes the copy of the state
    model = MeasuredModel(
        scenario.name,
        nothing,
        grid.pipelines,
        grid.stages,
        global_batch=grid.global_microbatches,
        network_latency=0.0,
        network_bandwidth=1e18,
        stage_costs=_costs(scenario, overhead),
    )
    policy = Recycle(
        split_backward=scenario.split_backward,
        staggered=scenario.staggered,
        normalization=False,
        detection=DETECTION,
        regroup=REGROUP,
        rejoin=REJOIN,
        agreement=0.0,  # both are part of REGROUP
        lookup=0.0,
        connect=0.0,
        checkpoint="memory",
        effort=DEFAULT_EFFORT,
    )

    def result_of(outages: Sequence[Outage]) -> SimulationResult:
        return simulate(model, Cluster.of(model), policy, Scripted(outages), seconds)

    outages: list[Outage] = []
    for absence in absences:
        begun = seconds_for(result_of(outages), model.global_batch * absence.steps)
        died = begun + absence.into_step
        outages.append(Outage(died, (absence.rank,), died + absence.seconds))
    return result_of(outages)


def _costs(scenario: Scenario, overhead: bool) -> Costs:
    """Of the stages, in seconds."""
    costs = profile_of(scenario.slots, scenario.slot).costs()
    if not overhead:
        return costs
    forward, backward_input, backward_weight = (
        tuple(seconds + OPERATION for seconds in part)
        for part in (costs.forward, costs.backward_input, costs.backward_weight)
    )
    if not scenario.split_backward:  # B and W are one operation
        backward_weight = costs.backward_weight
    optimizer = (BETWEEN_STEPS,) * costs.stages
    return Costs(forward, backward_input, backward_weight, costs.reduce, optimizer, MESSAGE)


def seconds_for(result: SimulationResult, samples: float) -> float:
    """When the simulated run has trained ``samples``, undone ones not counted.

    Raises:
        ValueError: when it is over before.
    """
    left = samples
    for interval in result.intervals:
        made = interval.throughput * (interval.end - interval.begin)
        if left <= 0:
            return interval.begin
        if made >= left * (1 - 1e-9):
            return interval.begin + left / interval.throughput
        left -= made
    raise ValueError(f"The simulated run of {result.duration:g} s has {result.samples:g} samples, not {samples:g}.")


# ---------------------------------------------------------------------- both


@dataclass(frozen=True)
class Phase:
    """Steps with the same workers in which nothing happened: their number, and seconds of one, real (the mean; None
    if there was none) and simulated.
    """

    name: str
    steps: int
    real: float | None
    simulated: float


@dataclass(frozen=True)
class Stop:
    """Seconds from a death, or from the last commit before a rejoin, to the next commit; real and simulated."""

    name: str
    real: float
    simulated: float


@dataclass(frozen=True)
class Comparison:
    """One scenario.

    Args:
        name: of the scenario.
        grid: as text, pipelines x stages x micro-batches.
        techniques: the last one that is on.
        slot: seconds.
        samples: of the history.
        steps: of the history.
        real: seconds for them.
        simulated: seconds for as many samples.
        with_overhead: the same with the costs of the runtime.
        load: average of the machine over a minute, when the real run ended.
        absences: as the simulator was told.
        phases: between the stops; none if the two runs differ in their number (when two replacements entered at once).
        stops: one for each failure and each rejoin; none without phases.
    """

    name: str
    grid: str
    techniques: str
    slot: float
    samples: int
    steps: int
    real: float
    simulated: float
    with_overhead: float
    load: float
    absences: tuple[Absence, ...]
    phases: tuple[Phase, ...]
    stops: tuple[Stop, ...]

    @property
    def ratio(self) -> float:
        """Real seconds to simulated ones; above 1 the simulator is too fast."""
        return self.real / self.simulated

    @property
    def within_goal(self) -> bool:
        """Whether the simulator is at most 3 % off."""
        return abs(self.ratio - 1) <= GOAL


def compare(scenario: Scenario, real: RealRun, load: float = 0.0) -> Comparison:
    """Simulates what ``real`` lived through."""
    grid = scenario.grid
    batch = grid.global_microbatches  # one sample per micro-batch
    samples = batch * len(real.commits)
    result, slower = (
        simulated(scenario, real.absences, 2 * real.seconds, overhead=overhead) for overhead in (False, True)
    )
    phases, stops = _phases_and_stops(result, batch)
    if len(stops) != len(real.stops):
        phases, stops = [], []
    return Comparison(
        scenario.name,
        f"{grid.pipelines} x {grid.stages} x {grid.microbatches}",
        scenario.techniques,
        scenario.slot,
        samples,
        len(real.commits),
        real.seconds,
        seconds_for(result, samples),
        seconds_for(slower, samples),
        load,
        real.absences,
        tuple(
            Phase(name, len(steps), sum(steps) / len(steps) if steps else None, seconds)
            for steps, (name, seconds) in zip(real.undisturbed, phases, strict=False)
        ),
        tuple(
            Stop(name, end - begin, seconds) for (begin, end), (name, seconds) in zip(real.stops, stops, strict=False)
        ),
    )


def _phases_and_stops(result: SimulationResult, batch: int) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """(name, seconds of a step) of each phase, (name, seconds to the next commit) of each stop."""
    phases: list[tuple[str, float]] = []
    stops: list[tuple[str, float]] = []
    paused, cause = 0.0, ""
    for interval in result.intervals:
        if interval.state is State.PAUSED:
            paused += interval.end - interval.begin
            cause = cause or ("failure" if interval.label == "detect" else "rejoin")
        elif interval.state is State.TRAINING and (cause or not phases):
            step = batch / interval.throughput
            if cause:
                stops.append((cause, paused + step))
            phases.append((interval.label, step))
            paused, cause = 0.0, ""
    return phases, stops


# ---------------------------------------------------------------------- the tables


def _totals(found: Iterable[Comparison]) -> Table:
    table = Table(title="The whole history; real and simulated, and real / simulated")
    left = ("scenario", "techniques")
    headings = ("slot ms", "steps", "seconds", "samples/s", "ratio", f"goal {GOAL:.0%}", "ratio with overhead")
    for heading in ("scenario", "grid", "techniques", *headings):
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=heading in left)
    for one in found:
        table.add_row(
            one.name,
            one.grid,
            one.techniques,
            f"{1e3 * one.slot:.0f}",
            str(one.steps),
            f"{one.real:.2f}, {one.simulated:.2f}",
            f"{one.samples / one.real:.2f}, {one.samples / one.simulated:.2f}",
            f"{one.ratio:.3f}",
            "met" if one.within_goal else "missed",
            f"{one.real / one.with_overhead:.3f}",
        )
    return table


def _details(found: Iterable[Comparison]) -> Table:
    table = Table(title="By phase: milliseconds of a step, and of each stop until the next commit")
    for heading in ("scenario", "phase", "steps", "real", "simulated", "real / sim."):
        table.add_column(heading, justify="left" if heading in ("scenario", "phase") else "right")
    for one in found:
        if not one.phases:
            table.add_row(one.name, "not the same phases")
            continue
        rows: list[tuple[Phase | Stop, str]] = [(one.phases[0], str(one.phases[0].steps))]
        for stop, phase in zip(one.stops, one.phases[1:], strict=True):
            rows += [(stop, ""), (phase, str(phase.steps))]
        for number, (row, steps) in enumerate(rows):
            table.add_row(
                one.name if number == 0 else "",
                row.name,
                steps,
                "" if row.real is None else f"{1e3 * row.real:.0f}",
                f"{1e3 * row.simulated:.0f}",
                "" if row.real is None else f"{row.real / row.simulated:.3f}",
            )
        table.add_section()
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    names = [scenario.name for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--only", nargs="+", choices=names, metavar="SCENARIO", help=", ".join(names))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    chosen = options.only or (QUICK if options.quick else names)
    found = []
    for scenario in (scenario for scenario in SCENARIOS if scenario.name in chosen):
        real = run(scenario)
        found.append(compare(scenario, real, os.getloadavg()[0]))
    console.print(_totals(found))
    console.print("Techniques: the last one that is on; each goes with those before it.", highlight=False)
    console.print(_details(found))
    loads = ", ".join(f"{one.load:.1f}" for one in found)
    console.print(f"Load averages of a minute after the runs: {loads}.", highlight=False)
    console.print(f"{time.monotonic() - began:.0f} s. {describe_machine()}", highlight=False)
    if options.json is not None:
        data = {"machine": describe_machine(), "scenarios": [{**asdict(one), "ratio": one.ratio} for one in found]}
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
