import pytest
import reduction
import torch
from torch import nn

from lightning_recycle.runtime.gradients import GradientBuffers

pytestmark = pytest.mark.long


def test_a_run_has_as_many_buckets_as_the_table_says():
    numbers, cap = 2096, 0.025
    found = reduction.measure(cap, 1, 1, numbers=numbers, seconds=0.0, warmup=1)
    parameters = [nn.Parameter(torch.zeros(numbers)) for _ in range(reduction.LAYERS)]
    assert found.buckets == len(GradientBuffers(parameters, torch.device("cpu"), cap * 2**20).buckets(0)) == 3
    assert found.reduce > 0.0
    assert found.steps.count == 1
