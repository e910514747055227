"""Runs one scenario with real processes and checks everything that it promises."""

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from support.process_tree import descendants, left_after_a_while, orphans
from support.training import difference as distance

from chaos import stranger, training
from chaos.crowd import AwaitCrowd, crowded
from chaos.diary import Diary, audit, read_entries
from chaos.disturbance import LateFaults, Pace
from chaos.reference import reference
from chaos.scenario import GLOBAL_BATCH, GLOBAL_MICROBATCHES, SAMPLES, Scenario
from chaos.state import CHECKPOINTS, collect, compare, missing_checkpoints, rows_of, without_starts
from chaos.trouble import Troubles, clear
from chaos.workplace import Workplace
from lightning_recycle.callbacks import FaultInjectionCallback, HeartbeatCallback
from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.errors import StageLostError

log = logging.getLogger(__name__)

LIMIT_SECONDS = 120.0
"""A scenario in which nothing happens for so long hangs. A busy machine slows down what happens."""

_MOST_LIMITS = 10  # of such times, however much happens: what is repeated forever is not a progress either

_HEARTBEAT_INTERVAL = 0.2  # seconds
_PACE_SECONDS = 0.15
_MARK = "LIGHTNING_RECYCLE_CHAOS"
_CROWD = "crowd"
_SHOWN_DIFFERENCES = 6
_AS_IT_SHOULD = "as it should"
_IN_THE_LOSS = "in the loss of a stage"


@dataclass(frozen=True)
class Result:
    """How a scenario went; ``difference``: of weights, None if it ends in an error."""

    seed: int
    problems: tuple[str, ...]
    seconds: float
    difference: float | None
    events: dict[str, int]


class _TooLong(BaseException):
    """The scenario did not end in time; not an Exception, which might be handled where it is raised."""


@dataclass
class _Run:
    """One scenario's way through this module."""

    scenario: Scenario
    directory: Path
    checkpoints: Path
    disks: dict[str, Path]
    model: training.ChaosModel
    trainer: L.Trainer
    joins: list[str] = field(default_factory=list)  # what is wrong with workers that joined
    rows: list[dict[str, float]] = field(default_factory=list)  # of a training that a signal ended


def run_scenario(scenario: Scenario, place: Workplace, limit: float = LIMIT_SECONDS) -> Result:
    """Runs ``scenario``; to be called in the main thread, which is interrupted once nothing has happened for
    ``limit`` seconds.
    """
    mark = _MARK, str(os.getpid())
    os.environ.setdefault(*mark)
    before = {**descendants(), **orphans(*mark)}
    in_tmpdir = place.in_tmpdir()
    difference: float | None = None
    directory = place.runs / str(scenario.seed)
    directory.mkdir()
    with _float64():
        reference(scenario.recipe)  # its time is not the scenario's
        started = time.monotonic()
        run = _prepare(scenario, place, directory)
        ended = _fit(run, limit)
        if scenario.family == "signals" and ended.startswith("in SystemExit"):
            saved = next(directory.glob("hpc_ckpt_*.ckpt"), None)
            ended = f"{ended}, and saved nothing" if saved is None else _resume(run, limit)
        problems = _what_is_wrong(run, ended)
        if ended == _AS_IT_SHOULD:
            difference = distance(run.model.state_dict(), reference(scenario.recipe)["weights"])
    left = left_after_a_while(before, *mark, orphans_before=before)
    problems += [f"a process is left: {pid} {command}" for pid, command in left.items()]
    for folder in run.disks.values():
        clear(folder)
    forgotten = place.in_tmpdir() - in_tmpdir
    if scenario.family == "killed-loaders":
        forgotten -= _of_torch(forgotten, place.tmpdir)
    problems += [f"left in TMPDIR: {name}" for name in sorted(forgotten)]
    shutil.rmtree(directory)
    for folder in (place.tmpdir, *([place.disk] if place.disk else [])):
        _empty(folder)
    history: Sequence[Event] = run.trainer.strategy.history
    events = dict(Counter(event.kind for event in history))
    return Result(scenario.seed, tuple(problems), time.monotonic() - started, difference, events)


def _of_torch(names: Iterable[str], tmpdir: Path) -> set[str]:
    """The files that torch left. When a DataLoader loses a process it opens ten temporary ones, to see whether there
    are descriptors (``_try_get_data``), and its own handler of SIGCHLD may raise between two lines of that.
    """
    return {name for name in names if re.fullmatch(r"tmp\w{8}", name) and not (tmpdir / name).stat().st_size}


def _prepare(scenario: Scenario, place: Workplace, directory: Path) -> _Run:
    disks = {"fill-tmpdir": place.tmpdir}
    checkpoints = directory / CHECKPOINTS
    if scenario.family == "full-disk":
        assert place.disk is not None, "this family needs a small disk"
        disks["fill-disk"] = place.disk
        checkpoints = place.disk / CHECKPOINTS
    model = training.make_model(scenario.recipe)
    return _Run(scenario, directory, checkpoints, disks, model, _trainer(scenario, directory, checkpoints, disks))


def _trainer(scenario: Scenario, directory: Path, checkpoints: Path, disks: dict[str, Path]) -> L.Trainer:
    options = training.trainer_options(scenario.recipe, directory, checkpoints)
    happens: list[Any] = [
        HeartbeatCallback(_HEARTBEAT_INTERVAL, scenario.heartbeat_timeout),
        Diary(directory / "diary"),
        FaultInjectionCallback((*scenario.faults, *scenario.flips)),
        LateFaults(scenario.late_faults),
        Troubles(scenario.troubles, disks),
    ]
    if scenario.crowds:
        happens.append(AwaitCrowd(scenario.crowds, directory / _CROWD))
    elif scenario.restart_workers:
        happens.append(Pace(_PACE_SECONDS))
    if scenario.moves:
        happens.append(training.LayersMove(scenario.moves))
    options["callbacks"] = [*happens, *options["callbacks"]]
    strategy: dict[str, Any] = {
        "staggered": scenario.staggered,
        "split_backward": scenario.split_backward,
        "shadow": scenario.shadow,
        "max_restarts": 10 * scenario.members if scenario.restart_workers else 0,
        "on_stage_lost": scenario.on_stage_lost,
        "verify": scenario.verify,
        "background": False,  # then a kill changes neither the names of checkpoints nor what callbacks remember
    }
    if scenario.family == "signals":
        strategy["save_on_signal"] = True
    if scenario.lanes:
        numbers = scenario.pipelines, scenario.begins, scenario.lanes
        strategy |= dict(zip(("num_pipelines", "min_pipelines", "max_pipelines"), numbers, strict=True))
    return training.grid_trainer(
        scenario.pipelines, scenario.stages, strategy, options, scenario.members, scenario.begins
    )


def _join(scenario: Scenario, directory: Path, checkpoints: Path) -> None:
    """Body of a further process that takes part in the run of ``scenario``."""
    with _float64():
        trainer = _trainer(scenario, directory, checkpoints, {})
        loader, validation = (
            training.training_loader(scenario.pipelines),
            training.validation_loader(scenario.recipe, scenario.pipelines),
        )
        trainer.fit(training.make_model(scenario.recipe), loader, validation)


def _resume(run: _Run, limit: float) -> str:
    """Whoever starts the same script again after a signal has a new Trainer; nothing more happens to it."""
    run.rows = rows_of(run.directory)
    run.model = training.make_model(run.scenario.recipe)
    calm = replace(run.scenario, faults=(), flips=(), late_faults=(), troubles=())
    run.trainer = _trainer(calm, run.directory, run.checkpoints, run.disks)
    return _fit(run, limit, "hpc")


def _fit(run: _Run, limit: float, checkpoint: str | None = None) -> str:
    """Trains, and says how that ended."""
    scenario = run.scenario
    loader = training.training_loader(scenario.pipelines, scenario.loader_processes)
    join = partial(_join, scenario, run.directory, run.checkpoints)
    try:
        with (
            _bounded(limit, run.directory),
            _strangers(scenario),
            crowded(scenario.crowds, run.directory / _CROWD, join) as run.joins,
        ):
            validation = training.validation_loader(scenario.recipe, scenario.pipelines)
            run.trainer.fit(run.model, loader, validation, ckpt_path=checkpoint, weights_only=False)
    except StageLostError as error:
        return _IN_THE_LOSS if scenario.must_end_in_an_error else f"in {error}"
    except (Exception, SystemExit, _TooLong) as error:  # whatever it is, it is reported, and the next scenario runs
        log.warning("Scenario %d ended in an error", scenario.seed, exc_info=True)
        return f"in {type(error).__name__}: {error}"
    return _AS_IT_SHOULD


def _what_is_wrong(run: _Run, ended: str) -> list[str]:
    scenario, recipe = run.scenario, run.scenario.recipe
    if scenario.must_end_in_an_error:
        return [] if ended == _IN_THE_LOSS else [f"it ended {ended}, not {_IN_THE_LOSS}"]
    if ended != _AS_IT_SHOULD:
        return [f"it ended {ended}"]
    found = collect(run.trainer, run.model, run.directory, run.checkpoints)
    found["rows"] = [*run.rows, *found["rows"]]
    expected = reference(recipe)
    if scenario.family == "signals":  # a second call of fit
        found, expected = without_starts(found), without_starts(expected)
    fills = [trouble for trouble in scenario.troubles if trouble.kind == "fill-disk"]
    problems = run.joins + list(compare(found, expected, scenario.starts_again, saves_everything=not fills))
    for fill in fills:
        problems += missing_checkpoints(
            run.checkpoints, expected["files"], range(fill.step, fill.step + fill.steps + 2)
        )
    if len(problems) > _SHOWN_DIFFERENCES:
        problems[_SHOWN_DIFFERENCES:] = [f"and {len(problems) - _SHOWN_DIFFERENCES} more differences"]
    entries = read_entries(run.directory / "diary")
    numbers = recipe.steps, GLOBAL_MICROBATCHES, SAMPLES, GLOBAL_BATCH
    return problems + audit(entries, scenario.stages, *numbers, scenario.members)


@contextlib.contextmanager
def _float64() -> Iterator[None]:
    """What is logged, and what torchmetrics add up, is as exact as the weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _strangers(scenario: Scenario) -> Iterator[None]:
    """While the block runs a stranger bothers this process and all below it, if the scenario has one."""
    if not scenario.strangers:
        yield
        return
    command = [sys.executable, stranger.__file__, str(os.getpid()), str(scenario.seed)]
    with subprocess.Popen(command) as process:
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def _bounded(seconds: float, directory: Path) -> Iterator[None]:
    """Raises in the main thread once nothing has been written below ``directory`` for ``seconds``; each worker writes
    when it begins to train, and in each step.
    """
    looks, written = 0, _written(directory)

    def look(*_: Any) -> None:
        nonlocal looks, written
        earlier, written, looks = written, _written(directory), looks + 1
        if written == earlier or looks == _MOST_LIMITS:
            still = f", and nothing had happened for {seconds:g} s" if written == earlier else ""
            raise _TooLong(f"it was not over after {looks * seconds:g} s{still}")

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _written(directory: Path) -> int:
    """The bytes of all files below ``directory``."""
    size = 0
    for at, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # it has just been renamed
                size += os.path.getsize(os.path.join(at, name))
    return size


def _empty(folder: Path) -> None:
    """Removes all that is in ``folder``."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
