"""Cutting a model into stages: optimal against brute force, and the loads that a module's layers have."""

import itertools
import math
import time
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_recycle import ConfigurationError, LayerSpec, PipelineModule
from lightning_recycle.model.layers import AbsentLayer
from lightning_recycle.model.partition import cut, even_parts, measure_layer_seconds, parameter_counts, stage_layers


class Layers(PipelineModule):
    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.described = layers

    def configure_pipeline(self) -> list[Any]:
        return list(self.described)


def sizes(parts: Sequence[range]) -> list[int]:
    return [len(part) for part in parts]


# ---------------------------------------------------------------------- the cut


def brute_force(loads: Sequence[float], num_stages: int) -> list[int]:
    """The best of all cuts, by the definition: maximum, sum of squares, then the fewest layers first."""
    exact = [Fraction(load) for load in loads]
    best = None
    for inner in itertools.combinations(range(1, len(loads)), num_stages - 1):
        bounds = (0, *inner, len(loads))
        stages = [sum(exact[a:b], Fraction(0)) for a, b in itertools.pairwise(bounds)]
        key = (max(stages), sum(s * s for s in stages), bounds)
        best = key if best is None else min(best, key)
    assert best is not None
    return [b - a for a, b in itertools.pairwise(best[2])]


LOADS = st.one_of(
    st.integers(0, 4),  # ties
    st.integers(0, 10**12),
    st.floats(0, 1e3, allow_subnormal=True),
    st.just(0.1),
)


@settings(max_examples=150, deadline=None)
@given(loads=st.lists(LOADS, min_size=1, max_size=9), data=st.data())
def test_the_cut_is_the_best_of_all(loads: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(loads)))
    parts = cut(loads, num_stages)
    assert [index for part in parts for index in part] == list(range(len(loads)))
    assert sizes(parts) == brute_force(loads, num_stages)


@pytest.mark.parametrize(
    ("loads", "num_stages", "expected"),
    [
        ([1, 1, 1, 1, 1], 2, [2, 3]),
        ([0.1] * 7, 3, [2, 2, 3]),  # sums of 0.1 are not rounded into differences
        ([0.1] * 10, 4, [2, 2, 3, 3]),
        ([10, 1, 1, 1, 1, 10], 3, [1, 4, 1]),
        ([0, 0, 0], 2, [1, 2]),
        ([5, 0, 0, 5], 2, [1, 3]),
        ([100, 1, 1, 1, 1, 1, 1], 3, [1, 3, 3]),  # even where the maximum leaves freedom
    ],
)
def test_ties_go_to_the_most_even_cut_and_then_to_later_stages(
    loads: list[float], num_stages: int, expected: list[int]
) -> None:
    assert sizes(cut(loads, num_stages)) == expected


def test_equal_loads_are_cut_as_equal_counts() -> None:
    for num_layers, num_stages in itertools.product(range(1, 14), range(1, 8)):
        if num_stages <= num_layers:
            assert cut([1.0] * num_layers, num_stages) == even_parts(num_layers, num_stages)


def test_stages_of_equal_layers_are_contiguous_and_even_and_later_ones_never_get_fewer() -> None:
    for num_layers, num_stages in itertools.product(range(1, 40), range(1, 12)):
        if num_stages <= num_layers:
            parts = even_parts(num_layers, num_stages)
            assert [index for part in parts for index in part] == list(range(num_layers))
            found = sizes(parts)
            assert found == sorted(found)
            assert found[-1] - found[0] <= 1


def test_a_deep_model_is_cut_in_a_moment() -> None:
    generator = torch.Generator().manual_seed(0)
    loads = [float(x) for x in torch.rand(400, generator=generator)]
    loads[0] = loads[-1] = 40.0  # embedding and head
    started = time.process_time()
    parts = cut(loads, 16)
    assert time.process_time() - started < 2.0
    assert max(sum(loads[i] for i in part) for part in parts) == 40.0


@pytest.mark.parametrize("load", [-1, math.nan, math.inf])
def test_a_load_that_is_none_is_an_error_that_names_the_layer(load: float) -> None:
    with pytest.raises(ConfigurationError, match="load of layer 1 is"):
        cut([1, load, 1], 2)


def test_no_stages_and_too_many_are_errors() -> None:
    with pytest.raises(ConfigurationError, match="at least one stage"):
        cut([1, 2], 0)
    with pytest.raises(ConfigurationError, match="2 layers, fewer than pipeline_parallel_size=3"):
        cut([1, 2], 3)
    with pytest.raises(ConfigurationError, match="3 layers, fewer than pipeline_parallel_size=4"):
        even_parts(3, 4)


# ---------------------------------------------------------------------- a module


MIXED = (LayerSpec(nn.Embedding, 50, 4), nn.Tanh(), LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 50))


def test_parameters_are_counted_without_building_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Layers(*MIXED)
    assert parameter_counts(module) == (200, 0, 20, 250)
    assert [type(layer) for layer in module.layers] == [AbsentLayer, nn.Tanh, AbsentLayer, AbsentLayer]
    huge = Layers(LayerSpec(nn.Linear, 10**7, 10**7, bias=False))  # 400 TB
    assert parameter_counts(huge) == (10**14,)


def test_counting_leaves_the_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    parameter_counts(Layers(*MIXED))
    assert torch.equal(torch.rand(2), expected)


class ReadsItsValues(nn.Module):
    """Cannot be built on the meta device, which has no values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.scale = self.weight.max().item()


def test_a_layer_that_cannot_be_built_on_meta_is_built_for_real() -> None:
    with pytest.raises(RuntimeError, match="meta"), torch.device("meta"):
        ReadsItsValues()
    assert parameter_counts(Layers(LayerSpec(ReadsItsValues), nn.Linear(2, 2))) == (3, 6)


def test_a_recipe_that_is_wrong_is_named_when_it_is_counted() -> None:
    with pytest.raises(ConfigurationError, match=r"Layer 1, LayerSpec\(Linear, 4\), cannot be built"):
        parameter_counts(Layers(nn.Tanh(), LayerSpec(nn.Linear, 4)))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_parameters_without_shapes_cannot_be_counted() -> None:
    for layer in (nn.LazyLinear(3), LayerSpec(nn.LazyLinear, 3)):
        with pytest.raises(ConfigurationError, match=r"Layer 0 \(LazyLinear\).*partition=\[2, 3\]"):
            parameter_counts(Layers(layer))


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ("count", [2, 2]),
        ("parameters", [3, 1]),
        ([1.0, 1, 1, 9], [3, 1]),
        ((9.0, 1.0, 1.0, 1.0), [1, 3]),
        ([1, 3], [1, 3]),
        ((3, 1), [3, 1]),
    ],
)
def test_layers_are_dealt_as_asked(partition: Any, expected: list[int]) -> None:
    parts = stage_layers(Layers(*MIXED), 2, partition)
    assert sizes(parts) == expected
    assert [index for part in parts for index in part] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ("size", "partition='size': use 'count'"),
        (7, "partition=7: use 'count'"),
        ([1.0], "has the seconds of 1 layers; the model has 4"),
        ([1.5, 2.5], "has the seconds of 2 layers.* give integers"),
        ([1.0, 1.0, 1.0, -1.0], "The load of layer 3 is -1.0"),
        ([1, 2, 1], "describes 3 stages; pipeline_parallel_size is 2"),
        ([1, 2], "distributes 3 layers; the model has 4"),
        ([0, 4], "whole numbers of at least 1"),
        ([True, 3], "whole numbers of at least 1"),
    ],
)
def test_a_partition_that_does_not_fit_is_an_error_with_the_wrong_value(partition: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        stage_layers(Layers(*MIXED), 2, partition)


def test_fewer_layers_than_stages_is_an_error_however_they_are_dealt() -> None:
    for partition in ("count", "parameters", [1, 1]):
        with pytest.raises(ConfigurationError, match="1 layers, fewer than pipeline_parallel_size=2"):
            stage_layers(Layers(nn.Tanh()), 2, partition)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- measuring


class Slow(nn.Module):
    """Takes its time, and passes two values on, one of them None."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor, nothing: None = None) -> tuple[Tensor, None]:
        time.sleep(self.seconds)
        return x * 2, None


class First(nn.Module):
    def forward(self, x: Tensor, nothing: None) -> Tensor:
        return x


def test_measured_seconds_are_those_of_each_layer() -> None:
    module = Layers(nn.Linear(4, 4), LayerSpec(Slow, 0.03), Slow(0.001), First(), nn.ReLU(inplace=True))
    seconds = measure_layer_seconds(module, (torch.ones(2, 4), None), repeats=2)
    assert len(seconds) == 5
    assert seconds[1] >= 0.03
    assert all(s > 0 for s in seconds)
    assert max(range(5), key=seconds.__getitem__) == 1
    assert stage_layers(module, 2, seconds)[0].stop in (1, 2)


def test_measuring_leaves_no_trace() -> None:
    module = Layers(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), LayerSpec(nn.Linear, 4, 2))
    module.layers[1].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    batch = (torch.randn(3, 4), None)
    kept = batch[0].clone()
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    measure_layer_seconds(module, batch)
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(batch[0], kept)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert not module.layers[1].training
    assert isinstance(module.layers[3], AbsentLayer)
