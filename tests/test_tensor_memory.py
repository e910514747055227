"""Tensors as bytes in pickles."""

import pickle
from typing import Any

import pytest
import torch

from lightning_recycle.tensor_memory import pack_tensors, unpack_tensors

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
