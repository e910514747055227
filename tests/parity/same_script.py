"""One training script, run on one device and on a grid of 2 pipelines x 2 stages, and what both left behind.

The DataLoader's batch size is the only thing that differs: it is per pipeline on the grid.
"""

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.hooks import ModelHooks
from support.comparison import differences
from support.options import recycle_strategy
from support.training import QUIET, TOLERANCE
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_recycle import PipelineModule, ReCycleStrategy

PIPELINES = STAGES = MICROBATCHES = 2
LEADER = 1
"""The rank that speaks for the run on the grid: the last stage of the first pipeline."""
GLOBAL_BATCH = 8
STEPS_PER_EPOCH = 4
CLASSES = 4
VALIDATION_SAMPLES = 21  # the last batch is smaller than the others, and its micro-batches are of 1, 1, 1 and 2 samples

FLOAT32_TOLERANCE = 1e-5
"""What torchmetrics and Lightning accumulate in float32 whatever the model computes in."""


# ---------------------------------------------------------------------- the script


def samples(count: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(CLASSES, (count,), generator=generator)
    return TensorDataset(x, y)


class OwnShare(Sampler[int]):
    """Divides the data among replicas by itself."""

    num_replicas, rank = 4, 1

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 32, self.num_replicas))


def schedules(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """A learning-rate schedule of each kind."""
    every_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    every_epoch = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    on_plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return [
        {"scheduler": every_step, "interval": "step", "name": "every_step"},
        {"scheduler": every_epoch, "interval": "epoch", "name": "every_epoch"},
        {"scheduler": on_plateau, "monitor": "val_loss", "name": "on_plateau"},
    ]


class SavesAt(Callback):
    """Writes a checkpoint at the end of the batch with this number, counted over epochs."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.batch:
            trainer.save_checkpoint(self.path)


class Classifier(PipelineModule):
    """A small classifier in float64 that logs its loss in all phases."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr

    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        layers: list[Any] = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)]
        return [layer.double() for layer in layers]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Data:
    """Loaders of the script; ``batch_size`` is that of the DataLoader, a pipeline's share on the grid."""

    def __init__(self, batch_size: int, dtype: torch.dtype = torch.float64) -> None:
        self.batch_size, self.dtype = batch_size, dtype

    def loader(self, count: int, seed: int = 1, **kwargs: Any) -> DataLoader[Any]:
        return DataLoader(samples(count, seed, self.dtype), batch_size=self.batch_size, **kwargs)

    def training(self) -> Any:
        return self.loader(GLOBAL_BATCH * STEPS_PER_EPOCH)

    def validation(self) -> Any:
        return self.loader(VALIDATION_SAMPLES, seed=2)


# ---------------------------------------------------------------------- what is observed


def brief(value: Any) -> Any:
    """What of a hook's argument is comparable: numbers as they are, of everything else what it is."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else "tensor"
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, Mapping):
        return {key: brief(item) for key, item in sorted(value.items()) if key in ("loss", "state")} or "mapping"
    if isinstance(value, L.Trainer):
        return None
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if type(value).__name__ == "StepHandle" or isinstance(value, (list, tuple)):
        return "batch"
    return type(value).__name__


class Book:
    """Appends what happens in a process to a file of the process."""

    def __init__(self, folder: Path, who: str) -> None:
        self.folder, self.who = folder, who

    def note(self, trainer: Any, hook: str, *args: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = getattr(trainer.strategy, "grid_rank", 0)  # the launching process and one device have none
        with open(self.folder / f"{self.who}-{rank}-{os.getpid()}.jsonl", "a") as file:
            progress = [trainer.current_epoch, trainer.global_step, str(trainer.state.stage)]
            file.write(json.dumps([hook, progress, [brief(a) for a in args]]) + "\n")


CALLBACK_HOOKS = [name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
MODULE_HOOKS = [
    name
    for name in [n for n in dir(ModelHooks) if n.startswith("on_")] + ["setup", "teardown", "prepare_data"]
    if not name.endswith("batch_transfer") and not name.endswith(("_model_eval", "_model_train"))
]


class Diary(Callback):
    """Writes down every hook of a callback, with its arguments, in each process."""

    def __init__(self, folder: Path) -> None:
        self.book = Book(folder, "callback")


def _callback_hook(name: str) -> Callable[..., None]:
    def hook(self: Any, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        self.book.note(trainer, name, *args, *kwargs.values())

    return hook


for _name in CALLBACK_HOOKS:
    setattr(Diary, _name, _callback_hook(_name))


class KeepsDiary(Classifier):
    """Writes down every hook of a module, with its arguments, in each process."""

    book: Book


def _module_hook(name: str) -> Callable[..., None]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        self.book.note(self.trainer, name, *args, *kwargs.values())

    hook.__signature__ = inspect.signature(getattr(L.LightningModule, name))
    return hook


for _name in MODULE_HOOKS:
    setattr(KeepsDiary, _name, _module_hook(_name))


@dataclass
class Run:
    """What a script left behind in the launching process."""

    trainer: Any
    module: Any
    root: Path
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    @property
    def metrics(self) -> dict[str, float]:
        """``callback_metrics``, without the numbers that the strategy adds."""
        return {k: float(v) for k, v in self.trainer.callback_metrics.items() if not k.startswith("recycle/")}

    @property
    def progress(self) -> tuple[int, int]:
        return self.trainer.current_epoch, self.trainer.global_step

    def diary(self, who: str, rank: int | None = None) -> list[Any]:
        """The hooks of the process that speaks for the run, in order."""
        wanted = (LEADER if self.on_grid else 0) if rank is None else rank
        found = [
            path
            for path in (self.root / "diary").glob(f"{who}-{wanted}-*.jsonl")
            if not self.on_grid or path.stem.rsplit("-", 1)[1] != str(os.getpid())
        ]
        assert len(found) == 1, found
        return [json.loads(line) for line in found[0].read_text().splitlines()]

    @property
    def on_grid(self) -> bool:
        return isinstance(self.trainer.strategy, ReCycleStrategy)

    def files(self, *ignored: str) -> list[str]:
        """Relative paths of all files below the root."""
        return sorted(
            str(path.relative_to(self.root))
            for path in self.root.rglob("*")
            if path.is_file() and path.relative_to(self.root).parts[0] not in ("diary", *ignored)
        )


Script = Callable[["Session"], None]


class Session:
    """What a script gets: how to make its Trainer, and its data."""

    def __init__(self, root: Path, strategy: Callable[[], dict[str, Any]], data: Data, run: Run) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root, self._strategy, self.data, self.run = root, strategy, data, run

    def trainer(self, **kwargs: Any) -> L.Trainer:
        options = {"default_root_dir": self.root, **({} if kwargs.get("barebones") else QUIET), **kwargs}
        self.run.trainer = L.Trainer(accelerator="cpu", **self._strategy(), **options)
        return self.run.trainer

    def diary(self) -> Diary:
        return Diary(self.root / "diary")

    def fit(self, module: Any, validates: bool = False, **kwargs: Any) -> L.Trainer:
        """Makes a Trainer and trains ``module`` on the script's data."""
        trainer = self.trainer(**kwargs)
        self.run.module = module
        trainer.fit(module, self.data.training(), self.data.validation() if validates else None)
        return trainer


def on_one_device(script: Script, root: Path, dtype: torch.dtype = torch.float64) -> Run:
    run = Run(None, None, root)
    script(Session(root, lambda: {"devices": 1, "strategy": "auto"}, Data(GLOBAL_BATCH, dtype), run))
    return run


def on_a_grid(
    script: Script, root: Path, dtype: torch.dtype = torch.float64, stages: int = STAGES, **strategy: Any
) -> Run:
    arguments = {"pipeline_parallel_size": stages, "num_microbatches": MICROBATCHES, **strategy}
    run = Run(None, None, root)

    def choose() -> dict[str, Any]:
        return {"devices": PIPELINES * stages, "strategy": recycle_strategy(**arguments)}

    script(Session(root, choose, Data(GLOBAL_BATCH // PIPELINES, dtype), run))
    return run


def run_both(script: Script, root: Path, **kwargs: Any) -> tuple[Run, Run]:
    """Runs ``script`` on one device and on the grid, each in a folder of its own below ``root``."""
    return on_one_device(script, root / "one", **kwargs), on_a_grid(script, root / "grid", **kwargs)


Runs = tuple[Run, Run]


def runs_of(script: Script) -> Any:
    """A fixture for a module: what ``script`` left behind on one device and on the grid."""

    @pytest.fixture(scope="module")
    def runs(tmp_path_factory) -> Runs:
        return run_both(script, tmp_path_factory.mktemp(script.__name__))

    return runs


# ---------------------------------------------------------------------- comparing


def assert_same(one: Any, other: Any, tolerance: float = TOLERANCE, where: str = "") -> None:
    """Fails with the place of the first difference: floats within ``tolerance`` (relative above 1), the rest equal."""
    found = next(differences(one, other, tolerance, where), None)
    assert found is None, found
