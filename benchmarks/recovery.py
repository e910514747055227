"""Fast to recover: what a failure costs until the next committed step, and what a change of the roster costs.

    .venv/bin/python benchmarks/recovery.py            # ten runs of each scenario, about four minutes
    .venv/bin/python benchmarks/recovery.py --quick    # two runs of each with the smallest model, one or two minutes
    .venv/bin/python benchmarks/recovery.py --torchft TORCHFT/bin/python   # and torchft beside, ten minutes more

Each measurement is a run of its own of the example GPT on 2 x 2 workers: at a seeded random step and point of the
schedule a random worker fails. The failures:

- kill: SIGKILL. Goal: the time of one redone step plus 250 ms.
- hang: SIGSTOP, with ``HeartbeatCallback(interval=0.1, timeout=1)``. Goal: 1 s, one redone step and 500 ms.
- deadlock: the main thread blocks in Python while the heartbeats go on, with the same callback. It must be found; the
  time is shown against the goal of hang.

Their time is from the failure itself, as the failing worker saw it, to the next commit. The parts are read from
``trainer.strategy.history``: detect, until the coordinator declares the worker dead; agree, until all survivors have
stopped and reported, and the decision and the new plan are made; regroup, until all survivors are connected anew; redo,
until the step is committed. The redone step is the median of those that the survivors make later in the same run.
Where a step survived the failure because all its gradients were reduced already (it is rolled forward), the next step
that runs counts.

Two changes of the roster redo nothing; they make the others wait:

- rejoin: a worker is killed, with ``max_restarts=10``; its replacement enters while the survivors train. Goal: the
  survivors wait for the transfer of one stage's state plus 250 ms at most (judged as if the transfer took no time).
- preempt: SIGTERM: the worker leaves at the step boundary. No goal.

Their stall is the longest time from commit to commit around the entry (two steps before the pause to two after it)
minus the median step, of before or after, whichever is shorter.

``--torchft`` is the interpreter of a virtual environment with torchft, see ``torchft_recovery.py``: two CPU replicas
over Gloo, in the same run. Every run ends within three minutes; one that does not, or that loses a whole stage because
the machine kept healthy workers silent for a second, is reported and repeated up to three times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
from harness import Spread, console, describe_machine, fit, step_seconds
from overhead import MICROBATCHES, PIPELINES, SIZES, STAGES, Size
from rich.table import Table
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_recycle import RecoveryOptions, ReCycleStrategy, StageLostError
from lightning_recycle.callbacks import Fault, FaultInjectionCallback, HeartbeatCallback
from lightning_recycle.control.monitoring.history import Event

SEED = 20_261_120
FIRST_STEP, LAST_STEP, STEPS_AFTER = 6, 12, 10
TIMEOUT = 1.0  # seconds, of the heartbeat in the scenarios that need one
GOALS = {"kill": 0.250, "hang": TIMEOUT + 0.500, "deadlock": TIMEOUT + 0.500}  # seconds beyond one redone step
STALL_GOAL = 0.250  # seconds, and the transfer
FAILURES = ("kill", "hang", "deadlock")
SCENARIOS = (*FAILURES, "rejoin", "preempt")
RUN_LIMIT = 180  # seconds
ATTEMPTS = 3

_T = TypeVar("_T")


# ---------------------------------------------------------------------- failures


@dataclass(frozen=True)
class Recovery:
    """One failure; all in seconds.

    Args:
        fault: what was injected.
        detect: time to declare the worker dead; a part of the total, like the next three.
        agree: time to agree, planning included.
        regroup: time to connect anew.
        redo: time to commit the redone step.
        step_before: median step before the failure.
        step_after: median step of the survivors.
        rolled_forward: whether the step that was under way did not have to be redone.
    """

    fault: Fault
    detect: float
    agree: float
    regroup: float
    redo: float
    step_before: float
    step_after: float
    rolled_forward: bool

    @property
    def total(self) -> float:
        """From the failure to the next committed step."""
        return self.detect + self.agree + self.regroup + self.redo

    @property
    def beyond_step(self) -> float:
        """The total without the time of one step of the survivors."""
        return self.total - self.step_after


def random_fault(draw: random.Random, kind: str = "kill") -> Fault:
    """A failure of a random worker at a random step, operation and micro-batch."""
    at = draw.choice(("forward", "backward_input", "backward_weight", "reduce", "optimizer"))
    return Fault(
        kind,
        pipeline=draw.randrange(PIPELINES),
        stage=draw.randrange(STAGES),
        step=draw.randint(FIRST_STEP, LAST_STEP),
        at=at,
        microbatch=draw.randrange(MICROBATCHES) if at not in ("reduce", "optimizer") else None,
    )


def run(size: Size, fault: Fault) -> Recovery:
    """Trains until some steps after ``fault``."""
    trainer = _train(size, fault, fault.step + 1 + STEPS_AFTER)
    before = step_seconds(trainer, 2, fault.step)
    after = step_seconds(trainer, fault.step + 3)
    return read_recovery(trainer.strategy.history, fault, statistics.median(before), statistics.median(after))


def _train(
    size: Size, fault: Fault, steps: int, callbacks: Sequence[L.Callback] = (), max_restarts: int = 0
) -> L.Trainer:
    strategy = ReCycleStrategy(STAGES, MICROBATCHES, recovery=RecoveryOptions(max_restarts=max_restarts))
    extra: list[L.Callback] = [FaultInjectionCallback([fault]), *callbacks]
    if fault.kind in ("hang", "deadlock"):
        extra.append(HeartbeatCallback(interval=TIMEOUT / 10, timeout=TIMEOUT))
    loader = DataLoader(_Repeated(size, steps), batch_size=size.batch_size)
    return fit(size.build(), loader, strategy, devices=PIPELINES * STAGES, steps=steps, callbacks=extra)


class _Repeated(Dataset):
    """The data of ``steps`` steps, of which only a few are different."""

    def __init__(self, size: Size, steps: int) -> None:
        self._data = TensorDataset(*size.data(min(steps, 32)))
        self._length = steps * PIPELINES * size.batch_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._data[index % len(self._data)]


def read_recovery(history: Sequence[Event], fault: Fault, step_before: float, step_after: float) -> Recovery:
    """Takes the parts of the recovery from ``fault`` in ``history``."""
    failed = (fault.pipeline, fault.stage)
    failure = next(event for event in history if event.kind == "failure" and event.worker == failed)
    assert failure.seconds is not None
    later = history[history.index(failure) :]
    resumed, regrouped = (next(e for e in later if e.kind == kind) for kind in ("resumed", "regrouped"))
    connected = later.index(regrouped)
    rolled_forward = any(e.kind == "step" for e in later[:connected])
    committed = next(e for e in later[connected:] if e.kind == "step")
    return Recovery(
        fault,
        failure.seconds,
        resumed.time - failure.time,
        regrouped.time - resumed.time,
        committed.time - regrouped.time,
        step_before,
        step_after,
        rolled_forward,
    )


# ---------------------------------------------------------------------- changes of the roster at a step boundary


@dataclass(frozen=True)
class Stall:
    """One worker that entered or left at a step boundary; all in seconds.

    Args:
        fault: what was injected.
        longest: the longest time from commit to commit around the change.
        step: the shorter of the medians before and after.
        connected: from the pause of all until all were connected anew.
        transfer: from then on until the newcomer had its state, as the history tells it ("rejoined").
        starting: of a newcomer, from the failure to the pause: its start, while the survivors train.
        redone: steps that were redone after the pause; 0 is right.
    """

    fault: Fault
    longest: float
    step: float
    connected: float
    transfer: float
    starting: float
    redone: int

    @property
    def stall(self) -> float:
        """What the survivors waited."""
        return self.longest - self.step


def run_until_rejoined(size: Size, fault: Fault) -> Stall:
    """Trains until some steps after the replacement of the worker that ``fault`` kills has entered."""
    most = 6000 if size is SIZES[0] else 1200  # about two minutes: a replacement that does not come is an error
    trainer = _train(size, fault, most, callbacks=[_EndAfterRejoining(STEPS_AFTER)], max_restarts=10)
    if not any(event.kind == "rejoined" for event in trainer.strategy.history):
        raise RuntimeError(f"No replacement entered within {most} steps after {fault}.")
    return read_stall(trainer.strategy.history, fault)


class _EndAfterRejoining(L.Callback):
    """Ends the training ``steps`` steps after a replacement has entered, on all workers at the same one."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._entered: int | None = None

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self._entered is None and trainer.strategy.counters.get("rejoined_workers"):
            self._entered = trainer.global_step
        if self._entered is not None and trainer.global_step >= self._entered + self._steps:
            trainer.should_stop = True


def run_preemption(size: Size, fault: Fault) -> Stall:
    """Trains until some steps after the worker that ``fault`` preempts has left."""
    return read_stall(_train(size, fault, fault.step + 1 + STEPS_AFTER).strategy.history, fault)


def read_stall(history: Sequence[Event], fault: Fault) -> Stall:
    """Takes the first change of the roster at a step boundary from ``history``; plans change at boundaries, too."""
    changed = next(index for index, event in enumerate(history) if event.kind in ("rejoined", "left"))
    paused = max(index for index, event in enumerate(history[:changed]) if event.kind == "paused")
    connected = next(i for i, event in enumerate(history) if event.kind == "regrouped" and i > paused)
    rejoined = next((event for event in history[paused:] if event.kind == "rejoined"), None)
    failure = next((event for event in history if event.kind == "failure"), None)
    before, after = (
        [event.seconds for event in part if event.kind == "step" and event.seconds is not None]
        for part in (history[:paused], history[paused:])
    )
    started = 0.0 if failure is None else failure.time - (failure.seconds or 0.0)
    return Stall(
        fault,
        max(before[-2:] + after[:2]),
        min(statistics.median(before[-8:-2]), statistics.median(after[2:])),
        history[connected].time - history[paused].time,
        0.0 if rejoined is None else rejoined.time - history[connected].time,
        history[paused].time - started if rejoined is not None else 0.0,
        sum(event.kind == "redone" for event in history[paused:]),
    )


# ---------------------------------------------------------------------- all runs


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Ends the block with TimeoutError after ``seconds``; main thread only."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"A run did not end within {seconds} s.")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def bounded(function: Callable[[Size, Fault], _T], size: Size, fault: Fault) -> _T:
    """A run, repeated if it cannot be read; raises what the last one raised."""
    for attempt in range(ATTEMPTS):
        try:
            with _limit(RUN_LIMIT):
                return function(size, fault)
        except (TimeoutError, StageLostError, StopIteration, ValueError, RuntimeError) as error:
            console.print(f"{fault}, attempt {attempt + 1}: {type(error).__name__}: {error}", highlight=False)
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _failures_table(recoveries: dict[str, list[Recovery]], title: str) -> Table:
    table = Table(title=f"{title}; medians in milliseconds")
    headings = ("failure", "runs", "detect", "agree", "regroup", "redo", "total (range)", "a step", "beyond it (range)")
    for heading in (*headings, "goal"):
        table.add_column(heading, justify="left" if heading in ("failure", "goal") else "right")
    for kind, found in recoveries.items():
        parts = (
            [r.detect for r in found],
            [r.agree for r in found],
            [r.regroup for r in found],
            [r.redo for r in found],
        )
        beyond = Spread.of(r.beyond_step for r in found)
        table.add_row(
            kind,
            str(len(found)),
            *(f"{1e3 * statistics.median(values):.0f}" for values in parts),
            Spread.of(r.total for r in found).milliseconds(0),
            f"{1e3 * statistics.median(r.step_after for r in found):.0f}",
            beyond.milliseconds(0),
            _goal(beyond.median, GOALS[kind]) if kind != "deadlock" else f"{len(found)} of {len(found)} found",
        )
    return table


def _stalls_table(stalls: dict[str, list[Stall]], title: str) -> Table:
    table = Table(title=f"{title}; medians in milliseconds")
    headings = ("change", "runs", "starting", "longest interval", "a step", "stall (range)", "connected", "state")
    for heading in (*headings, "redone", "goal"):
        table.add_column(heading, justify="left" if heading in ("change", "goal") else "right")
    for kind, found in stalls.items():
        stall = Spread.of(s.stall for s in found)
        table.add_row(
            kind,
            str(len(found)),
            f"{1e3 * statistics.median(s.starting for s in found):.0f}" if kind == "rejoin" else "",
            f"{1e3 * statistics.median(s.longest for s in found):.0f}",
            f"{1e3 * statistics.median(s.step for s in found):.0f}",
            stall.milliseconds(0),
            f"{1e3 * statistics.median(s.connected for s in found):.0f}",
            f"{1e3 * statistics.median(s.transfer for s in found):.0f}" if kind == "rejoin" else "",
            str(sum(s.redone for s in found)),
            _goal(stall.median, STALL_GOAL) if kind == "rejoin" else "",
        )
    return table


def _goal(seconds: float, goal: float) -> str:
    return f"{1e3 * goal:.0f}: {'met' if seconds <= goal else 'missed'}"


def _details(recoveries: Iterable[Recovery]) -> Table:
    table = Table(title="Each run; milliseconds")
    for heading in ("failure", "step, at", "detect", "agree", "regroup", "redo", "total", "a step then", "beyond it"):
        table.add_column(heading, justify="left" if heading in ("failure", "step, at") else "right")
    for recovery in recoveries:
        fault = recovery.fault
        where = f"{fault.step}, {fault.at}" + ("" if fault.microbatch is None else f" {fault.microbatch}")
        parts = (recovery.detect, recovery.agree, recovery.regroup, recovery.redo, recovery.total)
        table.add_row(
            f"{fault.kind} ({fault.pipeline}, {fault.stage})",
            where + (" (rolled forward)" if recovery.rolled_forward else ""),
            *(f"{1e3 * value:.0f}" for value in (*parts, recovery.step_after, recovery.beyond_step)),
        )
    return table


# ---------------------------------------------------------------------- torchft


def _run_torchft(interpreter: str, quick: bool, runs: int, seed: int) -> list[dict[str, Any]]:
    """All runs of ``torchft_recovery.py``, which bounds each of them."""
    script = Path(__file__).with_name("torchft_recovery.py")
    command = [interpreter, str(script), "--json", "--repeats", str(runs), "--seed", str(seed)]
    if quick:
        command.append("--quick")
    found = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        stdout, stderr = process.communicate()
    for line in stdout.splitlines():
        if line.startswith("{"):
            found.append(json.loads(line))
    if process.returncode:
        console.print(f"torchft ended with {process.returncode}: {stderr[-1000:]}", highlight=False)
    return found


def _torchft_table(found: Sequence[dict[str, Any]], ours: dict[str, list[Recovery]]) -> Table:
    table = Table(title=f"torchft-nightly {found[0]['version']}, two replicas; seconds to the survivor's next commit")
    for heading in ("failure", "setting", "runs", "median (min to max)", "a step before", "ours, median", "ratio"):
        table.add_column(heading, justify="left" if heading in ("failure", "setting") else "right")
    for fault, setting in dict.fromkeys((line["fault"], line["setting"]) for line in found):
        lines = [line for line in found if (line["fault"], line["setting"]) == (fault, setting)]
        times = [line["seconds"] for line in lines if line["seconds"] is not None]
        mine = statistics.median(r.total for r in ours[fault]) if fault in ours else None
        median = statistics.median(times) if len(times) == len(lines) else None
        shown = f"not within {lines[0]['limit']:g} s ({len(lines) - len(times)} of {len(lines)})"
        if median is not None:
            shown = f"{median:.2f} ({min(times):.2f} to {max(times):.2f})"
        least = lines[0]["limit"] if median is None else median
        table.add_row(
            fault,
            setting,
            str(len(lines)),
            shown,
            f"{statistics.median(line['step'] for line in lines):.3f}",
            "" if mine is None else f"{mine:.2f}",
            "" if mine is None else f"{'> ' if median is None else ''}{least / mine:.1f}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two runs of each with the smallest model")
    parser.add_argument("--runs", type=int, default=10, help="of each scenario")
    parser.add_argument("--scenarios", nargs="*", default=SCENARIOS, choices=SCENARIOS, help="which of them")
    parser.add_argument("--seed", type=int, default=SEED, help="of the faults")
    parser.add_argument("--torchft", metavar="PYTHON", help="interpreter with torchft, to measure it in the same run")
    parser.add_argument("--details", action="store_true", help="also show each run")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    size, runs = (SIZES[0], 2) if options.quick else (SIZES[1], options.runs)
    draw = random.Random(options.seed)
    recoveries: dict[str, list[Recovery]] = {}
    stalls: dict[str, list[Stall]] = {}
    # In turns, so that all scenarios meet the same load of a shared machine.
    for _ in range(runs):
        for scenario in options.scenarios:
            if scenario in FAILURES:
                fault = random_fault(draw, scenario)
                recoveries.setdefault(scenario, []).append(bounded(run, size, fault))
            else:
                fault = random_fault(draw, "kill" if scenario == "rejoin" else scenario)
                function = run_until_rejoined if scenario == "rejoin" else run_preemption
                stalls.setdefault(scenario, []).append(bounded(function, size, fault))

    title = f"{size.name} GPT, {PIPELINES} x {STAGES} workers"
    if options.details and recoveries:
        console.print(_details(recovery for found in recoveries.values() for recovery in found))
    if recoveries:
        console.print(_failures_table(recoveries, title))
    if stalls:
        console.print(_stalls_table(stalls, title))
    if options.torchft is not None:
        found = _run_torchft(options.torchft, options.quick, runs, options.seed)
        if found:
            console.print(_torchft_table(found, recoveries))
            console.print("Ratio: torchft's median to ours. Settings: see torchft_recovery.py.", highlight=False)
    console.print(f"{time.monotonic() - began:.0f} s. {describe_machine()}", highlight=False)


if __name__ == "__main__":
    main()
