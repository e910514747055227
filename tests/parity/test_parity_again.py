"""One Trainer runs several times: training goes on where it was, as on one device."""

import json
from typing import Any

import pytest
import same_script as same
import torch
from same_script import Classifier, Session, assert_same
from support import training as fitted
from support.models import GLOBAL_BATCH, Regression
from support.training import difference
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class WithSchedule(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Descent(Regression):
    """With an optimizer without a state, which a second fit would begin anew."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_again(session: Session) -> None:
    module = session.run.module = WithSchedule()
    trainer = session.trainer(max_epochs=2, callbacks=[session.diary()])
    for epochs in (2, 3, 3):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, session.data.loader(same.GLOBAL_BATCH * same.STEPS_PER_EPOCH, shuffle=False))
        session.run.results[f"after {len(session.run.results)}"] = (
            session.run.progress,
            trainer.fit_loop.state_dict(),
            {name: tensor.clone() for name, tensor in module.state_dict().items()},
        )


def fit_evaluate_fit(session: Session) -> None:
    module = session.run.module = WithSchedule()
    trainer = session.trainer(max_epochs=1)
    data = session.data
    trainer.fit(module, data.training(), data.validation())
    for name in ("validate", "test", "predict"):
        getattr(trainer, name)(module, data.validation(), **({} if name == "predict" else {"verbose": False}))
        session.run.results[name] = (session.run.progress, session.run.metrics)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data.training(), data.validation())
    session.run.results["fit"] = (session.run.progress, session.run.metrics, trainer.fit_loop.state_dict())


def steps_again(session: Session) -> None:
    module = session.run.module = WithSchedule()
    trainer = session.trainer(max_steps=3)
    for steps in (3, 6):
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit(module, session.data.training())
        session.run.results[f"{steps}"] = (session.run.progress, trainer.fit_loop.state_dict())


again = same.runs_of(fit_again)
evaluated = same.runs_of(fit_evaluate_fit)
counted = same.runs_of(steps_again)


def test_a_second_fit_goes_on_with_the_next_epoch(again: same.Runs) -> None:
    one, grid = again
    assert [progress for progress, *_ in grid.results.values()] == [(2, 8), (3, 12), (3, 12)]
    assert_same(one.results, grid.results)


def test_the_hooks_of_each_fit_are_those_of_one_device(again: same.Runs) -> None:
    one, grid = again
    paths = (grid.root / "diary").glob(f"callback-{same.LEADER}-*.jsonl")  # of one process for each fit
    in_order = sorted(paths, key=lambda path: path.stat().st_mtime)
    entries = [json.loads(line) for path in in_order for line in path.read_text().splitlines()]
    assert_same(one.diary("callback"), entries)


@pytest.mark.long
def test_a_fit_after_evaluations_goes_on_with_the_next_epoch(evaluated: same.Runs) -> None:
    one, grid = evaluated
    assert grid.results["fit"][0] == (2, 8)
    assert_same(one.results, grid.results, same.FLOAT32_TOLERANCE)
    assert_same(one.weights, grid.weights)


@pytest.mark.long
def test_a_second_fit_counts_its_steps_after_those_of_the_first(counted: same.Runs) -> None:
    one, grid = counted
    assert_same(one.results, grid.results)
    assert_same(one.weights, grid.weights)


def test_a_second_fit_draws_other_numbers_than_the_first() -> None:
    """Randomness is numbered by the step: runs of one and four steps draw what one of five does."""
    alike = TensorDataset(torch.ones(5 * GLOBAL_BATCH, 8).double(), torch.ones(5 * GLOBAL_BATCH, 1).double())

    def train(*until: int) -> dict[str, Tensor]:
        module, trainer = Descent(dropout=0.5).double(), fitted.trainer(2, 1, max_steps=1)
        for steps in until:
            trainer.fit_loop.epoch_loop.max_steps = steps
            trainer.fit(module, DataLoader(alike, batch_size=GLOBAL_BATCH // 2))
        return module.state_dict()

    assert difference(train(5), train(1, 5)) == 0.0
