"""All that a training leaves: what must be the same, whatever happened meanwhile.

Concept: the weights are not enough. A run whose epoch lost some logged values has the right weights until a scheduler
decides from them. So the state at the end is everything that somebody may decide from or read afterwards: optimizers,
schedulers, learning rates, counters, metrics of every epoch, rows of the logger, states of callbacks, how often each
hook was called, the names of the checkpoints; in the launching process, in a last checkpoint, and as each worker that
reached the end saw it.
"""

import csv
import os
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from support.comparison import differences
from support.training import TOLERANCE
from typing_extensions import override

State = dict[str, Any]
"""What a training left, by name of the part."""

CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints that callbacks write."""

_FINAL = "final.ckpt"
WORKERS = "workers"
"""The folder in which each worker wrote what it held."""

_ONCE_PER_PROCESS = ("setup", "teardown", "on_fit_start", "on_fit_end", "on_exception")
_ON_DEMAND = ("on_save_checkpoint", "on_load_checkpoint")
_COUNTED = [name for name in dir(Callback) if name.startswith("on_") and name not in (*_ONCE_PER_PROCESS, *_ON_DEMAND)]


class Tally(pl.Callback):
    """Counts the calls of each hook, and keeps what every epoch measured; both travel with a checkpoint."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._epochs: list[dict[str, Any]] = []

    def count(self, hook: str, trainer: pl.Trainer) -> None:
        self._calls[hook] += 1
        if hook == "on_train_epoch_end":
            groups = trainer.optimizers[0].param_groups
            options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
            progress = {"epoch": trainer.current_epoch, "step": trainer.global_step, "stop": trainer.should_stop}
            self._epochs.append({**progress, "metrics": _own(trainer.callback_metrics), "options": options})

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"calls": dict(self._calls), "epochs": list(self._epochs)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._calls, self._epochs = Counter(state_dict["calls"]), list(state_dict["epochs"])


def _counting(hook: str) -> Callable[..., None]:
    def method(self: Tally, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self.count(hook, trainer)

    return method


for _hook in _COUNTED:
    setattr(Tally, _hook, _counting(_hook))


class FinalCheckpoint(pl.Callback):
    """At the end all workers write a checkpoint, and each of them what it holds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        folder = self._directory / WORKERS
        folder.mkdir(exist_ok=True)
        torch.save(_of_one_process(trainer), folder / f"{getattr(trainer.strategy, 'grid_rank', 0)}-{os.getpid()}")
        trainer.save_checkpoint(self._directory / _FINAL, weights_only=False)


def _of_one_process(trainer: pl.Trainer) -> State:
    """What one process holds besides the parameters and what depends on them one by one."""
    return {
        "progress": {"global_step": trainer.global_step, "current_epoch": trainer.current_epoch,
                     "should_stop": trainer.should_stop, "loops": _of_lightning(trainer.fit_loop.state_dict())},
        "metrics": {"callback": _own(trainer.callback_metrics), "logged": _own(trainer.logged_metrics),
                    "bar": _own(trainer.progress_bar_metrics)},
        "callbacks": _states({callback.state_key: callback.state_dict() for callback in trainer.callbacks}),
    }  # fmt: skip


def _of_lightning(fit_loop: dict[str, Any]) -> dict[str, Any]:
    """The state of a fit loop without what the strategy adds for runs that resume."""
    for name in ("seed", "global_batch_size"):
        fit_loop["state_dict"].pop(name, None)
    return fit_loop


def collect(trainer: pl.Trainer, module: pl.LightningModule, directory: Path, checkpoints: Path | None = None) -> State:
    """What a training left in this process and in ``directory`` (and ``checkpoints``, if they were elsewhere)."""
    folder = directory / CHECKPOINTS if checkpoints is None else checkpoints
    final = torch.load(directory / _FINAL, weights_only=False)
    final["callbacks"] = _states(final["callbacks"])
    final.pop("pytorch-lightning_version")
    _of_lightning(final["loops"]["fit_loop"])
    final.pop("lightning_recycle", None)  # what completes it for a run that goes on
    workers = sorted((directory / WORKERS).iterdir())
    state: State = {
        "weights": {name: tensor.clone() for name, tensor in module.state_dict().items()},
        **_of_one_process(trainer),
        "final checkpoint": final,
        "rows": rows_of(directory),
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else [],
        "workers": {path.name: torch.load(path, weights_only=False) for path in workers},
    }
    return _without(state, {str(folder): CHECKPOINTS, str(directory): ""})


def without_starts(value: Any) -> Any:
    """``value`` without the number of calls of ``on_train_start``."""
    if isinstance(value, dict):
        return {key: without_starts(item) for key, item in value.items() if key != "on_train_start"}
    return value


def compare(found: State, expected: State, starts_again: bool = False, saves_everything: bool = True) -> Iterator[str]:
    """Where ``found`` differs from ``expected``, in words.

    ``starts_again``: some steps were logged twice; ``saves_everything``: else :func:`missing_checkpoints` judges.
    """
    if not saves_everything:
        found, expected = _without_checkpoints(found), _without_checkpoints(expected)
    (undisturbed,) = expected["workers"].values()
    for part, value in expected.items():
        ours = found[part]
        if part == "rows" and starts_again:
            ours, value = _newest(ours), _newest(value)
        if part == "workers":
            for who, one in ours.items():
                yield from differences(one, undisturbed, TOLERANCE, f"worker {who}")
        else:
            yield from differences(ours, value, TOLERANCE, part)


def missing_checkpoints(folder: Path, expected: Sequence[str], full: Container[int]) -> Iterator[str]:
    """What is wrong with the checkpoints of a disk that was full at some steps."""
    names = {path.name for path in folder.iterdir()}
    yield from (f"{name} is in the folder of the checkpoints" for name in sorted(names - set(expected)))
    for name in sorted(set(expected) - names):
        if step_of(Path(name)) not in full:
            yield f"{name} is missing, though the disk was not full"
    for name in sorted(names & set(expected)):
        try:
            step = torch.load(folder / name, weights_only=False)["global_step"]
        except Exception as error:  # however a file is damaged, it is named
            yield f"{name} cannot be read: {type(error).__name__}: {error}"
        else:
            if step != step_of(Path(name)):
                yield f"{name} is of step {step}"


def step_of(checkpoint: Path) -> int:
    """The step that stands in the name of a checkpoint."""
    return int(checkpoint.stem.rpartition("step=")[2])


def _without_checkpoints(state: State) -> State:
    """Without what ModelCheckpoint knows and has written."""

    def others(callbacks: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in callbacks.items() if not key.startswith("ModelCheckpoint")}

    final = state["final checkpoint"]
    return {
        **{part: value for part, value in state.items() if part != "files"},
        "callbacks": others(state["callbacks"]),
        "final checkpoint": {**final, "callbacks": others(final["callbacks"])},
        "workers": {who: {**one, "callbacks": others(one["callbacks"])} for who, one in state["workers"].items()},
    }


def _own(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Without the numbers that the strategy adds."""
    return {name: torch.as_tensor(value) for name, value in metrics.items() if not name.startswith("recycle/")}


def _states(callbacks: Mapping[str, Any]) -> dict[str, Any]:
    """The states of those callbacks that have one."""
    return {key: state for key, state in callbacks.items() if state}


def rows_of(directory: Path) -> list[dict[str, float]]:
    """What the logger wrote, without the strategy's own numbers and rows with nothing else."""
    rows = []
    with open(directory / "csv" / "version_0" / "metrics.csv") as file:
        for row in csv.DictReader(file):
            own = {name: float(text) for name, text in row.items() if text and not name.startswith("recycle/")}
            if own.keys() - {"epoch", "step"}:
                rows.append(own)
    return rows


def _newest(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The last row of each step and set of columns."""
    return {f"step {row['step']:g} {sorted(row)}": row for row in rows}


def _without(value: Any, folders: Mapping[str, str]) -> Any:
    """``value`` with paths relative to their folder."""
    if isinstance(value, (str, Path)):
        text = str(value)
        for folder, name in folders.items():
            text = text.replace(folder, name)
        return text
    if isinstance(value, Mapping):
        return {_without(key, folders): _without(item, folders) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without(item, folders) for item in value]
    return value
