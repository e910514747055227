"""Property tests with few examples in a run of all tests, and many in an exhaustive one."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def examples(few: int, many: int) -> pytest.MarkDecorator:
    """``examples``, a number for :func:`check_examples`, is ``few``, and ``many`` in an exhaustive run."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.exhaustive)])


def check_examples(check: Callable[[Any], None], number: int) -> None:
    """Calls ``check`` with hypothesis' ``data`` ``number`` times, the same in every run."""

    def drawn(data: Any) -> None:
        check(data)

    settings(max_examples=number, deadline=None, derandomize=True)(given(data=st.data())(drawn))()
