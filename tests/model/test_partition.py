"""Which layers a stage gets."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from lightning_recycle import ConfigurationError, PlanningOptions
from lightning_recycle.model.layers import even_parts, layer_ranges


def sizes(parts: Sequence[range]) -> list[int]:
    return [len(part) for part in parts]


def test_stages_of_equal_layers_are_contiguous_and_even_and_later_ones_never_get_fewer() -> None:
    for num_layers, num_stages in itertools.product(range(1, 40), range(1, 12)):
        if num_stages <= num_layers:
            parts = even_parts(num_layers, num_stages)
            assert [index for part in parts for index in part] == list(range(num_layers))
            found = sizes(parts)
            assert found == sorted(found)
            assert found[-1] - found[0] <= 1


@pytest.mark.parametrize(("partition", "expected"), [("count", [2, 2]), ([1, 3], [1, 3]), ((3, 1), [3, 1])])
def test_layers_are_dealt_as_asked(partition: Any, expected: list[int]) -> None:
    parts = layer_ranges(4, 2, partition)
    assert sizes(parts) == expected
    assert [index for part in parts for index in part] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ("size", r"PlanningOptions\(partition='size'\): use 'count'"),
        ("Count", r"partition='Count'\): use 'count'"),
        (7, r"partition=7\): use 'count'"),
        ([], "use 'count', or the number of layers"),
        ([1.5, 2.5], "use 'count', or the number of layers"),
        ([1, 2, 1], "describes 3 stages; pipeline_parallel_size is 2"),
        ([1, 2], "distributes 3 layers; the model has 4"),
        ([0, 4], "use 'count', or the number of layers"),
        ([True, 3], "use 'count', or the number of layers"),
    ],
)
def test_a_partition_that_does_not_fit_is_an_error_with_the_wrong_value(partition: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        layer_ranges(4, 2, PlanningOptions(partition=partition).partition)


def test_fewer_layers_than_stages_is_an_error_however_they_are_dealt() -> None:
    for partition in ("count", [1, 1]):
        with pytest.raises(ConfigurationError, match="1 layer, fewer than pipeline_parallel_size=2"):
            layer_ranges(1, 2, partition)  # type: ignore[arg-type]
