import pytest
from normalization import CASES, case, compare
from support.sampling import sampled


@pytest.mark.parametrize("number", sampled(range(CASES), 12))
def test_no_distribution_has_a_better_plan_than_the_chosen_one(number: int) -> None:
    found = compare(*case(number))
    assert found.by_periods <= 1e-9
    assert found.plans <= found.distributions
