"""The samples as shards of a WebDataset. Workers import this module."""

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import small_training as small
import torch


def write_shards(folder: Path) -> list[str]:
    """Two shards of a WebDataset."""
    shards = []
    rows = small.as_rows()
    for shard, first in enumerate(range(0, len(rows), len(rows) // 2)):
        shards.append(str(folder / f"{shard}.tar"))
        with tarfile.open(shards[-1], "w") as file:
            for index, row in enumerate(rows[first : first + len(rows) // 2]):
                content = io.BytesIO()
                torch.save(small.as_tensors(row), content)
                info = tarfile.TarInfo(f"{shard}_{index:03}.pth")
                info.size = content.tell()
                file.addfile(info, io.BytesIO(content.getvalue()))
    return shards


def only_sample(sample: dict[str, Any]) -> Any:
    return sample["pth"]


def web_dataset(folder: Path, **options: Any) -> Any:
    webdataset = pytest.importorskip("webdataset")
    data = webdataset.WebDataset(write_shards(folder), **{"shardshuffle": False, **options})
    return data.decode().map(only_sample)
