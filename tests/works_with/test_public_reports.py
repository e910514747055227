"""What surprised users of other strategies, by the number of the public report: the same as on one device, also when a
worker is killed and replaced, or an error that names it.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import reported_models as reported
import small_training as small
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.training import TOLERANCE, difference, grid_trainer, on_one_device
from torch.utils.data import DataLoader
from web_shards import web_dataset

from lightning_recycle import ConfigurationError, ReCycleError

pytestmark = pytest.mark.long


def loader(size: int) -> DataLoader[Any]:
    return DataLoader([small.as_tensors(row) for row in small.as_rows()], batch_size=size)


def each_step(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=1, **{"save_top_k": -1, **options})


def saved(*callbacks: Any, **options: Any) -> dict[str, Any]:
    return {"callbacks": list(callbacks), "enable_checkpointing": True, **options}


def check_resumed(make: small.Loader, model: Any, folder: Path, starts: Sequence[int]) -> None:
    """A killed run has the weights of one device, and so has the last of the runs that resume it in its first epoch.

    Args:
        starts: the steps from which runs go on, each to the step of the next one.
    """
    expected = small.train(on_one_device(max_epochs=2), model(), make(small.GLOBAL_BATCH))
    weights, _ = small.on_workers(make, model, killed=True, **saved(each_step(folder)))
    assert difference(weights, expected) < TOLERANCE
    for start, end in itertools.pairwise([*starts, 2 * small.STEPS]):
        ends = {"max_epochs": 2, "max_steps": end}
        run, trained = grid_trainer(small.PIPELINES, 1, **saved(each_step(folder), **ends)), model()
        run.fit(trained, make(small.GLOBAL_BATCH // small.PIPELINES), ckpt_path=folder / f"step={start}.ckpt")
    assert difference(trained.state_dict(), expected) < TOLERANCE


def test_steps_that_are_estimated_before_a_loader_is_resumed(tmp_path):
    """Lightning #20550."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    rows = [small.as_tensors(row) for row in small.as_rows()]
    check_resumed(lambda size: torchdata.StatefulDataLoader(rows, batch_size=size), reported.Scheduled, tmp_path, [3])


def test_streams_of_datasets_that_are_resumed_twice(tmp_path, capfd):
    """Hugging Face datasets #7901, #8145, #8308: a shuffled stream with ``map``; #7444: no warning for each process."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(small.as_rows()).to_iterable_dataset(num_shards=1)
    data = data.map(small.as_tensors).shuffle(seed=42, buffer_size=10)
    check_resumed(lambda size: DataLoader(data, batch_size=size), small.Perceptron, tmp_path, [1, 3])
    assert "shuffle buffer" not in "".join(capfd.readouterr())


def test_shards_that_are_split_and_resumed(tmp_path):
    """WebDataset #271, #303, #444: by node and process, shuffled with a seed, resumed in the middle of an epoch."""
    webdataset = pytest.importorskip("webdataset")
    splits = {"nodesplitter": webdataset.split_by_node, "workersplitter": webdataset.split_by_worker}
    data = web_dataset(tmp_path, **splits).shuffle(20, seed=1)
    for name, num_workers in (("none", 0), ("two", 2)):
        check_resumed(
            lambda size, n=num_workers: DataLoader(data, batch_size=size, num_workers=n),
            small.Perceptron,
            tmp_path / name,
            [1, 3],
        )


@pytest.mark.parametrize("monitor", ["loss", "val_loss"])
def test_the_best_model_of_manual_optimization(monitor, tmp_path):
    """Lightning #20947, #21842."""
    found = []
    for name, killed in (("one", None), ("grid", False), ("killed", True)):
        best = each_step(tmp_path / name, monitor=monitor, save_top_k=1)
        if killed is None:
            run = on_one_device(max_epochs=2, val_check_interval=2, **saved(best))
            run.fit(reported.Manual(), loader(small.GLOBAL_BATCH), loader(small.GLOBAL_BATCH))
        else:
            small.on_workers(loader, reported.Manual, killed, val=loader, val_check_interval=2, **saved(best))
        found.append((Path(best.best_model_path), float(best.best_model_score or 0)))
    for path, score in found[1:]:
        assert path.name == found[0][0].name
        assert score == pytest.approx(found[0][1], abs=1e-10)
        assert difference(torch.load(path)["state_dict"], torch.load(found[0][0])["state_dict"]) < TOLERANCE


@pytest.mark.parametrize("killed", [False, True])
def test_live_lists_of_a_callback_in_a_checkpoint(killed, tmp_path):
    """Lightning #20953: each file has those of its step."""
    small.on_workers(loader, killed=killed, **saved(each_step(tmp_path), reported.LiveLists()))
    for step in range(1, 2 * small.STEPS + 1):
        state = torch.load(tmp_path / f"step={step}.ckpt")["callbacks"]["LiveLists"]
        assert state == {"steps": list(range(step))}


def test_keys_that_are_logged_in_some_batches():
    """Lightning #19106: by the batch's number, and by what is in a worker's part of it."""
    run = on_one_device(max_epochs=2)
    run.fit(reported.SometimesLogged(), loader(small.GLOBAL_BATCH), loader(small.GLOBAL_BATCH))
    found = []
    for killed in (False, True):
        _, grid = small.on_workers(loader, reported.SometimesLogged, killed, val=loader)
        found.append({name: float(value) for name, value in grid.callback_metrics.items()})
        assert {name: found[-1][name] for name in ("odd", "every", "second")} == {
            name: pytest.approx(float(run.callback_metrics[name]), abs=1e-10) for name in ("odd", "every", "second")
        }
    assert found[1] == {name: pytest.approx(value, abs=1e-10) for name, value in found[0].items()}
    assert "positive" in found[0]


def test_a_batch_size_from_the_world_size():
    """Lightning #9063, Ray #20647: also while one of two workers is not there yet."""
    run = on_one_device(max_epochs=2)
    run.fit(expected := small.Perceptron(), datamodule=reported.BatchFromWorldSize())
    for killed in (False, True):
        weights, _ = small.on_workers(lambda _: reported.BatchFromWorldSize(), killed=killed)
        assert difference(weights, expected.state_dict()) < TOLERANCE
    recovery = {"num_pipelines": small.PIPELINES, "min_pipelines": 1}
    begun = grid_trainer(1, 1, strategy=recovery, max_epochs=2)
    begun.fit(alone := small.Perceptron(), datamodule=reported.BatchFromWorldSize())
    assert difference(alone.state_dict(), expected.state_dict()) < TOLERANCE


def test_an_epoch_that_all_workers_leave():
    run = on_one_device(max_epochs=2)
    run.fit(expected := reported.LeavesTheEpoch(alone=False), loader(small.GLOBAL_BATCH))
    for killed in (False, True):
        weights, grid = small.on_workers(loader, lambda: reported.LeavesTheEpoch(alone=False), killed)
        assert difference(weights, expected.state_dict()) < TOLERANCE
        assert grid.global_step == run.global_step == 4


def test_an_epoch_that_one_worker_leaves():
    """Lightning #21296: an error names it."""
    with pytest.raises(ReCycleError, match=r"Worker \(1, 0\) waits for all others .* worker \(0, 0\) does not come"):
        small.on_workers(loader, lambda: reported.LeavesTheEpoch(alone=True))


def test_a_combined_loader_one_of_which_is_empty():
    """Lightning #21893: an error, instead of an epoch without a step."""
    with pytest.raises(ConfigurationError, match="The training data has 0 samples"):
        small.on_workers(reported.with_an_empty_loader, small.Perceptron)
