"""Which frames of a worker's exception are shown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_recycle.launch.rejoin import patiently
from lightning_recycle.launch.tracebacks import from_users_code
from lightning_recycle.runtime.machine_errors import suspicion_of


class Bug(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.nn.functional.linear(x, None)  # type: ignore[arg-type]


def raised(function: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function()
    caught.value.__traceback__ = caught.tb.tb_next.tb_next  # neither this function nor the lambda
    return caught.value


def chained() -> Any:
    try:
        return Bug()(torch.ones(1))
    except TypeError as error:
        raise ValueError("from a type error") from error


def test_what_leads_to_the_users_code_is_left_out_and_what_follows_is_shown() -> None:
    text = from_users_code(raised(lambda: nn.Sequential(Bug())(torch.ones(1))))
    assert "in forward" in text.splitlines()[1]
    assert "container.py" not in text
    assert text.splitlines()[-1].startswith("TypeError")


def test_an_exception_without_users_code_is_shown_whole() -> None:
    text = from_users_code(raised(lambda: nn.Sequential(nn.Linear(1, 2), nn.Linear(1, 2))(torch.ones(1))))
    assert "container.py" in text
    assert "linear.py" in text
    text = from_users_code(raised(lambda: suspicion_of(3)))  # type: ignore[arg-type]
    assert "machine_errors.py" in text


def test_the_cause_of_an_exception_is_shown_likewise() -> None:
    text = from_users_code(raised(lambda: chained()))
    first, second = text.split("The above exception was the direct cause of the following exception:")
    assert "in chained" in first
    assert "in forward" in first
    assert "from a type error" in second


def users_inner() -> Any:
    raise ValueError("why")


def users_outer() -> Any:
    return patiently(users_inner, (OSError,), 0.0, "")


def test_frames_of_the_package_between_those_of_the_user_are_left_out() -> None:
    text = from_users_code(raised(lambda: users_outer()))
    assert "in users_outer" in text
    assert "in users_inner" in text
    assert "rejoin.py" not in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no exception groups")
def test_members_of_a_group_are_shown_likewise() -> None:
    def grouped() -> None:
        raise ExceptionGroup(  # noqa: F821 - of Python 3.11
            "both", [raised(lambda: users_outer()), raised(lambda: nn.Sequential(Bug())(torch.ones(1)))]
        )

    text = from_users_code(raised(lambda: grouped()))
    assert "in users_inner" in text
    assert "rejoin.py" not in text
    assert "container.py" not in text
