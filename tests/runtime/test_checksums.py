"""Equal bits have equal checksums; any wrong bit shows."""

from __future__ import annotations

import random

import pytest
import torch

from lightning_recycle.data.dataloaders import add_sample
from lightning_recycle.runtime.comm.wire import sum_of_tensors
from lightning_recycle.tensor_memory import checksum

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


def test_a_copy_has_the_same_checksum_whatever_its_memory() -> None:
    copies = [torch.stack([t, t], -1)[..., 0] for t in state()]  # with strides
    assert len(checksum(state())) == 16
    assert checksum(copies) == checksum(state())
    assert checksum([]) == checksum(iter(()))


def test_every_flipped_bit_shows() -> None:
    draw, tensors = random.Random(1), state()
    right = checksum(tensors)
    floats = [tensor for tensor in tensors if tensor.numel() and tensor.dtype is not torch.bool]
    for _ in range(60):
        tensor = draw.choice(floats)
        place = draw.randrange(tensor.numel()), draw.randrange(8 * tensor.element_size())
        flip(tensor, *place)
        assert checksum(tensors) != right
        flip(tensor, *place)
    assert checksum(tensors) == right


@pytest.mark.parametrize("bit", [0, 22, 30, 31])
@pytest.mark.parametrize("distance", [1, 2, 4096, 65536])
def test_the_same_bit_flipped_in_two_places_shows(bit: int, distance: int) -> None:
    tensor = torch.randn(3 * 65536)
    right = checksum([tensor])
    flip(tensor, 7, bit)
    flip(tensor, 7 + distance, bit)
    assert checksum([tensor]) != right


def test_the_order_counts() -> None:
    a, b = torch.randn(100), torch.randn(100)
    assert checksum([a, b]) != checksum([b, a])
    assert checksum([torch.tensor([1.0, 2.0])]) != checksum([torch.tensor([2.0, 1.0])])
    assert checksum([-torch.zeros(3)]) != checksum([torch.zeros(3)])


def test_numbers_count_and_other_objects_do_not() -> None:
    assert checksum([1, 2.5]) != checksum([1, 2.0])
    assert checksum([1, 2]) != checksum([12])
    assert checksum(["adam", None, 1]) == checksum([1])


def test_a_lone_element_of_any_stride_has_the_checksum_of_its_value() -> None:
    lone = torch.arange(6)[1::3][:1]
    assert lone.stride() == (3,)
    assert checksum([lone]) == checksum([torch.tensor([1])])
    assert sum_of_tensors([lone]) == sum_of_tensors([torch.tensor([1])])
    assert add_sample(0, lone) == add_sample(0, torch.tensor([1]))
