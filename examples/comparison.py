"""Used by train_gpt.py: what a failure costs, by the same training with and without it, and by a restart.

Four runs of the same model on the same data, one after the other:

- fault-free;
- failure: a worker is lost, its peers take over its micro-batches;
- rejoin: the same, and a new process takes the lost worker's place;
- restart: the same failure for a job without re-routing. It ends with the failure and starts again from its newest
  checkpoint, on a complete grid. To end it, all workers of the lost worker's stage are killed.

Every number is measured in these runs. The restart is measured at its best: the launching process continues, the
replacement is already waiting, and the checkpoint is on a local disk.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from lightning_recycle import ConfigurationError, Event, StageLostError

from hydra_job import build_trainer, find_metrics
from report import read_losses

WHAT_HAPPENS = {
    "failure": "a worker is killed, its peers take over its micro-batches",
    "rejoin": "the same, and a new process takes its place",
    "restart": "a job that ends with the failure and starts again from its newest checkpoint",
}


@dataclass(frozen=True)
class Measured:
    """The costs of a run; times in seconds, None if it did not happen in this run.

    Args:
        name: name of the run.
        workers: number of workers at the end.
        step_before: median duration of a step before the failure (or of all).
        step_after: median duration of a step with the workers of the end.
        redone: steps that were begun and had to be run again.
        stalled: from the failure until the step in which it happened was committed.
        total: from the first commit to the last.
        last_loss: loss of the last step.
    """

    name: str
    workers: int
    step_before: float | None
    step_after: float | None
    redone: int
    stalled: float | None
    total: float
    last_loss: float | None


@dataclass(frozen=True)
class Finished:
    """A run that is over."""

    name: str
    directory: Path
    trainer: L.Trainer
    measured: Measured


def measure(name: str, history: Sequence[Event], losses: Mapping[int, float]) -> Measured:
    """The costs of a run from its history; that of a restarted run is both its histories, one after the other."""
    commits = [event for event in history if event.kind == "step"]
    failure = next((event for event in history if event.kind == "failure"), None)
    rosters = [event for event in history if event.kind == "regrouped"]
    last_generation = max(history.index(event) for event in rosters)
    before = commits if failure is None else [event for event in commits if event.time < failure.time]
    after = [event for event in history[last_generation:] if event.kind == "step"]
    stalled = None
    if failure is not None:
        died = failure.time - (failure.seconds or 0.0)
        caught_up = (e.time - died for e in commits if e.time > failure.time and e.step >= failure.step)
        stalled = next(caught_up, None)
    return Measured(
        name,
        workers=len(rosters[-1].details["roster"]),
        step_before=_median(before[1:]),
        step_after=None if failure is None else _median(after[1:]),
        redone=_redone(history),
        stalled=stalled,
        total=commits[-1].time - commits[0].time,
        last_loss=losses[max(losses)] if losses else None,
    )


def _redone(history: Sequence[Event]) -> int:
    """Steps that were run again, by decision of the survivors or because no checkpoint contained them."""
    redone, next_step = 0, 0
    lost = False
    for event in history:
        if event.kind == "redone":
            redone += 1
        elif event.kind == "stage_lost":
            lost = True
        elif event.kind == "step":
            if lost:  # what was committed since the checkpoint, and the step under way
                redone += next_step - event.step + 1
                lost = False
            next_step = event.step + 1
    return redone


def _median(commits: Sequence[Event]) -> float | None:
    seconds = [event.seconds for event in commits if event.seconds is not None]
    return median(seconds) if seconds else None


# ---------------------------------------------------------------------- the runs


def compare(config: DictConfig, directory: Path, console: Console) -> list[Finished]:
    """Train fault-free and in each way of ``config.compare.runs``, each in a folder of ``directory``.

    Raises:
        ConfigurationError: for unknown runs, another strategy, or faults whose effect cannot be compared.
    """
    runs: dict[str, Callable[[DictConfig, Path], Finished]] = {
        "failure": lambda config, path: _run(config, path, "failure", {}),
        "rejoin": lambda config, path: _run(config, path, "rejoin", {"strategy.recovery.max_restarts": 10}),
        "restart": _restart,
    }
    chosen = list(config.compare.runs)
    if unknown := sorted(set(chosen) - runs.keys()):
        raise ConfigurationError(f"compare.runs names {unknown}: choose some of {', '.join(runs)}.")
    if config.strategy.get("_target_") != "lightning_recycle.ReCycleStrategy":
        raise ConfigurationError("compare is about losing workers: use strategy=recycle, or compare=null.")
    if not config.logger:
        raise ConfigurationError("compare reads the losses that logger=csv writes; use it, or compare=null.")
    by_time = any(config.faults.get(source) for source in ("mtbf", "trace"))
    if by_time or len(config.faults.get("faults") or ()) != 1:
        raise ConfigurationError("compare needs one fault at a known step: use faults=kill_one, or compare=null.")
    console.rule("fault-free: no worker is lost")
    finished = [_run(config, directory / "fault_free", "fault-free", {"faults.faults": []})]
    for name in chosen:
        console.rule(f"{name}: {WHAT_HAPPENS[name]}")
        finished.append(runs[name](config, directory / name))
    return finished


def _run(config: DictConfig, directory: Path, name: str, changes: Mapping[str, Any]) -> Finished:
    config = _changed(config, directory, changes)
    trainer = build_trainer(config)
    trainer.fit(instantiate(config.model), instantiate(config.data))
    measured = measure(name, trainer.strategy.history, read_losses(find_metrics(trainer)))  # type: ignore[attr-defined]
    return Finished(name, directory, trainer, measured)


def _restart(config: DictConfig, directory: Path) -> Finished:
    pipelines = config.trainer.devices // config.strategy.pipeline_parallel_size
    (fault,) = config.faults.faults
    everywhere = [{**fault, "pipeline": pipeline} for pipeline in range(pipelines)]
    changes = {
        "faults.faults": everywhere,
        "trainer.enable_checkpointing": True,
        "strategy.recovery.on_stage_lost": "raise",
    }
    begun = _changed(config, directory / "until_the_failure", changes)
    checkpoints = ModelCheckpoint(
        directory / "checkpoints", "{step}", every_n_train_steps=config.compare.checkpoint_every, save_top_k=-1
    )
    first = build_trainer(begun, [checkpoints])
    try:
        first.fit(instantiate(begun.model), instantiate(begun.data))
    except StageLostError as error:
        history: list[Event] = first.strategy.history  # type: ignore[attr-defined]
        saved = [event.details["path"] for event in history if event.kind == "saved"]
        if not saved:
            raise ConfigurationError(
                f"the failure came before the first checkpoint: use compare.checkpoint_every={fault.step} or less."
            ) from error
    else:
        raise ConfigurationError("the run that is to be restarted did not end: choose a step before trainer.max_steps.")
    again = _changed(config, directory / "after_the_restart", {"faults.faults": []})
    second = build_trainer(again)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint.*")  # this run writes none
        second.fit(instantiate(again.model), instantiate(again.data), ckpt_path=saved[-1])
    losses = {**read_losses(find_metrics(first)), **read_losses(find_metrics(second))}
    measured = measure("restart", [*history, *second.strategy.history], losses)  # type: ignore[attr-defined]
    return Finished("restart", directory, second, measured)


def _changed(config: DictConfig, directory: Path, changes: Mapping[str, Any]) -> DictConfig:
    changed = config.copy()
    for key, value in {**changes, "output_dir": str(directory)}.items():
        OmegaConf.update(changed, key, value)
    return changed


# ---------------------------------------------------------------------- the table


def render_comparison(runs: Sequence[Measured]) -> Table:
    """A column for each run; the first is what the others are compared with."""
    reference = runs[0]

    def ratio(run: Measured) -> str:
        return "" if run is reference else f"x {run.total / reference.total:.2f}"

    def difference(run: Measured) -> str:
        if run is reference or run.last_loss is None or reference.last_loss is None:
            return ""
        return f"{abs(run.last_loss - reference.last_loss):.1e}"

    rows: dict[str, Callable[[Measured], str]] = {
        "workers at the end": lambda run: str(run.workers),
        "step before the failure, median": lambda run: _shown(run.step_before, 1e3, ".0f", " ms"),
        "step at the end, median": lambda run: _shown(run.step_after, 1e3, ".0f", " ms"),
        "steps run again": lambda run: str(run.redone),
        "failure until its step is committed": lambda run: _shown(run.stalled, 1.0, ".2f", " s"),
        "first to last commit": lambda run: f"{run.total:.1f} s",
        "  against the first column": ratio,
        "last loss": lambda run: _shown(run.last_loss, 1.0, ".5f", ""),
        "  difference from the first column": difference,
    }
    table = Table("", title="What the failure costs")
    for run in runs:
        table.add_column(run.name, justify="right", no_wrap=True)
    for name, show in rows.items():
        table.add_row(name, *(show(run) for run in runs))
    if any(run.name == "restart" for run in runs):
        table.caption = "restart: from the newest checkpoint, on workers that need not be waited for"
    return table


def _shown(value: float | None, factor: float, format_spec: str, unit: str) -> str:
    return "-" if value is None else f"{value * factor:{format_spec}}{unit}"
