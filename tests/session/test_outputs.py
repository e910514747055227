"""How what the user's steps returned for the micro-batches of a step becomes one value."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import tensor

from lightning_recycle.session.outputs import Returned


class Pair(NamedTuple):
    value: Any
    label: str


def shown(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    ("values", "joined", "predicted"),
    [
        ([tensor(1.0), tensor(4.0)], 3.0, [1.0, 4.0]),  # of one sample and of two
        ([1, 4], 3.0, [1, 4]),
        ([None, 4], 4.0, [None, 4]),
        ([None, None], None, None),
        (["a", "b"], ["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [1, 2, 3], [1, 2, 3]),
        ([tensor([1]), tensor([2, 3])], [1, 2, 3], [1, 2, 3]),
    ],
)
def test_micro_batches_become_one(values: list[Any], joined: Any, predicted: Any) -> None:
    returned = Returned(values, [1, 2])
    assert shown(returned.joined()) == joined
    assert shown(returned.predicted(alone=False)) == predicted
    assert returned.predicted(alone=True) is values[0]


def test_items_are_joined_by_name_also_where_only_some_have_them() -> None:
    returned = Returned([{"loss": 1.0}, {"loss": 4.0, "further": tensor([2])}], [1, 2])
    assert {name: shown(value) for name, value in returned.joined().items()} == {"loss": 3.0, "further": [2]}
    assert returned.predicted(alone=False)["loss"] == [1.0, 4.0]
    joined = Returned([Pair(tensor([1]), "a"), Pair(tensor([2]), "b")], [1, 1]).joined()
    assert (shown(joined.value), joined.label) == ([1, 2], ["a", "b"])


def test_tensors_that_do_not_fit_are_listed() -> None:
    parts = [torch.zeros(2, 3), torch.zeros(2, 4)]
    for one in (Returned(parts, [2, 2]).joined(), Returned(parts, [2, 2]).predicted(alone=False)):
        assert [part.shape for part in one] == [(2, 3), (2, 4)]
