"""A run of all tests has a sample of the long ones, whatever else is marked and left out."""

import pytest
from support.sampling import LONG_SAMPLE, chooses_by_default


def test_only_a_sample_of_the_long_tests_is_run_by_default(request: pytest.FixtureRequest) -> None:
    long = [item.nodeid for item in request.session.items if item.get_closest_marker("long")]
    assert len(long) <= LONG_SAMPLE or not chooses_by_default(request.config), long
