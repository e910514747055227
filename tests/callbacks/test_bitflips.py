"""A bit flips where the fault says, the same in every run, and nowhere else."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from lightning_recycle.callbacks import Fault
from lightning_recycle.callbacks.bitflips import WrongArithmetic, flip, flip_in_next_output, flipped
from lightning_recycle.errors import ConfigurationError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_default_one_number_doubles_or_halves(dtype: torch.dtype) -> None:
    tensors = [torch.full((3, 2), 1.5, dtype=dtype), torch.full((4,), 1.5, dtype=dtype).expand(2, 4)[0]]
    assert flip(tensors, None, random.Random(0))
    changed = [float(x) for tensor in tensors for x in tensor.flatten() if float(x) != 1.5]
    assert changed in ([3.0], [0.75])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_0_is_one_unit_in_the_last_place_and_the_highest_bit_is_the_sign(dtype: torch.dtype) -> None:
    tensor = torch.ones(1, dtype=dtype)
    flip([tensor], 0, random.Random(0))
    assert float(tensor) == 1 + torch.finfo(dtype).eps
    flip([tensor], 8 * tensor.element_size() - 1, random.Random(0))
    assert float(tensor) == -1 - torch.finfo(dtype).eps


def test_the_same_fault_flips_the_same_bit() -> None:
    one, other = torch.zeros(50), torch.zeros(50)
    flip([one], 5, random.Random("fault"))
    flip([other], 5, random.Random("fault"))
    assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    assert int(one.ne(0).sum()) == 1


def test_what_has_no_floating_point_numbers_stays() -> None:
    assert not flip([torch.ones(3, dtype=torch.int64), None, "adam", torch.empty(0)], None, random.Random(0))


def test_a_message_is_copied() -> None:
    sent = (torch.ones(4, requires_grad=True), None)
    wrong = flipped(sent, None, random.Random(0))
    assert int((wrong[0] != sent[0]).sum()) == 1
    assert wrong[0].requires_grad
    assert wrong[1] is None


def test_the_next_output_alone_is_wrong() -> None:
    layer, value = nn.Linear(3, 3), torch.randn(2, 3)
    right = layer(value)
    flip_in_next_output([layer], None, random.Random(0))
    assert int((layer(value) != right).sum()) == 1
    assert torch.equal(layer(value), right)


def test_every_nth_product_is_wrong_in_forward_and_backward() -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor | None]:
        torch.manual_seed(0)
        layer = nn.Linear(3, 3)
        output = layer(torch.randn(2, 3))
        output.sum().backward()
        return output, layer.weight.grad

    right, right_grad = run()
    with WrongArithmetic(2, 0, random.Random(0)):
        output, grad = run()
    assert grad is not None
    assert right_grad is not None
    assert torch.equal(output, right)
    assert int((grad != right_grad).sum()) == 1
    assert torch.allclose(grad, right_grad)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ["target=None", "'activation'"]),
        ({"target": "heart"}, ["'heart'", "'gradient'"]),
        ({"target": "parameter", "bit": -1}, ["bit=-1"]),
        ({"target": "parameter", "every": 2}, ["every=2", "matmul"]),
        ({"target": "matmul"}, ["every=None"]),
        ({"target": "matmul", "every": 0}, ["every=0"]),
        ({"target": "activation", "at": "reduce"}, ["at='forward'"]),
        ({"target": "gradient"}, ["at='backward_weight', when='after'"]),
        ({"target": "parameter", "at": "end"}, ["'end' is a point"]),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        Fault("bitflip", 0, 0, 1, **arguments)
    assert all(word in str(error.value) for word in words)


def test_only_bits_have_targets() -> None:
    with pytest.raises(ConfigurationError, match="belong to the kind 'bitflip'"):
        Fault("kill", 0, 0, 1, target="parameter")
