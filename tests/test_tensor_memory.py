"""Tensors as bytes in pickles, and their checksums: any wrong bit shows."""

import io
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from lightning_recycle import tensor_memory as memory
from lightning_recycle.data.dataloaders import add_sample
from lightning_recycle.pickling import MainModule, MainPickler
from lightning_recycle.runtime.position_mesh import PositionMesh
from lightning_recycle.runtime.wire import sum_of_tensors

TENSORS = {
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "empty": torch.zeros(0, 3),
    "a lone element with a stride": torch.arange(6).reshape(2, 3)[:1, 1],
    "expanded": torch.ones(1).expand(4),
    "bfloat16": torch.randn(3, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "complex": torch.tensor([1 + 2j, 3j]),
    "conjugated": torch.tensor([1 + 2j, 3j]).conj(),
    "bool": torch.tensor([True, False]),
    "requires a gradient": torch.ones(2, requires_grad=True),
    "sparse": torch.eye(2).to_sparse(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


def test_it_can_be_changed_and_is_shared_as_before():
    value: list[Any] = [torch.zeros(2)] * 2
    first, second = memory.unpack_tensors(memory.pack_tensors(value))
    assert first is second
    first += 1
    assert first.tolist() == [1, 1]


def test_it_is_smaller_than_what_torch_makes():
    value = [torch.tensor(float(i)) for i in range(20)]
    assert len(memory.pack_tensors(value)) < len(pickle.dumps(value)) / 4


def test_what_cannot_be_pickled_says_so():
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        memory.pack_tensors({"a": lambda: 0})


def _dumped(value: Any) -> Any:
    file = io.BytesIO()
    MainPickler(file, MainModule(imported=True)).dump(value)
    return pickle.loads(file.getvalue())


WAYS: dict[str, Callable[[Any], Any]] = {
    "beside a pickle": lambda value: memory.put_together(
        *memory.take_apart(value, lambda tensor: type(tensor) is torch.Tensor)
    ),
    "in a pickle": lambda value: memory.unpack_tensors(memory.pack_tensors(value)),
    "with the user's objects": _dumped,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_is_the_same_afterwards(tensor, way):
    found = way({"states": [tensor]})["states"][0]
    assert type(found) is type(tensor)
    expected = (tensor.dtype, tensor.shape, tensor.layout, tensor.requires_grad)
    assert (found.dtype, found.shape, found.layout, found.requires_grad) == expected
    assert torch.equal(found.to_dense(), tensor.to_dense())


@pytest.fixture
def sharded() -> Iterator[DTensor]:
    """Of the second of two members."""
    mesh = PositionMesh((1, 2), 1)
    part = torch.ones(2, 3)
    dimension: Any = mesh.mesh["tensor_parallel"]
    yield DTensor.from_local(part, dimension, [Shard(0)], run_check=False, shape=torch.Size((4, 3)), stride=(3, 1))
    mesh.close()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_part_of_a_sharded_tensor_travels_wherever_it_lies(sharded, way):
    """A gradient is a view of its bucket: torch pickles no DTensor whose part begins within its storage."""
    gradient = memory.sharded_like(sharded, torch.arange(12.0)[6:].view(2, 3))
    first, second = way([gradient, gradient])
    assert first is second
    assert type(first) is DTensor
    assert (first.device_mesh, first.placements, first.shape) == (sharded.device_mesh, (Shard(0),), (4, 3))
    assert memory.local_part(first).tolist() == [[6, 7, 8], [9, 10, 11]]


def test_the_part_of_a_whole_tensor_holds_no_more_memory_than_it_needs(sharded):
    part = memory.local_part(memory.part_like(torch.arange(12.0).view(4, 3), sharded))
    assert part.tolist() == [[6, 7, 8], [9, 10, 11]]
    assert part.untyped_storage().nbytes() == part.nbytes


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def state(seed: int = 0) -> list[torch.Tensor]:
    """Tensors below, at and above the sizes of rows and blocks, of all widths."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [0, 1, 5, 4095, 4096, 4097, 65536, 65536 + 3, 3 * 65536]
    found = [torch.randn(size, generator=generator) for size in sizes]
    return [*found, *(torch.randn(300, generator=generator).to(dtype) for dtype in DTYPES), torch.tensor(3.0)]


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    words = tensor.view(-1).view(torch.uint8)
    words[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8


def test_a_copy_has_the_same_checksum_whatever_its_memory():
    copies = [torch.stack([t, t], -1)[..., 0] for t in state()]  # with strides
    assert len(memory.checksum(state())) == 16
    assert memory.checksum(copies) == memory.checksum(state())
    assert memory.checksum([]) == memory.checksum(iter(()))


def test_every_flipped_bit_shows():
    draw, tensors = random.Random(1), state()
    right = memory.checksum(tensors)
    floats = [tensor for tensor in tensors if tensor.numel() and tensor.dtype is not torch.bool]
    for _ in range(60):
        tensor = draw.choice(floats)
        place = draw.randrange(tensor.numel()), draw.randrange(8 * tensor.element_size())
        flip(tensor, *place)
        assert memory.checksum(tensors) != right
        flip(tensor, *place)
    assert memory.checksum(tensors) == right


@pytest.mark.parametrize("bit", [0, 22, 30, 31])
@pytest.mark.parametrize("distance", [1, 2, 4096, 65536])
def test_the_same_bit_flipped_in_two_places_shows(bit, distance):
    tensor = torch.randn(3 * 65536)
    right = memory.checksum([tensor])
    flip(tensor, 7, bit)
    flip(tensor, 7 + distance, bit)
    assert memory.checksum([tensor]) != right


def test_the_order_counts():
    a, b = torch.randn(100), torch.randn(100)
    assert memory.checksum([a, b]) != memory.checksum([b, a])
    assert memory.checksum([torch.tensor([1.0, 2.0])]) != memory.checksum([torch.tensor([2.0, 1.0])])
    assert memory.checksum([-torch.zeros(3)]) != memory.checksum([torch.zeros(3)])


def test_numbers_count_and_other_objects_do_not():
    assert memory.checksum([1, 2.5]) != memory.checksum([1, 2.0])
    assert memory.checksum([1, 2]) != memory.checksum([12])
    assert memory.checksum(["adam", None, 1]) == memory.checksum([1])


def test_a_lone_element_of_any_stride_has_the_checksum_of_its_value():
    lone = torch.arange(6)[1::3][:1]
    assert lone.stride() == (3,)
    assert memory.checksum([lone]) == memory.checksum([torch.tensor([1])])
    assert sum_of_tensors([lone]) == sum_of_tensors([torch.tensor([1])])
    assert add_sample(0, lone) == add_sample(0, torch.tensor([1]))
