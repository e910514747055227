"""How what the user's steps returned for the micro-batches of a step becomes one value."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import tensor
from torchmetrics import Metric, aggregation, regression
from torchmetrics.wrappers import MinMaxMetric

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.session.output_recorder import StepOutputs, add_states, metric_states


class Pair(NamedTuple):
    value: Any
    label: str


def shown(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(("values", "joined", "predicted"), [
    ([tensor(1.0), tensor(4.0)], 3.0, [1.0, 4.0]),  # of one sample and of two
    ([1, 4], 3.0, [1, 4]),
    ([None, 4], 4.0, [None, 4]),
    ([None, None], None, None),
    (["a", "b"], ["a", "b"], ["a", "b"]),
    ([[1], [2, 3]], [1, 2, 3], [1, 2, 3]),
    ([tensor([1]), tensor([2, 3])], [1, 2, 3], [1, 2, 3]),
])  # fmt: skip
def test_micro_batches_become_one(values, joined, predicted):
    returned = StepOutputs(values, [1, 2])
    assert shown(returned.joined()) == joined
    assert shown(returned.predicted(alone=False)) == predicted
    assert returned.predicted(alone=True) is values[0]


def test_items_are_joined_by_name_also_where_only_some_have_them():
    returned = StepOutputs([{"loss": 1.0}, {"loss": 4.0, "further": tensor([2])}], [1, 2])
    assert {name: shown(value) for name, value in returned.joined().items()} == {"loss": 3.0, "further": [2]}
    assert returned.predicted(alone=False)["loss"] == [1.0, 4.0]
    joined = StepOutputs([Pair(tensor([1]), "a"), Pair(tensor([2]), "b")], [1, 1]).joined()
    assert (shown(joined.value), joined.label) == ([1, 2], ["a", "b"])


def test_tensors_that_do_not_fit_are_listed():
    parts = [torch.zeros(2, 3), torch.zeros(2, 4)]
    for one in (StepOutputs(parts, [2, 2]).joined(), StepOutputs(parts, [2, 2]).predicted(alone=False)):
        assert [part.shape for part in one] == [(2, 3), (2, 4)]


STRIDED = [range(0, 4, 2), range(1, 4, 2)]
TWICE = [range(0, 8, 2), range(1, 8, 2)]


@pytest.mark.parametrize(("values", "divisions", "joined"), [
    ([tensor([0, 2]), tensor([1, 3])], [STRIDED], [0, 1, 2, 3]),
    ([[0, 2], [1, 3]], [STRIDED], [0, 1, 2, 3]),
    ([tensor([0, 1, 4, 5]), tensor([2, 3, 6, 7])], [STRIDED], [0, 1, 2, 3, 4, 5, 6, 7]),  # two rows per sample
    ([tensor([0, 2, 4, 6]), tensor([1, 3, 5, 7])], [STRIDED, TWICE], [0, 1, 2, 3, 4, 5, 6, 7]),  # of one loader
    ([tensor([0, 2, 4]), tensor([1, 3, 5])], [STRIDED], [0, 2, 4, 1, 3, 5]),  # no rows of samples
    ([tensor([0, 2]), tensor([1, 3, 5])], [STRIDED], [0, 2, 1, 3, 5]),
    ([None, tensor([1, 3])], [STRIDED], [1, 3]),
    ([tensor([0, 1]), tensor([7, 8])], [[range(2), range(2)]], [0, 1]),  # the same samples, computed twice
    ([(tensor([0, 2]), 1.0), (tensor([1, 3]), 3.0)], [STRIDED], ([0, 1, 2, 3], 2.0)),
    ([{"a": [0, 2]}, {"a": [1, 3], "b": tensor([5, 4])}], [STRIDED], {"a": [0, 1, 2, 3], "b": [5, 4]}),
])  # fmt: skip
def test_rows_of_samples_get_the_order_of_the_batch(values, divisions, joined):
    found = StepOutputs(values, [2, 2]).joined(divisions)
    if isinstance(found, dict):
        found = {name: shown(value) for name, value in found.items()}
    assert (tuple(map(shown, found)) if isinstance(found, tuple) else shown(found)) == joined


class OwnReduction(Metric):
    """A product, or whatever ``reduction`` makes of parts."""

    def __init__(self, reduction: Any) -> None:
        super().__init__()
        self.add_state("value", torch.ones(()), dist_reduce_fx=reduction)

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.value = self.value * (preds + target).abs().clamp(0.5, 2).prod()

    def compute(self) -> torch.Tensor:
        return self.value


class OneValue(aggregation.RunningMean):
    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        super().update(preds)


def in_parts(metric: Metric, seen: Any, steps: int, parts: int) -> Metric:
    """``metric`` after ``steps``, each put together from what ``parts`` micro-batches gained."""
    for step in range(steps):
        gained = []
        for part in zip(*(values[step].chunk(parts) for values in seen), strict=True):
            alone = metric.clone()
            alone.reset()
            alone.update(*part)
            gained.append(metric_states(alone))
        add_states(metric, "metric", gained, keep_step_value=True)
    return metric


@pytest.mark.parametrize("make", [
    regression.PearsonCorrCoef,
    regression.ConcordanceCorrCoef,
    partial(OwnReduction, partial(torch.prod, dim=0)),
    partial(OneValue, window=3),
    partial(OneValue, window=9),
])  # fmt: skip
def test_a_metric_put_together_from_micro_batches_is_that_of_whole_batches(make):
    seen = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seen[1] += seen[0]
    whole = make().set_dtype(torch.float64)
    for preds, target in zip(*seen, strict=True):
        whole.update(preds, target)
    parts = in_parts(make().set_dtype(torch.float64), seen, steps=5, parts=3)
    torch.testing.assert_close(parts.compute(), whole.compute())


@pytest.mark.parametrize("reduction", [None, partial(torch.mean, dim=0)])
def test_a_reduction_that_depends_on_the_parts_is_refused(reduction):
    with pytest.raises(UnsupportedFeatureError, match=r"metric \(OwnReduction\) has the state 'value'.*Give add_state"):
        in_parts(OwnReduction(reduction), torch.randn(2, 2, 4), steps=2, parts=2)


@pytest.mark.parametrize(("metric", "remedy"), [
    (MinMaxMetric(regression.MeanSquaredError()), "Log the metric inside it"),
    (regression.NormalizedRootMeanSquaredError(), r"Log MeanSquaredError\(squared=False\)"),
])  # fmt: skip
def test_a_metric_that_has_no_parts_is_refused_with_a_remedy(metric, remedy):
    with pytest.raises(UnsupportedFeatureError, match=rf"metric \({type(metric).__name__}\).*{remedy}"):
        in_parts(metric, torch.randn(2, 2, 4), steps=1, parts=2)
