"""Loaders and datasets of other packages train the weights of one device, also when a worker is killed and replaced,
or are refused by name.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import small_training as small
import torch
from torch.utils.data import DataLoader, Subset
from web_shards import only_sample, web_dataset, write_shards

from lightning_recycle import ReCycleError
from lightning_recycle.data.map_style import MicrobatchLoader
from lightning_recycle.planning.grid import Grid

pytestmark = pytest.mark.long


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchdata_stateful_dataloader(num_workers):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    rows = [small.as_tensors(row) for row in small.as_rows()]
    small.check(lambda size: torchdata.StatefulDataLoader(rows, batch_size=size, num_workers=num_workers))


def test_datasets_map():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(small.as_rows()).map(lambda row: {"y": [2 * y for y in row["y"]]})
    small.check(lambda size: DataLoader(data.with_format("torch", dtype=torch.float64), batch_size=size))


def test_datasets_streaming():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(small.as_rows()).to_iterable_dataset(num_shards=2).map(small.as_tensors)
    small.check(lambda size: DataLoader(data, batch_size=size))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_webdataset(num_workers, tmp_path):
    data = web_dataset(tmp_path)
    small.check(lambda size: DataLoader(data, batch_size=size, num_workers=num_workers))


def shuffled_shards(folder: Path) -> Any:
    """Seeded, with another order in each epoch."""
    return web_dataset(folder, shardshuffle=2, detshuffle=True, seed=1)


def shuffled(folder: Path) -> Any:
    return web_dataset(folder).shuffle(20, seed=1)


@pytest.mark.parametrize("make", [shuffled_shards, shuffled])
def test_webdataset_with_seeds(make, tmp_path):
    data = make(tmp_path)
    small.check(lambda size: DataLoader(data, batch_size=size))


def test_webdataset_resampled(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    shards = webdataset.ResampledShards(write_shards(tmp_path), seed=1, deterministic=True)
    steps = [webdataset.tarfile_to_samples(), webdataset.decode(), webdataset.map(only_sample)]
    data = webdataset.DataPipeline(shards, *steps).with_epoch(small.SAMPLES)
    small.check_drawn(lambda size: DataLoader(data, batch_size=size))


def test_webdataset_without_seeds_is_refused(tmp_path):
    for data in (web_dataset(tmp_path).shuffle(20), web_dataset(tmp_path, resampled=True).with_epoch(small.SAMPLES)):
        with pytest.raises(ReCycleError, match=r"digest of the samples read so far \(seed each shuffle"):
            small.on_workers(lambda size, data=data: DataLoader(data, batch_size=size))


def test_web_loader(tmp_path):
    """An iterable that yields batches: each is one for all workers."""
    webdataset = pytest.importorskip("webdataset")
    data = web_dataset(tmp_path)
    small.check(lambda _: webdataset.WebLoader(data, batch_size=small.GLOBAL_BATCH, num_workers=2))


def lit_data(folder: Path, **options: Any) -> Any:
    litdata = pytest.importorskip("litdata")
    rows = [small.as_tensors(row) for row in small.as_rows()]
    litdata.optimize(rows.__getitem__, list(range(len(rows))), str(folder / "data"), chunk_size=16, num_workers=1)
    return litdata.StreamingDataset(str(folder / "data"), **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_litdata(num_workers, tmp_path):
    """Read by index, so in one order, whatever ``num_workers``."""
    litdata = pytest.importorskip("litdata")
    data = lit_data(tmp_path)
    small.check(
        lambda size: litdata.StreamingDataLoader(data, batch_size=size, num_workers=num_workers),
        judge=lambda size: litdata.StreamingDataLoader(data, batch_size=size),
    )


def test_litdata_that_shuffles_is_refused(tmp_path):
    litdata = pytest.importorskip("litdata")
    data = lit_data(tmp_path, shuffle=True)
    with pytest.raises(ReCycleError, match=r"StreamingDataset\(shuffle=True\)"):
        small.on_workers(lambda size: litdata.StreamingDataLoader(data, batch_size=size))
    data.set_shuffle(False)
    order = torch.randperm(small.SAMPLES, generator=torch.Generator().manual_seed(1)).tolist()
    small.check(lambda size: DataLoader(Subset(data, range(small.SAMPLES)), sampler=order, batch_size=size))


def test_torch_geometric():
    pytest.importorskip("torch_geometric")
    from graph_model import Graphs
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader

    edges = torch.tensor([[0, 1], [1, 0]])
    rows = [small.as_tensors(row) for row in small.as_rows()]
    data = [Data(x=row["x"].view(2, 4), y=row["y"], edge_index=edges) for row in rows]
    small.check(lambda size: GraphLoader(data, batch_size=size), Graphs)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_monai_cache_dataset(num_workers):
    monai = pytest.importorskip("monai.data")
    from monai.transforms import EnsureTyped

    data = monai.CacheDataset(small.as_rows(), EnsureTyped(["x", "y"], dtype=torch.float64), progress=False)
    small.check(lambda size: monai.DataLoader(data, batch_size=size, num_workers=num_workers))


def test_monai_random_transforms():
    """They draw from generators of their own, which a warning names, unless they are seeded for each sample."""
    monai = pytest.importorskip("monai.data")
    from monai.transforms import Compose, EnsureTyped, RandScaleIntensityd
    from seeded_samples import Seeded

    typed = EnsureTyped(["x", "y"], dtype=torch.float64)
    scaled = RandScaleIntensityd("x", 0.5, prob=1.0, dtype=torch.float64)
    unseeded = monai.CacheDataset(small.as_rows(), Compose([typed, scaled]), progress=False)
    seeded = Seeded(monai.CacheDataset(small.as_rows(), typed, progress=False), scaled)
    for data, varies in ((unseeded, True), (seeded, False)):
        with warnings.catch_warnings(record=True) as caught:
            loader = MicrobatchLoader(monai.DataLoader(data, batch_size=6), Grid(2, 1, 2), 0, 7)
            loader.enter_epoch(0, small.STEPS)
            loader.facts()
        assert any("gives another sample" in str(warning.message) for warning in caught) == varies
    small.check_drawn(lambda size: monai.DataLoader(seeded, batch_size=size))
