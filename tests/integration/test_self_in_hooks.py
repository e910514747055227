"""``self(x)`` in hooks evaluates the whole pipeline, on every worker, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.growth import AwaitReplacement, rejoined
from support.models import GLOBAL_BATCH, Regression, dataset
from support.sampling import sampled
from support.training import TOLERANCE, difference, failures, on_one_device
from support.training import fit as fit_on_grid
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_recycle import ConfigurationError, PipelineModule, ReCycleError

EPOCH = 5  # steps
EPOCHS = 2
LENGTH = 20  # of a sampled sequence
VOCABULARY = 7

HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)
LATE = {"on_train_batch_end", "on_validation_batch_end", "on_validation_epoch_end", "on_train_epoch_end"}


class Asks(Callback):
    """Evaluates the model in ``hooks``; each worker writes its answers to files of its own."""

    def __init__(self, folder: Path, hooks: Sequence[str] = HOOKS) -> None:
        self.folder, self.hooks = folder, frozenset(hooks)

    def ask(self, hook: str, trainer: Any, module: Any) -> None:
        if hook not in self.hooks or trainer.sanity_checking:
            return
        rank = getattr(trainer.strategy, "grid_rank", 0)
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 8) + trainer.global_step
        torch.save(module(x).detach(), self.folder / f"{rank}-{hook}-{trainer.global_step}.pt")


def _asking(hook: str) -> Any:
    return lambda self, trainer, module, *args, **kwargs: self.ask(hook, trainer, module)


for _hook in HOOKS:
    setattr(Asks, _hook, _asking(_hook))


def answers(folder: Path) -> dict[int, dict[str, Tensor]]:
    """By rank, what each hook got."""
    found: dict[int, dict[str, Tensor]] = {}
    for path in sorted(folder.glob("*.pt")):
        rank, name = path.stem.split("-", 1)
        found.setdefault(int(rank), {})[name] = torch.load(path)
    return found


class Dies(Callback):
    """Kills the worker of rank ``victim`` in a hook, right before it evaluates the model, or in one of its layers."""

    def __init__(self, victim: int, hook: str, step: int, in_layer: bool = False) -> None:
        self.victim, self.step, self.in_layer = victim, step, in_layer
        setattr(self, hook, self._die)

    def _die(self, trainer: Any, module: Any, *_: Any) -> None:
        strategy = trainer.strategy
        if strategy.grid_rank != self.victim or trainer.global_step != self.step or strategy.incarnation:
            return
        if not self.in_layer:
            os.kill(os.getpid(), signal.SIGKILL)
        for layer in module.layers:
            layer.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def fit(model: PipelineModule, pipelines: int, stages: int, callbacks: list[Callback], **kwargs: Any) -> L.Trainer:
    val = DataLoader(dataset(48), GLOBAL_BATCH // pipelines)
    settings = {"max_epochs": EPOCHS, "max_steps": -1, "limit_train_batches": EPOCH, "val": val, **kwargs}
    return fit_on_grid(model, pipelines, stages, callbacks=callbacks, **settings)


def fit_alone(model: PipelineModule, callbacks: list[Callback]) -> None:
    run = on_one_device(max_epochs=EPOCHS, limit_train_batches=EPOCH, callbacks=callbacks)
    run.fit(model, DataLoader(dataset(), GLOBAL_BATCH), DataLoader(dataset(48), GLOBAL_BATCH))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("alone")
    model = Regression().double()
    fit_alone(model, [Asks(folder)])
    (found,) = answers(folder).values()
    assert {name.rsplit("-", 1)[0] for name in found} == set(HOOKS)
    return {**found, "weights": nn.utils.parameters_to_vector(model.parameters()).detach()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], hooks: Sequence[str] = HOOKS) -> None:
    wanted = {name: answer for name, answer in expected.items() if name.rsplit("-", 1)[0] in hooks}
    assert found.keys() == wanted.keys()
    for name, answer in wanted.items():
        assert torch.allclose(found[name], answer, rtol=0, atol=TOLERANCE), name


@pytest.mark.parametrize("stages", [2, 3])
def test_every_hook_on_every_worker_gets_what_one_device_gives(
    tmp_path: Path, alone: dict[str, Tensor], stages: int
) -> None:
    model = Regression().double()
    fit(model, 4 // stages, stages, [Asks(tmp_path)])
    found = answers(tmp_path)
    assert set(found) == set(range(4 // stages * stages))
    for theirs in found.values():
        assert_same(theirs, alone)
    weights = nn.utils.parameters_to_vector(model.parameters())
    assert torch.allclose(weights, alone["weights"], rtol=0, atol=TOLERANCE)


KILLS = [
    (victim, hook, step, in_layer)
    for victim in range(4)
    for hook, step in (("on_train_batch_end", 3), ("on_validation_epoch_end", EPOCH), ("on_before_optimizer_step", 2))
    for in_layer in (False, True)
]


@pytest.mark.parametrize(("victim", "hook", "step", "in_layer"), sampled(KILLS, 3))
def test_a_worker_that_dies_in_an_evaluation_changes_no_answer(
    tmp_path: Path, alone: dict[str, Tensor], victim: int, hook: str, step: int, in_layer: bool
) -> None:
    hooks = {*LATE, hook}
    run = fit(Regression().double(), 2, 2, [Dies(victim, hook, step, in_layer), Asks(tmp_path, list(hooks))])
    assert failures(run) == [(victim // 2, victim % 2)]
    found = answers(tmp_path)
    for rank in {0, 1, 2, 3} - {victim}:
        assert_same(found[rank], alone, list(hooks))


class Alone(Callback):
    """Evaluates the model on the leader only."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._ask)

    def _ask(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step:
            module(torch.zeros(1, 8, dtype=torch.float64))


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end", "on_train_end"])
def test_an_evaluation_that_only_one_worker_wants_is_an_error_that_names_the_remedy(hook: str) -> None:
    with pytest.raises(ReCycleError, match=r"self\(x\).*must be called on all.*is_global_zero"):
        fit(Regression().double(), 2, 2, [Alone(hook)])
