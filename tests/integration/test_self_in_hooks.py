"""``self(x)`` in hooks evaluates the whole pipeline, on every worker, whoever dies meanwhile."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from asking import HOOKS, Asks, Dies, answers, assert_same, write
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

LATE = {"on_train_batch_end", "on_validation_batch_end", "on_validation_epoch_end", "on_train_epoch_end"}


def answer(hook: str, trainer: Any, module: Any) -> dict[str, Tensor]:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 8) + trainer.global_step
    return {"answer": module(x).detach()}


def answer_and_draw(hook: str, trainer: Any, module: Any) -> dict[str, Tensor]:
    return {**answer(hook, trainer, module), "draw": torch.rand(3)}


def fit(model: PipelineModule, pipelines: int, stages: int, callbacks: list[Callback], **kwargs: Any) -> L.Trainer:
    val = DataLoader(dataset(48), GLOBAL_BATCH // pipelines)
    settings = {"max_epochs": EPOCHS, "max_steps": -1, "limit_train_batches": EPOCH, "val": val, **kwargs}
    return fit_on_grid(model, pipelines, stages, callbacks=callbacks, **settings)


def fit_alone(model: PipelineModule, callbacks: list[Callback]) -> None:
    run = on_one_device(max_epochs=EPOCHS, limit_train_batches=EPOCH, callbacks=callbacks)
    run.fit(model, DataLoader(dataset(), GLOBAL_BATCH), DataLoader(dataset(48), GLOBAL_BATCH))


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What hooks get on one device, and the weights."""
    folder, model = tmp_path_factory.mktemp("alone"), Regression().double()
    fit_alone(model, [Asks(folder, answer)])
    (found,) = answers(folder).values()
    assert {name.split("-")[0] for name in found} == set(HOOKS)
    return found, model.state_dict()


@pytest.mark.parametrize("stages", sampled([2, 3], 1, rest=pytest.mark.long))
def test_every_hook_on_every_worker_gets_what_one_device_gives(tmp_path, alone, stages):
    expected, weights = alone
    model = Regression().double()
    fit(model, 4 // stages, stages, [Asks(tmp_path, answer_and_draw)], loader={"num_workers": stages - 2})
    found, drawn = answers(tmp_path), dict[str, Tensor]()
    assert set(found) == set(range(4 // stages * stages))
    for rank, theirs in found.items():
        draws = {name: theirs.pop(name) for name in list(theirs) if name.endswith(" draw")}
        assert_same(theirs, expected)
        for name, draw in draws.items():  # what hooks draw, such as an input, is the same, whoever reads data
            assert torch.equal(draw, drawn.setdefault(name, draw)), (rank, name)
    assert difference(model.state_dict(), weights) < TOLERANCE


KILLS = [
    (victim, hook, step, calls)
    for victim in range(4)
    for hook, step in (("on_train_batch_end", 3), ("on_validation_epoch_end", EPOCH), ("on_before_optimizer_step", 2))
    for calls in (None, 0)
]


@pytest.mark.parametrize(("victim", "hook", "step", "calls"), sampled(KILLS, 1))
def test_a_worker_that_dies_in_an_evaluation_changes_no_answer(tmp_path, alone, victim, hook, step, calls):
    hooks = {*LATE, hook}
    run = fit(Regression().double(), 2, 2, [Dies(victim, hook, step, calls), Asks(tmp_path, answer, hooks)])
    assert failures(run) == [(victim // 2, victim % 2)]
    found = answers(tmp_path)
    for rank in {0, 1, 2, 3} - {victim}:
        assert_same(found[rank], alone[0], hooks)


class Counts(nn.Module):
    """Counts its calls in training, in what is small and in what is large."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, [0]
        self.register_buffer("many", torch.zeros(20_000))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if not torch.is_grad_enabled():  # a step appends the items of each micro-batch
                self.seen.append(self.calls)
            self.many.add_(1)
        return x + 1e-3 * self.calls


class CountedRegression(Regression):
    def configure_pipeline(self) -> Any:
        return [Counts(), *super().configure_pipeline(), Counts()]

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        self(torch.ones(2, 8, dtype=torch.float64, device=self.device))


@pytest.mark.parametrize("victim", sampled([None, 0, 1, 2, 3], 2))
def test_what_layers_keep_of_an_evaluation_is_the_same_on_all_peers(victim):
    """As on one device, whichever of them goes on."""
    ours, theirs = CountedRegression().double(), CountedRegression().double()
    fit_alone(theirs, [])
    run = fit(ours, 2, 2, [] if victim is None else [Dies(victim, "on_train_batch_end", EPOCH + 2, None)])
    assert failures(run) == ([] if victim is None else [(victim // 2, victim % 2)])
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        if isinstance(other, Counts):
            assert (mine.calls, mine.seen) == (other.calls, other.seen)
            assert mine.calls == EPOCHS * (EPOCH + 1)
    assert difference(ours.state_dict(), theirs.state_dict()) < TOLERANCE


class Alone(Callback):
    """Evaluates the model on the leader only."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._ask)

    def _ask(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step:
            module(torch.zeros(1, 8, dtype=torch.float64))


@pytest.mark.parametrize(
    "hook", sampled(["on_train_batch_end", "on_validation_batch_end", "on_train_end"], 1, rest=pytest.mark.long)
)
def test_an_evaluation_that_only_one_worker_wants_is_an_error_that_names_the_remedy(hook):
    with pytest.raises(ReCycleError, match=r"self\(x\).*must be called on all.*is_global_zero"):
        fit(Regression().double(), 2, 2, [Alone(hook)])


class Draws(Callback):
    """Evaluates a model with dropout twice after each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        x = torch.ones(2, 8, dtype=torch.float64)
        write(self.folder, trainer, "both", both=torch.cat([module(x), module(x)], 1))


def test_dropout_draws_anew_in_each_call_and_the_same_whoever_dies(tmp_path):
    runs = []
    for name, deaths in (("calm", []), ("kill", [Dies(0, "on_train_batch_end", 2, calls=0)])):
        (tmp_path / name).mkdir()
        model = Regression(dropout=0.5).double()
        fit(model, 2, 2, [*deaths, Draws(tmp_path / name)], max_epochs=1)
        runs.append((answers(tmp_path / name), model.state_dict()))
    (calm, weights), (kill, others) = runs
    assert difference(weights, others) < TOLERANCE  # and the steps draw what they draw without the calls
    for both in calm[0].values():
        assert not torch.equal(both[:, 0], both[:, 1])
    for found in (calm[1], calm[2], calm[3], kill[1], kill[2], kill[3]):
        assert_same(found, calm[0])


class ByRank(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module(torch.full((2, 8), float(trainer.strategy.grid_rank), dtype=torch.float64))


class InLoss(Regression):
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(self(target.expand(-1, 8)), target)


class InOutput(Regression):
    def on_validation_output(self, output: Tensor, target: Tensor) -> None:
        self(target.expand(-1, 8))


class InOptimizers(Regression):
    def configure_optimizers(self) -> Any:
        self(torch.zeros(1, 8, dtype=torch.float64))
        return super().configure_optimizers()


class CallsLayers(Regression):
    def on_train_epoch_end(self) -> None:
        x = torch.zeros(1, 8, dtype=torch.float64)
        for layer in self.layers:
            x = layer(x)


@pytest.mark.parametrize(("model", "callbacks", "message"), sampled([
    (Regression, [ByRank()], r"self\(x\), with inputs that differ between the workers"),
    (InLoss, [], r"self\(x\), by code that sees one micro-batch"),
    (InOutput, [], r"self\(x\), by code that sees one micro-batch"),
    (InOptimizers, [], r"self\(x\), when this worker had one stage .* as in configure_optimizers\(\)"),
    (CallsLayers, [], r"a layer of another stage.*self\(x\)"),
], 1))  # fmt: skip
def test_what_cannot_be_evaluated_is_an_error_that_names_the_remedy(model, callbacks, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(model().double(), 1, 2, callbacks)


class AsksEarly(Callback):
    """What all workers do at the start of each batch; a replacement comes there when the others are past it."""

    def __init__(self, evaluates: bool) -> None:
        self.evaluates = evaluates

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        module.all_gather(torch.ones(1))
        if self.evaluates:
            module(torch.zeros(1, 8, dtype=torch.float64))


@pytest.mark.parametrize("evaluates", sampled([False, True], 1, rest=pytest.mark.long))
def test_a_hook_that_a_replacement_runs_alone_does_not_confuse_the_others(evaluates):
    model = Regression().double()
    fit_alone(expected := Regression().double(), [])
    waits = AwaitReplacement([6] if not evaluates else [])
    callbacks = [Dies(2, "on_train_batch_end", 2), AsksEarly(evaluates), waits]
    run = fit(model, 2, 2, callbacks, strategy={"max_restarts": 1})
    assert difference(model.state_dict(), expected.state_dict()) < TOLERANCE
    assert rejoined(run) == [(1, 0)] if not evaluates else len(failures(run)) <= 2
