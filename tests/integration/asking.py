"""Callbacks that evaluate the model in hooks, what each worker got, and one that dies of it."""

import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from support.training import TOLERANCE
from torch import Tensor

HOOKS = (
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start",
    "on_validation_batch_end", "on_validation_epoch_end", "on_train_epoch_end", "on_train_end", "on_fit_end",
)  # fmt: skip


def write(folder: Path, trainer: Any, name: str, **found: Tensor) -> None:
    """Writes what this worker got, into a file of its own."""
    rank = getattr(trainer.strategy, "grid_rank", 0)
    on_host = {kind: tensor.cpu() for kind, tensor in found.items()}
    torch.save(on_host, folder / f"{rank}-{name}-{trainer.global_step}.pt")


def answers(folder: Path) -> dict[int, dict[str, Tensor]]:
    """By rank, what each hook got, as "<hook>-<step> <kind>"."""
    found: dict[int, dict[str, Tensor]] = {}
    for path in sorted(folder.glob("*.pt")):
        rank, name = path.stem.split("-", 1)
        for kind, value in torch.load(path).items():
            found.setdefault(int(rank), {})[f"{name} {kind}"] = value
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], hooks: Collection[str] = ()) -> None:
    """Of ``hooks``, or of all, ``found`` has all answers of ``expected`` and no others."""
    wanted = {name: answer for name, answer in expected.items() if not hooks or name.split("-")[0] in hooks}
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)


class Asks(Callback):
    """Writes what ``ask`` gets of the module in each of ``hooks``, by kind."""

    def __init__(
        self, folder: Path, ask: Callable[[str, Any, Any], dict[str, Tensor]], hooks: Collection[str] = HOOKS
    ) -> None:
        self.folder, self.ask, self.hooks = folder, ask, frozenset(hooks)

    def asks_in(self, hook: str, trainer: Any, module: Any) -> None:
        if hook in self.hooks and not trainer.sanity_checking:
            write(self.folder, trainer, hook, **self.ask(hook, trainer, module))


def _asking(hook: str) -> Any:
    return lambda self, trainer, module, *args, **kwargs: self.asks_in(hook, trainer, module)


for _hook in HOOKS:
    setattr(Asks, _hook, _asking(_hook))


class Dies(Callback):
    """Kills the worker of rank ``victim`` in a hook, right before it evaluates the model; or, after ``calls`` of its
    ``layers``, as it computes them: for others, if it does not take part itself.
    """

    def __init__(self, victim: int, hook: str, step: int, calls: int | None = None, layers: str = "layers") -> None:
        self.victim, self.step, self.calls, self.layers = victim, step, calls, layers
        setattr(self, hook, self._die)

    def _die(self, trainer: Any, module: Any, *_: Any) -> None:
        strategy = trainer.strategy
        if strategy.grid_rank != self.victim or trainer.global_step != self.step or strategy.incarnation:
            return
        if self.calls is None:
            os.kill(os.getpid(), signal.SIGKILL)
        die_in(getattr(module, self.layers), self.calls or 0)


def die_in(layers: Any, calls: int) -> list[Any]:
    """Lets this process die when any of ``layers`` is called after ``calls`` calls; returns the hooks."""
    left = iter(range(calls, -1, -1))

    def count(*_: Any) -> None:
        if not next(left):
            os.kill(os.getpid(), signal.SIGKILL)

    return [layer.register_forward_hook(count) for layer in layers]
