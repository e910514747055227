import pytest
from planner import normalization_case, normalized

pytestmark = pytest.mark.long

CASES = 296
BOUNDS_MISLEAD = (97, 160, 243, 284)


@pytest.mark.parametrize("number", BOUNDS_MISLEAD)
def test_where_bounds_mislead_plans_decide(number: int) -> None:
    found = normalized(*normalization_case(number))
    assert found.by_bounds > 1e-9
    assert found.by_periods <= 1e-9
    assert found.plans <= found.distributions


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [number for number in range(CASES) if number not in BOUNDS_MISLEAD])
def test_no_distribution_has_a_better_plan_than_the_chosen_one(number: int) -> None:
    assert normalized(*normalization_case(number)).by_periods <= 1e-9
