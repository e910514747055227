"""Runs one scenario with real processes and checks everything that it promises."""

import contextlib
import logging
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from support.process_tree import descendants, left_after_a_while, orphans
from support.training import TOLERANCE
from support.training import difference as distance

from chaos.diary import Diary, audit, read_entries
from chaos.disturbance import LateFaults, Pace
from chaos.scenario import GLOBAL_MICROBATCHES, STEPS, Scenario
from chaos.training import GLOBAL_BATCH, SAMPLES, ChaosModel, loader, quiet_trainer, reference
from lightning_recycle.callbacks import FaultInjectionCallback, HeartbeatCallback
from lightning_recycle.control.history import Event
from lightning_recycle.errors import StageLostError

__all__ = ["TOLERANCE", "Result", "run_scenario"]

log = logging.getLogger(__name__)

LIMIT_SECONDS = 120.0
"""More than any scenario takes on a busy machine: one that takes longer hangs."""

_HEARTBEAT = {"interval": 0.25, "timeout": 2.0}
_PACE_SECONDS = 0.15
_MARK = "LIGHTNING_RECYCLE_CHAOS"


@dataclass(frozen=True)
class Result:
    """How a scenario went.

    Args:
        scenario: the scenario that was run.
        problems: the broken promises, if any.
        seconds: how long it took.
        difference: the largest difference of any weight; None if the scenario had to end in an error.
        events: the number of events of each kind.
    """

    scenario: Scenario
    problems: tuple[str, ...]
    seconds: float
    difference: float | None
    events: dict[str, int]


class _TooLong(Exception):
    """The scenario did not end in time."""


def run_scenario(scenario: Scenario, limit: float = LIMIT_SECONDS) -> Result:
    """Runs ``scenario``; to be called in the main thread, which is interrupted after ``limit`` seconds."""
    mark = _MARK, str(os.getpid())
    os.environ.setdefault(*mark)
    expected = reference(scenario.dropout, scenario.clips)
    before = {**descendants(), **orphans(*mark)}
    started = time.monotonic()
    problems: list[str] = []
    difference: float | None = None
    with tempfile.TemporaryDirectory(prefix="recycle-chaos-") as directory:
        model = ChaosModel(scenario.dropout)
        trainer = _trainer(scenario, Path(directory))
        ended = "as it should"
        try:
            with _bounded(limit):
                trainer.fit(model, loader(scenario.pipelines, scenario.loader_processes))
        except StageLostError as error:
            ended = "in the loss of a stage" if scenario.must_end_in_an_error else f"in {error}"
        except Exception as error:  # whatever it is, it is reported, and the next scenario runs
            ended = f"in {type(error).__name__}: {error}"
            log.warning("Scenario %d ended in an error", scenario.seed, exc_info=True)
        if ended == "as it should" and not scenario.must_end_in_an_error:
            found = model.state_dict()
            difference = distance(found, expected)
            if not difference < TOLERANCE:
                problems.append(f"the weights differ by {difference:g}")
            if trainer.global_step != STEPS:
                problems.append(f"it ended at step {trainer.global_step}")
            entries = read_entries(Path(directory))
            problems += audit(entries, scenario.stages, STEPS, GLOBAL_MICROBATCHES, SAMPLES, GLOBAL_BATCH)
        elif ended != "in the loss of a stage":
            problems.append(f"it ended {ended}" + (", not in an error" if scenario.must_end_in_an_error else ""))
    left = left_after_a_while(before, *mark, orphans_before=before)
    problems += [f"a process is left: {pid} {command}" for pid, command in left.items()]
    history: Sequence[Event] = trainer.strategy.history  # type: ignore[attr-defined]
    events = dict(Counter(event.kind for event in history))
    return Result(scenario, tuple(problems), time.monotonic() - started, difference, events)


def _trainer(scenario: Scenario, directory: Path) -> L.Trainer:
    callbacks: list[Any] = [
        HeartbeatCallback(**_HEARTBEAT),
        Diary(directory),
        FaultInjectionCallback(scenario.faults),
        LateFaults(scenario.late_faults),
    ]
    if scenario.restart_workers or scenario.normalize:
        callbacks.append(Pace(_PACE_SECONDS))
    if scenario.checkpoint_every:
        callbacks.append(
            ModelCheckpoint(directory / "checkpoints", every_n_train_steps=scenario.checkpoint_every, save_top_k=-1)
        )
    names = ("staggered", "decoupled", "shadow", "restart_workers", "normalize", "on_stage_lost")
    strategy = {name: getattr(scenario, name) for name in names}
    return quiet_trainer(
        scenario.pipelines,
        scenario.stages,
        strategy,
        scenario.clips,
        callbacks=callbacks,
        enable_checkpointing=bool(scenario.checkpoint_every),
    )


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Raises in the main thread after ``seconds``."""

    def stop(*_: Any) -> NoReturn:
        raise _TooLong(f"it was not over after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
