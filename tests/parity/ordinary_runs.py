"""Runs of an ordinary LightningModule (a plain ``training_step``, no PipelineModule) and all that is compared of them.

A script is run by Lightning on one device, which is the judge, and by the strategy on two pipelines of one stage or of
two, undisturbed or with a worker killed from outside in the middle of a step. Who is killed waits in its own
``training_step`` (or evaluation step) until another process sends it SIGKILL, so a run does not depend on speed.
"""

import csv
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import same_script as same
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from seen_attributes import DIFFERS, differences
from support.comparison import differences as differences_of_values
from support.options import recycle_strategy
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Accuracy

STAGES = (1, 2)
KILLS = ("none", "member", "leader")
_VICTIMS = {(1, "member"): 1, (1, "leader"): 0, (2, "member"): 2, (2, "leader"): 1}
"""Ranks by stages and kind: with two stages the member has a first one, the leader a last one."""

TIMED = re.compile(r"time|per_sec|DeviceStats|it/s")
"""What of metrics and of columns measures the machine."""


ALSO_DIFFERS = {
    **DIFFERS,
    "predict_loop._combined_loader": "the loaders in it are compared as trainer.predict_dataloaders",
    "validate_loop._combined_loader": "the loaders in it are compared as trainer.val_dataloaders",
    "validate_loop._results": "what was logged is in the metrics; every run begins it anew",
    "validate_loop._seen_batches_per_dataloader": "every evaluation begins it anew",
    "fit_loop.epoch_loop._warning_cache": "what the workers have warned of",
    "callback RichProgressBar": "the leader has drawn it, and a new one begins a bar of its own",
    "callback TQDMProgressBar._train_progress_bar": "the leader has drawn it",
    "callback TQDMProgressBar._val_progress_bar": "the leader has drawn it",
    "callback WeightAveraging._average_model": "the module has the averages",
    "callback EMAWeightAveraging._average_model": "the module has the averages",
    "callback StochasticWeightAveraging._average_model": "the module has the averages",
    "callback ModelPruning._original_layers": "numbers of objects in memory",
    "callback Timer._start_time": "a time of day",
    "callback Timer._end_time": "a time of day",
    "callback Timer._offset": "a time",
    "callback ThroughputMonitor": "times",
    "callback StochasticWeightAveraging._swa_scheduler": "it is compared as the scheduler of the Trainer",
    "trainer._train_start_time": "a time of day",
    "trainer.logged_metrics": "compared without times, as metrics",
    "module.kill": "who is killed",
    "fit_loop.epoch_loop.automatic_optimization._loaded_from_state_dict": "the loops of the workers were resumed",
    "fit_loop.epoch_loop.automatic_optimization._resuming_from_checkpoint": "the loops of the workers were resumed",
    "fit_loop.epoch_loop.manual_optimization._loaded_from_state_dict": "the loops of the workers were resumed",
    "fit_loop.epoch_loop.manual_optimization._resuming_from_checkpoint": "the loops of the workers were resumed",
    "module measures": "a collection whose metrics share no states",
}
"""As ``seen_attributes.DIFFERS``, for what other scripts leave."""


# ---------------------------------------------------------------------- who is killed


@dataclass(frozen=True)
class Kill:
    """The worker ``rank`` is killed in the first step of ``phase`` that is its ``batch``-th or a later one.

    Batches are counted over the run in training, within an evaluation otherwise; it asks for that by the file ``note``.
    """

    rank: int
    phase: str
    batch: int
    note: Path

    def reached(self, trainer: Any, phase: str, batch: int) -> None:
        """Waits to be killed, if it is time; once in a script."""
        if (phase, getattr(trainer.strategy, "grid_rank", None)) != (self.phase, self.rank) or trainer.sanity_checking:
            return
        if phase == "training":
            batch = trainer.fit_loop.epoch_loop.total_batch_idx
        if batch >= self.batch and not self.note.exists():
            draft = self.note.with_suffix(".draft")
            draft.write_text(str(os.getpid()))
            draft.rename(self.note)
            time.sleep(100)


@contextmanager
def killing(kill: Kill | None) -> Iterator[None]:
    """Kills, from a thread of this process, the worker that asks for it; fails if none did."""
    if kill is None:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            if kill.note.exists():
                os.kill(int(kill.note.read_text()), signal.SIGKILL)
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    assert kill.note.exists(), f"{kill} was never reached"


# ---------------------------------------------------------------------- the module


class Ordinary(L.LightningModule):
    """A classifier in float64 whose steps log in Lightning's ways; a chain that can be cut."""

    kill: Kill | None = None

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, same.CLASSES)
        ).double()
        self.accuracy = Accuracy("multiclass", num_classes=same.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        output = self(batch[0])
        return functional.cross_entropy(output, batch[1]), output

    def reached(self, phase: str, batch: int) -> None:
        """Called at the beginning of a step: what follows its layers runs on the last stage only."""
        if self.kill is not None:
            self.kill.reached(self.trainer, phase, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.reached("training", batch_idx)
        loss, output = self.loss_of(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", batch[0].max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.accuracy(output, batch[1])
        self.log("train_accuracy", self.accuracy, on_step=True, on_epoch=True)
        return {"loss": loss, "predicted": output.argmax(1)}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.reached("validation", batch_idx)
        loss, output = self.loss_of(batch)
        self.log("val_loss", loss, prog_bar=True)
        return output

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.reached("test", batch_idx)
        loss, _ = self.loss_of(batch)
        self.log_dict({"test_loss": loss, "inference": float(torch.is_inference_mode_enabled())})

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.reached("predict", batch_idx)
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class WithExample(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 8, dtype=torch.float64)


class Scheduled(Ordinary):
    """Its learning rate follows a scheduler of each kind."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], same.schedules(optimizer)


class ScheduledPipeline(same.Classifier):
    """The same as a PipelineModule."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], same.schedules(optimizer)


# ---------------------------------------------------------------------- a run


class Session(same.Session):
    """What a script gets; see :class:`same_script.Session`."""

    kill: Kill | None = None
    pipeline = False
    """Whether scripts take a PipelineModule instead of an ordinary one, where they have both."""

    def chosen(self, ordinary: Callable[[], Any] = Ordinary, pipeline: Callable[[], Any] = same.Classifier) -> Any:
        """The module of the kind that the run is about, prepared."""
        return self.prepared(pipeline() if self.pipeline else ordinary())

    def prepared(self, module: Any) -> Any:
        """``module``, the one that the run is about; its worker dies where this run says."""
        module.kill = self.kill
        self.run.module = module
        return module

    def trainer(self, **kwargs: Any) -> L.Trainer:
        """A quiet Trainer with a diary that writes all rows into ``csv``, unless told otherwise."""
        if not kwargs.get("barebones"):
            rows = CSVLogger(self.root, name="csv", version=0)
            kwargs = {"logger": rows, "log_every_n_steps": 1, **kwargs}
            kwargs["callbacks"] = [self.diary(), *kwargs.get("callbacks", [])]
        return super().trainer(**kwargs)


Script = Callable[[Session], None]


@dataclass(frozen=True)
class Case:
    """A script, and what it is about.

    Args:
        rows: the rows of docs/trainer_flags.md that it is a case of, by their first cells.
        script: builds a Trainer and runs it.
        claim: what must be true of every run, so that no case passes by doing nothing.
        stages: on which grids; of one stage where several are refused or have nothing to cut.
        at: the phase and batch at which a worker is killed.
        differs: attributes that may differ besides those of ``seen_attributes.DIFFERS``.
        tolerance: of what the script computes.
        strategy: options of the strategy.
        ignored: what is not compared, by the names in :func:`all_differences`, since it must differ.
    """

    rows: tuple[str, ...]
    script: Script
    claim: Callable[[same.Run], bool]
    stages: tuple[int, ...] = STAGES
    at: tuple[str, int] = ("training", 5)
    differs: tuple[str, ...] = ()
    tolerance: float = 1e-10
    strategy: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


@contextmanager
def process_settings() -> Iterator[None]:
    """A Trainer sets some of torch's globals and leaves them."""
    deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark


def on_one_device(case: Case, root: Path, pipeline: bool = False) -> same.Run:
    run = same.Run(None, None, root)
    session = Session(root, lambda: {"devices": 1, "strategy": "auto"}, same.Data(same.GLOBAL_BATCH), run)
    session.pipeline = pipeline
    with process_settings():
        case.script(session)
    return run


def on_a_grid(case: Case, stages: int, kind: str, root: Path, pipeline: bool = False) -> same.Run:
    """Runs ``case`` on two pipelines of ``stages`` stages; ``kind`` is one of :data:`KILLS`."""
    run = same.Run(None, None, root)
    options = {"pipeline_parallel_size": stages, "num_microbatches": same.MICROBATCHES, **case.strategy}

    def choose() -> dict[str, Any]:
        return {"devices": same.PIPELINES * stages, "strategy": recycle_strategy(**options)}

    session = Session(root, choose, same.Data(same.GLOBAL_BATCH // same.PIPELINES), run)
    session.pipeline = pipeline
    if kind != "none":
        (root / "diary").mkdir()
        session.kill = Kill(_VICTIMS[stages, kind], *case.at, root / "diary" / "kill")
    with process_settings(), killing(session.kill):
        case.script(session)
    return run


# ---------------------------------------------------------------------- what is compared


def diaries(run: same.Run) -> dict[int, list[Any]]:
    """The hooks that each worker's callbacks saw, by rank, in all runs of the script; in order."""
    found: dict[int, list[Any]] = {}
    paths = (run.root / "diary").glob("callback-*.jsonl")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
        _, rank, pid = path.stem.split("-")
        if not run.on_grid or int(pid) != os.getpid():
            for hook, progress, arguments in map(json.loads, path.read_text().splitlines()):
                if (hook, progress[2]) != _SAVED_BETWEEN_RUNS:
                    batches = ["batch" if argument == "mapping" else argument for argument in arguments]
                    found.setdefault(int(rank), []).append((hook, progress, batches))
    return found


_SAVED_BETWEEN_RUNS = ("on_save_checkpoint", "None")
"""A hook that the launching process calls, and the stage in which it does."""


def csv_rows(run: same.Run) -> list[dict[str, float]]:
    """What the CSV logger wrote, without what measures the machine."""
    path = run.root / "csv" / "version_0" / "metrics.csv"
    if not path.exists():
        return []
    with open(path) as file:
        rows = [{k: float(v) for k, v in row.items() if v and not TIMED.search(k)} for row in csv.DictReader(file)]
    return [row for row in rows if row.keys() - {"step", "epoch"}]


def columns(run: same.Run) -> set[str]:
    path = run.root / "csv" / "version_0" / "metrics.csv"
    return set(next(csv.reader(path.open()))) if path.exists() else set()


def to_board(root: Path) -> dict[str, Any]:
    return {"logger": TensorBoardLogger(root, name="board", version=0, default_hp_metric=False)}


def to_both(root: Path) -> dict[str, Any]:
    return {"logger": [CSVLogger(root, name="csv", version=0), *to_board(root).values()]}


def board(run: same.Run) -> dict[str, list[tuple[int, float]]]:
    """The scalars of the TensorBoard logger; a new leader may write those of the newest steps again."""
    path = run.root / "board" / "version_0"
    if not path.exists():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(path))
    accumulator.Reload()
    tags = [tag for tag in accumulator.Tags()["scalars"] if not TIMED.search(tag)]
    return {tag: sorted({(event.step, event.value) for event in accumulator.Scalars(tag)}) for tag in tags}


def files(run: same.Run) -> set[str]:
    """The names of all files; loggers and profilers that name theirs by process have one name for all."""
    names = (re.sub(r"(tfevents).*", r"\1", name) for name in run.files())
    return {re.sub(r"-\d+(\.txt|.*\.json)$", r"\1", name) for name in names}


def without_root(value: Any, root: Path) -> Any:
    if isinstance(value, (str, Path)):
        return str(value).replace(str(root), "ROOT")
    if isinstance(value, Mapping):
        return {without_root(key, root): without_root(item, root) for key, item in value.items()}
    return value


def metrics(run: same.Run) -> dict[str, dict[str, float]]:
    """What callbacks, loggers and the progress bar see at the end."""
    places = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
    all_of = {place: getattr(run.trainer, place) for place in places}
    return {place: {k: float(v) for k, v in seen.items() if not TIMED.search(k)} for place, seen in all_of.items()}


def all_differences(case: Case, one: same.Run, grid: same.Run, dead: int | None) -> list[str]:
    """Where the run on a grid is not that of one device; ``dead`` is the rank of the worker that was killed."""
    compared: list[tuple[str, Any, Any, float]] = [
        ("weights", one.weights, grid.weights, case.tolerance),
        ("results", one.results, grid.results, max(case.tolerance, same.FLOAT32_TOLERANCE)),
        ("predictions", *(run.results.get("predict") for run in (one, grid)), case.tolerance),
        ("progress", one.progress, grid.progress, 0.0),
        ("metrics", metrics(one), metrics(grid), max(case.tolerance, same.FLOAT32_TOLERANCE)),
        ("csv", csv_rows(one), csv_rows(grid), max(case.tolerance, same.FLOAT32_TOLERANCE)),
        ("csv columns", sorted(columns(one)), sorted(columns(grid)), 0.0),
        ("board", board(one), board(grid), max(case.tolerance, same.FLOAT32_TOLERANCE)),
        ("files", sorted(files(one)), sorted(files(grid)), 0.0),
    ]
    expected = diaries(one).get(0, [])
    for rank, seen in diaries(grid).items():
        if rank != dead and "hooks" not in case.ignored:
            compared.append((f"hooks of worker {rank}", expected, seen, case.tolerance))
    found = [
        line
        for name, a, b, tolerance in compared
        if name not in case.ignored
        for line in differences_of_values(a, b, tolerance, name)
    ]
    if "attributes" not in case.ignored:
        found += differences(one, grid, max(case.tolerance, 1e-6), (*ALSO_DIFFERS, *case.differs))
    return found


def victim(stages: int, kind: str) -> int | None:
    """The rank of the worker that is killed, if one is."""
    return _VICTIMS.get((stages, kind))


def calls(run: same.Run, hook: str) -> int:
    """How often a hook of callbacks was called on a worker that lives to the end."""
    return max((sum(name == hook for name, _, _ in seen) for seen in diaries(run).values()), default=0)


def validated_at(run: same.Run) -> list[int]:
    """The global steps at which validations began, without the sanity check."""
    seen: Sequence[Any] = max(diaries(run).values(), key=len)
    return [step for hook, (_, step, stage), _ in seen if hook == "on_validation_start" and "SANITY" not in stage]
