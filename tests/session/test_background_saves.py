"""Copies for checkpoints that are written in the background."""

from typing import Any

import torch

from lightning_recycle.session.background_saves import StateCopies


def state_of(weight: torch.Tensor) -> dict[str, Any]:
    return {"weight": weight, "tied": weight.detach(), "groups": [{"lr": 0.1, "betas": (0.9, 0.999)}]}


def test_a_copy_keeps_the_values_and_what_is_tied() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    copy = StateCopies().take(state_of(weight))
    with torch.no_grad():
        weight.zero_()
    assert copy["weight"].tolist() == [1.0, 1.0, 1.0]
    assert copy["tied"] is copy["weight"]
    assert not copy["weight"].requires_grad
    assert copy["groups"] == [{"lr": 0.1, "betas": (0.9, 0.999)}]


def test_a_tensor_is_copied_once_until_it_is_written() -> None:
    weight, copies = torch.ones(3), StateCopies()
    first = copies.take({"weight": weight})["weight"]
    assert copies.take({"weight": weight})["weight"] is first
    weight.mul_(2)
    second = copies.take({"weight": weight})["weight"]
    assert first.tolist() == [1.0, 1.0, 1.0]
    assert second.tolist() == [2.0, 2.0, 2.0]


def test_memory_of_an_earlier_boundary_is_used_again_where_it_fits() -> None:
    earlier = StateCopies()
    old = earlier.take({"weight": torch.ones(3), "bias": torch.ones(2)})
    earlier.forget_originals()
    new = StateCopies(earlier).take({"weight": torch.full((3,), 5.0), "bias": torch.ones(4)})
    assert new["weight"].data_ptr() == old["weight"].data_ptr()
    assert new["weight"].tolist() == [5.0, 5.0, 5.0]
    assert new["bias"].tolist() == [1.0] * 4


def test_tensors_without_a_version_or_plain_memory_are_copied() -> None:
    with torch.inference_mode():
        frozen = torch.ones(2)
    sparse = torch.eye(2).to_sparse()
    copy = StateCopies().take({"frozen": frozen, "sparse": sparse})
    assert copy["frozen"].tolist() == [1.0, 1.0]
    assert copy["sparse"].to_dense().tolist() == [[1.0, 0.0], [0.0, 1.0]]
