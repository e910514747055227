"""Matrices of cases of which the suite runs a seeded sample; ``make test-exhaustive`` runs the others."""

import random
from collections.abc import Iterable
from typing import Any

import pytest

LONGEST = ("test_on_devices.py", "test_boundary_checkpoints.py")  # minutes
LONG_SAMPLE = 2
"""How many of the tests marked ``long`` are in a run of all tests."""


def chooses_by_default(config: pytest.Config) -> bool:
    """Whether the command line leaves it to pyproject.toml which marked tests run, without ``--long``."""
    options = config.getini("addopts")
    return not config.getoption("long") and bool(config.getoption("markexpr") == options[options.index("-m") + 1])


def sampled(
    cases: Iterable[Any], count: int, seed: int = 0, rest: pytest.MarkDecorator = pytest.mark.exhaustive
) -> list[Any]:
    """``cases`` as parameters, all but ``count`` of them marked with ``rest``; tuples are several arguments."""
    cases = list(cases)
    kept = set(random.Random(seed).sample(range(len(cases)), count))
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if i in kept else rest)
        for i, case in enumerate(cases)
    ]
