"""Layers move, and all else of a training goes on as if they had always been there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from support.models import GLOBAL_BATCH, AutoEncoder, Regression, dataset
from support.sampling import sampled
from support.training import TOLERANCE, difference, exact_fit, failures, fit, on_one_device, trainer
from test_moving_layers import STAY, Lopsided, Move, moves
from test_ordinary_stages import BATCH, Gpt, Vision, gpt_alone, images, on_grid, text, train
from test_resume import MODELS, Grouped
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_recycle import ConfigurationError
from lightning_recycle.callbacks import Fault

pytestmark = pytest.mark.long

EPOCH = 4  # steps


@pytest.mark.parametrize("sizes", [(1, 5), (2.5, 3.5)], ids=str)
@pytest.mark.parametrize(
    "faults", sampled([[], [Fault("kill", 0, 1, 4, at="optimizer")], [Fault("kill", 1, 0, 5)]], 2), ids=str
)
def test_tied_weights(faults, sizes):
    model, moving = AutoEncoder().double(), Move({2: sizes, 6: (4, 2)})
    run = exact_fit(model, 2, 2, faults, gradient_clip_val=0.05, callbacks=[moving], strategy=STAY)
    assert len(moves(run)) == 2
    assert failures(run) == [(fault.pipeline, fault.stage) for fault in faults]
    assert torch.equal(model.state_dict()["layers.0.weight"], model.state_dict()["layers.5.weight"])


class Siamese(AutoEncoder):
    """A layer in the middle shares a weight with the first; which stages have a copy changes with the layout."""

    def configure_pipeline(self) -> list[nn.Module]:
        torch.manual_seed(0)
        first, again, last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        again.weight = last.weight = first.weight
        return [first, nn.Tanh(), nn.Linear(6, 6), again, nn.Tanh(), last]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"},
        }


def test_weights_whose_copies_meet_and_part():
    model = Siamese().double()
    data = dataset()
    samples = torch.utils.data.TensorDataset(data.tensors[0][:, :6], data.tensors[0][:, 2:])
    callbacks = [Move({1: (1, 1, 4), 3: (3, 2, 1), 6: (4, 1, 1), 8: (2, 2, 2)})]
    assert len(moves(exact_fit(model, 2, 3, data=samples, callbacks=callbacks))) == 4


def test_layers_of_an_ordinary_module():
    expected, alone = Vision().double(), on_one_device(max_epochs=1)
    model, run = Vision().double(), on_grid(2, 2, callbacks=[Move({1: (1, 4), 3: (4, 1)})])
    metrics = train(alone, expected, images(), BATCH)
    assert train(run, model, images(), BATCH // 2) == pytest.approx(metrics)
    assert moves(run) == [(0, 1, 5), (0, 4, 5)]
    assert difference(model.state_dict(), expected.state_dict()) < TOLERANCE


@pytest.mark.parametrize("clip", [None, 0.05])
def test_layers_between_what_is_outside_of_the_chain(clip):
    faults = [Fault("kill", 0, 2, step=3)]
    moving = Move({1: (1, 2, 1), 4: (1, 1, 2)})
    model, run = Gpt().double(), on_grid(2, 3, faults, gradient_clip_val=clip, callbacks=[moving])
    train(run, model, text(), BATCH // 2)
    assert moves(run) == [(0, 1, 3, 4), (0, 1, 2, 4)]
    assert difference(model.state_dict(), gpt_alone(clip)) < TOLERANCE
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("sharded", sampled([False, True], 1))
@pytest.mark.parametrize("name", sampled(["grouped", "tied", "scheduled"], 2))
@pytest.mark.parametrize(
    ("before", "after"), [((1, 5), (3, 2, 1)), ((2.5, 3.5), (2.5, 2, 1.5))], ids=["whole", "shared"]
)
def test_checkpoints_of_any_layout_go_on_with_any(tmp_path, name, sharded, before, after):
    data = dataset(GLOBAL_BATCH * EPOCH)

    def run(grid: tuple[int, int], epochs: int, sizes: Any, ckpt_path: Path | None = None) -> dict[str, Tensor]:
        model = MODELS[name]().double()
        saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
        callbacks = [saving, Move(sizes)]
        strategy = {**STAY, "save_distributed_checkpoint": sharded}
        lightning = trainer(
            *grid, callbacks=callbacks, strategy=strategy, max_epochs=epochs, max_steps=-1, enable_checkpointing=True
        )
        lightning.fit(model, DataLoader(data, batch_size=GLOBAL_BATCH // grid[0]), ckpt_path=ckpt_path)
        return model.state_dict()

    model = MODELS[name]().double()
    one = on_one_device(max_epochs=3, max_steps=-1)
    one.fit(model, DataLoader(data, batch_size=GLOBAL_BATCH))
    run((2, 2), 2, {3: before})
    found = run((1, 3), 3, {9: after}, tmp_path / "step=6.ckpt")
    assert difference(found, model.state_dict()) < TOLERANCE


def test_learning_rates_of_groups_and_metrics(tmp_path):
    def rows(moves: dict[int, Any], name: str) -> tuple[list[str], dict[str, Tensor]]:
        model = Grouped().double()
        logger = CSVLogger(tmp_path, name="", version=name, flush_logs_every_n_steps=1)
        callbacks = [Move(moves), LearningRateMonitor("step")]
        fit(model, 2, 2, callbacks=callbacks, logger=logger, log_every_n_steps=1, strategy={"run_metrics": False})
        return (tmp_path / name / "metrics.csv").read_text().splitlines(), model.state_dict()

    still, expected = rows({}, "still")
    moved, found = rows({2: (1, 5), 5: (4, 2)}, "moved")
    assert difference(found, expected) < TOLERANCE
    assert still[0] == moved[0]
    for a, b in zip(still[1:], moved[1:], strict=True):
        assert [float(x or 0) for x in a.split(",")] == pytest.approx([float(x or 0) for x in b.split(",")], abs=1e-9)


def test_what_callbacks_keep_by_layer_is_said_to_hold_them():
    with pytest.raises(ConfigurationError, match=r"cannot move: EMAWeightAveraging keeps something for each layer"):
        fit(Regression().double(), 2, 2, callbacks=[Move({2: (1, 5)}), EMAWeightAveraging(decay=0.9)])


def test_what_holds_layers_is_told_once_it_was_asked_for():
    strategy = {"partition": [1, 5]}
    callbacks = [EMAWeightAveraging(decay=0.9)]
    run = fit(Lopsided().double(), 2, 2, data=dataset(24 * 24), max_steps=24, strategy=strategy, callbacks=callbacks)
    (event, *_) = [event for event in run.strategy.history if event.kind == "layout"]
    assert any("EMAWeightAveraging keeps something for each layer" in line for line in event.details["why"]), event
    assert moves(run) == []
