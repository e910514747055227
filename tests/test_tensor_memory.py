"""Tensors as bytes in pickles."""

import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from lightning_recycle.pickling import MainModule, MainPickler
from lightning_recycle.runtime.comm.position_mesh import PositionMesh
from lightning_recycle.tensor_memory import (
    local_part,
    pack_tensors,
    part_like,
    put_together,
    sharded_like,
    take_apart,
    unpack_tensors,
)

TENSORS = {
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "empty": torch.zeros(0, 3),
    "a lone element with a stride": torch.arange(6).reshape(2, 3)[:1, 1],
    "bfloat16": torch.randn(3, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "complex": torch.tensor([1 + 2j, 3j]),
    "conjugated": torch.tensor([1 + 2j, 3j]).conj(),
    "bool": torch.tensor([True, False]),
    "requires a gradient": torch.ones(2, requires_grad=True),
    "sparse": torch.eye(2).to_sparse(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_is_the_same_afterwards(tensor: torch.Tensor) -> None:
    found = unpack_tensors(pack_tensors({"states": [tensor]}))["states"][0]
    assert type(found) is type(tensor)
    assert (found.dtype, found.shape, found.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
    assert torch.equal(found.to_dense(), tensor.to_dense())


def test_it_can_be_changed_and_is_shared_as_before() -> None:
    value: list[Any] = [torch.zeros(2)] * 2
    first, second = unpack_tensors(pack_tensors(value))
    assert first is second
    first += 1
    assert first.tolist() == [1, 1]


def test_it_is_smaller_than_what_torch_makes() -> None:
    value = [torch.tensor(float(i)) for i in range(20)]
    assert len(pack_tensors(value)) < len(pickle.dumps(value)) / 4


def test_what_cannot_be_pickled_says_so() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pack_tensors({"a": lambda: 0})


def _dumped(value: Any) -> Any:
    file = io.BytesIO()
    MainPickler(file, MainModule(imported=True)).dump(value)
    return pickle.loads(file.getvalue())


WAYS: dict[str, Callable[[Any], Any]] = {
    "beside a pickle": lambda value: put_together(*take_apart(value, lambda tensor: type(tensor) is torch.Tensor)),
    "in a pickle": lambda value: unpack_tensors(pack_tensors(value)),
    "with the user's objects": _dumped,
}


@pytest.fixture
def sharded() -> Iterator[DTensor]:
    """Of the second of two members."""
    mesh = PositionMesh((1, 2), 1)
    part = torch.ones(2, 3)
    dimension: Any = mesh.mesh["tensor_parallel"]
    yield DTensor.from_local(part, dimension, [Shard(0)], run_check=False, shape=torch.Size((4, 3)), stride=(3, 1))
    mesh.close()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_part_of_a_sharded_tensor_travels_wherever_it_lies(sharded: DTensor, way: Callable[[Any], Any]) -> None:
    """A gradient is a view of its bucket: torch pickles no DTensor whose part begins within its storage."""
    gradient = sharded_like(sharded, torch.arange(12.0)[6:].view(2, 3))
    first, second = way([gradient, gradient])
    assert first is second
    assert type(first) is DTensor
    assert (first.device_mesh, first.placements, first.shape) == (sharded.device_mesh, (Shard(0),), (4, 3))
    assert local_part(first).tolist() == [[6, 7, 8], [9, 10, 11]]


def test_the_part_of_a_whole_tensor_holds_no_more_memory_than_it_needs(sharded: DTensor) -> None:
    part = local_part(part_like(torch.arange(12.0).view(4, 3), sharded))
    assert part.tolist() == [[6, 7, 8], [9, 10, 11]]
    assert part.untyped_storage().nbytes() == part.nbytes
