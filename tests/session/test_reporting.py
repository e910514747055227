"""Callbacks that report on a run, as a worker prepares them."""

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from lightning_recycle.session.reporting import show_whole_run


def named(write: Callable[..., None]) -> Callable[..., None]:
    """A decorator of the user's own."""

    @wraps(write)
    def write_by_name(self: Any, *args: Any) -> None:
        self.written.append("by name")
        write(self, *args)

    return write_by_name


class Writer(BasePredictionWriter):
    """Notes what it is to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    @torch.no_grad()
    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *_: Any) -> None:
        self.written.append(prediction)

    @named
    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.written.append(predictions)


def prepare(writer: Writer, asked: list[str]) -> None:
    """As a worker of a new run, which notes in ``asked`` for what it is the leader."""

    def by_leader(name: str, action: Callable[[], Any]) -> Any:
        asked.append(name)
        return action()

    collectives: Any = SimpleNamespace(grid=SimpleNamespace(stages=1, num_workers=2), by_leader=by_leader)
    trainer: Any = SimpleNamespace(callbacks=[writer])
    parts: Any = None
    show_whole_run(trainer, parts, collectives)


def test_methods_with_decorators_write_predictions_by_the_leader_of_the_newest_run():
    writer, first, second = Writer(), [], []
    prepare(writer, first)
    prepare(writer, second)
    writer.write_on_batch_end(None, None, "batch", None, None, 0, 0)
    writer.write_on_epoch_end(None, None, "epoch", None)
    assert writer.written == ["batch", "by name", "epoch"]
    assert (first, second) == ([], ["predictions"] * 2)
