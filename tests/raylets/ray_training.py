"""What the tests on Ray train, as users do, and what its weights must equal."""

import os
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from support.models import GLOBAL_BATCH, Regression, dataset
from support.options import recycle_strategy
from support.training import QUIET, plain_loop
from torch import Tensor
from torch.utils.data import DataLoader

STEPS = 40
DATA = dataset(GLOBAL_BATCH * STEPS)
_FREE = 8  # steps that nobody waits in
_LONGEST_WAIT = 240.0  # seconds


class Signs(L.Callback):
    """Tells the test where each worker is: a file ``<rank>.<incarnation>.<pid>`` with its step and node, and ``steps.``
    with that name, with all steps that it has begun. From step _FREE on the training waits for the file ``enough``,
    except that it lets the roster change.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        client = strategy.session.client
        name = f"{strategy.grid_rank}.{strategy.incarnation}.{os.getpid()}"
        (self._directory / f".{name}").write_text(f"{trainer.global_step} {os.environ.get('RECYCLE_NODE')}")
        (self._directory / f".{name}").rename(self._directory / name)
        with (self._directory / f"steps.{name}").open("a") as steps:
            print(trainer.global_step, file=steps)
        deadline = time.monotonic() + _LONGEST_WAIT
        while trainer.global_step >= _FREE and not (self._directory / "enough").exists():
            if client.is_interrupted or client.member.is_paused or time.monotonic() > deadline:
                return
            time.sleep(0.005)


class Dying(Regression):
    """Whose worker (0, 1) dies in step 4, or raises; the training does not go on far without a replacement."""

    def __init__(self, raises: bool = False) -> None:
        super().__init__()
        self.raises = raises

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        if strategy.grid_rank == 1 and strategy.incarnation == 0 and self.global_step == 4:
            if self.raises:
                raise LookupError("in step 4")
            os._exit(9)
        deadline, client = time.monotonic() + _LONGEST_WAIT, strategy.session.client
        while self.global_step >= _FREE and len(strategy.live_workers) < 4 and time.monotonic() < deadline:
            if client.is_interrupted or client.member.is_paused:
                return
            time.sleep(0.005)


class AllDie(Regression):
    """All of whose first workers die in step 10."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.strategy.incarnation == 0 and self.global_step == 10:
            os._exit(9)


def from_driver(model: Regression, callbacks: Any = (), stages: int = 2, members: int = 1, **options: Any) -> L.Trainer:
    """Trains with a Trainer in this process, whose workers are on Ray."""
    options = {"engine": "ray", "tensor_parallel_size": members, **(options or {"max_restarts": 10})}
    strategy = recycle_strategy(stages, 6, **options)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    arguments = {**QUIET, "enable_checkpointing": saves, "callbacks": list(callbacks)}
    arguments |= {"devices": stages * members, "num_nodes": 2, "max_steps": STEPS}
    trainer = L.Trainer(accelerator="cpu", strategy=strategy, **arguments)
    trainer.fit(model, DataLoader(DATA, batch_size=GLOBAL_BATCH // 2))
    return trainer


def expected() -> dict[str, Tensor]:
    """The weights after an undisturbed training on one device."""
    return plain_loop(Regression().double(), DATA, STEPS)
