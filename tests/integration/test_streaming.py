"""Training on streams: the weights are those of one device, whoever dies, joins or resumes."""

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.growth import AwaitReplacement, happened
from support.huggingface_streams import AnotherOrder, collate, shuffled
from support.models import GLOBAL_BATCH, Regression
from support.sampling import sampled
from support.streams import ByProcess, SaysNothing, Stream, WithoutState
from support.training import TOLERANCE, difference, failures, on_one_device, trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_recycle import ReCycleError
from lightning_recycle.callbacks import Fault

EPOCH = 5  # steps
SAMPLES = GLOBAL_BATCH * EPOCH + 7


def loader(stream: IterableDataset[Any], pipelines: int, num_workers: int = 0) -> DataLoader[Any]:
    kind = StatefulDataLoader if type(stream) is WithoutState else DataLoader
    # On one device a smaller last batch would be trained on, too; a grid leaves it out.
    options = {} if isinstance(stream, Stream) else {"collate_fn": collate}
    return kind(stream, batch_size=GLOBAL_BATCH // pipelines, num_workers=num_workers, drop_last=True, **options)


def one_device(data: DataLoader[Any], epochs: int = 2, **options: Any) -> dict[str, Tensor]:
    """The weights that Lightning trains without this strategy."""
    model = Regression().double()
    on_one_device(max_epochs=epochs, **options).fit(model, data)
    return model.state_dict()


def train(
    stream: IterableDataset[Any],
    faults: Sequence[Fault] = (),
    grid: tuple[int, int] = (2, 2),
    num_workers: int = 0,
    ckpt_path: Path | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], L.Trainer]:
    """Trains two epochs on a grid; returns weights and Trainer."""
    model = Regression().double()
    run = trainer(*grid, faults, **{"max_epochs": 2, "max_steps": -1, **options})
    run.fit(model, loader(stream, grid[0], num_workers), ckpt_path=ckpt_path)
    return model.state_dict(), run


@functools.cache
def to_the_end() -> dict[str, Tensor]:
    return one_device(loader(Stream(SAMPLES), 1))


@functools.cache
def going_on() -> dict[str, Tensor]:
    """With the fourth batch the stream begins anew: no two epochs are alike."""
    return one_device(loader(Stream(GLOBAL_BATCH * 3 + 5, endless=True), 1), limit_train_batches=EPOCH)


@pytest.mark.long
@pytest.mark.parametrize("stream", [Stream, WithoutState])
def test_processes_that_read_in_turns_give_the_batches_of_one_device(stream):
    expected = one_device(loader(stream(SAMPLES), 1, num_workers=2))
    weights, run = train(stream(SAMPLES), [Fault("kill", 1, 0, 3, at="backward_input")], num_workers=2)
    assert failures(run) == [(1, 0)]
    assert difference(weights, expected) < TOLERANCE


@pytest.mark.parametrize("num_workers", sampled([0, 2], 1, rest=pytest.mark.long))
def test_a_stream_without_state_trains_the_weights_of_one_device_whoever_dies_joins_or_resumes(num_workers, tmp_path):
    expected = one_device(loader(SaysNothing(SAMPLES), 1, num_workers))
    epoch = EPOCH if num_workers == 0 else EPOCH - 1  # each process leaves an incomplete batch out
    enters_at, saved = epoch + 1, epoch + 3
    weights, run = train(
        SaysNothing(SAMPLES),
        [Fault("kill", 1, 0, enters_at - 1), Fault("kill", 0, 0, enters_at + 1)],  # then it reads for both pipelines
        num_workers=num_workers,
        strategy={"max_restarts": 1},
        callbacks=[
            AwaitReplacement([enters_at]),
            ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=saved, save_top_k=-1),
        ],
        enable_checkpointing=True,
    )
    assert [(event.worker, event.step) for event in happened(run, "rejoined")] == [((1, 0), enters_at)]
    assert difference(weights, expected) < TOLERANCE
    ckpt_path = tmp_path / f"step={saved}.ckpt"
    resumed, run = train(SaysNothing(SAMPLES), grid=(1, 2), num_workers=num_workers, ckpt_path=ckpt_path)
    assert run.global_step == 2 * epoch
    assert difference(resumed, expected) < TOLERANCE


def test_a_stream_that_gives_each_process_other_samples_is_an_error():
    """It would train on inputs of one worker and targets of another."""
    with pytest.raises(ReCycleError, match=r"digest of the samples"):
        train(ByProcess(SAMPLES))
    with pytest.raises(ReCycleError, match=r"Workers have read different samples for batch 0 of an evaluation"):
        trainer(1, 2).validate(Regression().double(), loader(ByProcess(SAMPLES), 1), verbose=False)


@pytest.mark.parametrize(("enters_at", "num_workers"), sampled(itertools.product([EPOCH, EPOCH + 2], [0, 2]), 1))
def test_a_worker_that_joins_finds_the_place_in_the_stream(enters_at, num_workers):
    stream = Stream(GLOBAL_BATCH * 8 + 5, endless=True)
    expected = one_device(loader(stream, 1, num_workers), limit_train_batches=EPOCH)
    weights, run = train(
        Stream(GLOBAL_BATCH * 8 + 5, endless=True),
        [Fault("kill", 1, 0, enters_at - 1), Fault("kill", 0, 0, 2 * EPOCH - 1)],  # then it reads for both pipelines
        num_workers=num_workers,
        limit_train_batches=EPOCH,
        strategy={"max_restarts": 10},
        callbacks=[AwaitReplacement([enters_at])],
    )
    entered = happened(run, "rejoined")[0]
    assert (entered.worker, entered.step) == ((1, 0), enters_at)
    assert difference(weights, expected) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("enters_at", sampled([EPOCH, EPOCH + 2], 1))
def test_a_worker_that_joins_finds_the_place_behind_a_shuffle_buffer(enters_at):
    expected = one_device(loader(shuffled(SAMPLES), 1), 3, callbacks=[AnotherOrder()])
    weights, run = train(
        shuffled(SAMPLES),
        [Fault("kill", 1, 0, enters_at - 1), Fault("kill", 0, 0, 2 * EPOCH + 1)],  # then it reads for both pipelines
        max_epochs=3,
        strategy={"max_restarts": 1},
        callbacks=[AnotherOrder(), AwaitReplacement([enters_at])],
    )
    entered = happened(run, "rejoined")[0]
    assert (entered.worker, entered.step) == ((1, 0), enters_at)
    assert difference(weights, expected) < TOLERANCE
    assert difference(weights, one_device(loader(shuffled(SAMPLES), 1), 3)) > 1e-4, "the epochs are all alike"


@pytest.mark.parametrize(
    ("step", "limit"), sampled(itertools.product([EPOCH - 2, EPOCH, EPOCH + 1], [None, EPOCH]), 1, seed=1)
)
def test_another_grid_resumes_at_the_exact_sample(step, limit, tmp_path):
    def stream() -> Stream:
        return Stream(GLOBAL_BATCH * 3 + 5, endless=True) if limit else Stream(SAMPLES)

    options: dict[str, Any] = {"limit_train_batches": limit} if limit else {}
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    train(stream(), callbacks=[saving], enable_checkpointing=True, **options)
    weights, run = train(stream(), grid=(1, 2), ckpt_path=tmp_path / f"step={step}.ckpt", **options)
    assert run.global_step == 2 * EPOCH
    assert difference(weights, going_on() if limit else to_the_end()) < TOLERANCE


@pytest.mark.parametrize(
    "ends",
    sampled([{}, {"max_epochs": None, "max_steps": 2 * EPOCH}], 1, rest=pytest.mark.long),
    ids=["max_epochs", "max_steps"],
)
def test_a_checkpoint_from_the_end_of_an_epoch_goes_on_in_the_next(ends, tmp_path):
    def stream() -> Stream:
        return Stream(GLOBAL_BATCH * 3 + 5, endless=True)

    options: dict[str, Any] = {"limit_train_batches": EPOCH, **ends}
    callbacks = [ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)]
    train(stream(), callbacks=callbacks, enable_checkpointing=True, **options)
    weights, run = train(stream(), ckpt_path=tmp_path / "epoch=0.ckpt", **options)
    assert run.global_step == 2 * EPOCH
    assert difference(weights, going_on()) < TOLERANCE


def uneven(pipelines: int) -> DataLoader[Any]:
    """A stream to evaluate on, whose last batch has 7 samples."""
    return DataLoader(Stream(2 * GLOBAL_BATCH + 7), batch_size=GLOBAL_BATCH // pipelines)


@pytest.mark.parametrize(
    "faults",
    [(), pytest.param((Fault("kill", 1, 1, step=2, at="validation"),), marks=pytest.mark.long)],
    ids=["nobody", "one dies"],
)
def test_the_metrics_of_a_stream_with_an_uneven_end_are_those_of_one_device(faults):
    options: dict[str, Any] = {"max_epochs": 1, "max_steps": -1, "val_check_interval": 2}
    losses = []
    for run, pipelines in ((on_one_device(**options), 1), (trainer(2, 2, faults, **options), 2)):
        run.fit(Regression().double(), loader(Stream(GLOBAL_BATCH * 4), pipelines), uneven(pipelines))
        losses.append(float(run.callback_metrics["val_loss"]))
    assert failures(run) == [(1, 1)] * len(faults)
    assert abs(losses[0] - losses[1]) < TOLERANCE


def test_predictions_of_a_stream_with_an_uneven_end_are_those_of_one_device():
    model = Regression().double()
    one = torch.cat(on_one_device().predict(model, uneven(1)))
    grid = torch.cat(trainer(2, 2).predict(model, uneven(2)))
    assert len(grid) == 2 * GLOBAL_BATCH + 7
    assert torch.allclose(one, grid, rtol=0, atol=TOLERANCE)
