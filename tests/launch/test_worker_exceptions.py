"""Exceptions keep class, message and attributes between processes."""

from __future__ import annotations

import builtins
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lightning_recycle.launch.outside_worker import patiently
from lightning_recycle.launch.worker_exceptions import dump_exception, from_users_code, restore_chain
from lightning_recycle.runtime.machine_errors import suspicion_of


class Pruned(Exception):
    def __init__(self, trial: int, value: Any) -> None:
        super().__init__(f"trial {trial} is pruned")
        self.trial, self.value = trial, value


class Prefixed(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(f"prefix {text}")  # Python's own pickle would put it before the message again


class Slotted(ValueError):
    __slots__ = ("trial",)

    def __init__(self, *, trial: int) -> None:
        self.trial = trial


@dataclass(frozen=True)
class Frozen(Exception):
    trial: int


class Missing(OSError):
    def __init__(self, trial: int) -> None:
        super().__init__(2, "missing", f"{trial}.txt")
        self.trial = trial


class PicklesItself(Exception):
    def __init__(self, trial: int, text: str) -> None:
        super().__init__(text)
        self.trial = trial

    def __reduce__(self) -> Any:
        return type(self), (self.trial, str(self))


class PicklesItselfWrongly(PicklesItself):
    def __reduce__(self) -> Any:
        return type(self), ()


GROUP: Any = getattr(builtins, "ExceptionGroup", None)  # of Python 3.11


def sent(error: BaseException) -> Any:
    data = dump_exception(error)
    assert data is not None
    return pickle.loads(data)


@pytest.mark.parametrize(
    "error",
    [
        Pruned(3, 0.5),
        Pruned(trial=3, value=0.5),
        Slotted(trial=3),
        Frozen(3),
        Missing(3),
        PicklesItself(3, "text"),
        PicklesItselfWrongly(3, "text"),
    ],
)
def test_class_message_and_attributes_arrive(error: Any) -> None:
    arrived = sent(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.args == error.args
    assert arrived.trial == 3


def test_what_built_in_classes_keep_besides_their_arguments_arrives() -> None:
    assert str(sent(Prefixed("text"))) == "prefix text"
    arrived = sent(Missing(3))
    assert (arrived.errno, arrived.filename) == (2, "3.txt")
    assert sent(SystemExit(4)).code == 4
    assert sent(UnicodeDecodeError("ascii", b"\xff", 0, 1, "why")).start == 0
    assert sent(ImportError("no", name="module")).name == "module"


def test_members_that_cannot_be_pickled_are_left_out() -> None:
    error = Pruned(3, threading.Lock())
    arrived = sent(error)
    assert (type(arrived), arrived.trial, hasattr(arrived, "value")) == (Pruned, 3, False)
    assert sent(ValueError(threading.Lock())).args[0].startswith("<unlocked")


def test_classes_without_a_name_arrive() -> None:
    class Local(Pruned):
        pass

    arrived = sent(Local(3, 0.5))
    assert (type(arrived).__name__, arrived.trial, arrived.value) == ("Local", 3, 0.5)


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = error.__context__ = cause
    return error


def raised_within(error: BaseException, context: BaseException, hidden: bool = False) -> BaseException:
    error.__context__, error.__suppress_context__ = context, hidden
    return error


def test_causes_and_contexts_arrive() -> None:
    arrived = sent(raised_from(Pruned(3, 0.5), raised_within(KeyError("inner"), ValueError("first"))))
    assert (type(arrived), type(arrived.__cause__)) == (Pruned, KeyError)
    assert arrived.__context__ is arrived.__cause__
    inner = arrived.__cause__.__context__
    assert (type(inner), inner.args) == (ValueError, ("first",))
    assert arrived.__cause__.__cause__ is None
    hidden = sent(raised_within(KeyError("shown"), ValueError("hidden"), hidden=True))
    assert (hidden.__suppress_context__, type(hidden.__context__)) == (True, ValueError)


def test_a_cause_that_cannot_be_pickled_arrives_without_what_keeps_it() -> None:
    arrived = sent(raised_from(KeyError("outer"), Pruned(3, threading.Lock())))
    assert (type(arrived.__cause__), arrived.__cause__.trial) == (Pruned, 3)


def test_the_causes_of_a_worker_come_before_the_traceback_that_this_process_adds() -> None:
    arrived = sent(raised_from(KeyError("outer"), raised_within(ValueError("inner"), OSError("first"))))
    arrived.__cause__ = traceback = Exception("In worker (0, 1)")  # as all exceptions of workers get it
    restore_chain(arrived)
    assert type(arrived.__cause__) is ValueError
    assert type(arrived.__cause__.__context__) is OSError
    assert arrived.__cause__.__context__.__cause__ is traceback
    assert not [name for name in vars(arrived) if "recycle" in name]


def test_a_chain_that_has_a_loop_arrives() -> None:
    error, cause = KeyError("a"), ValueError("b")
    error.__cause__, cause.__cause__ = cause, error
    arrived = sent(error)
    assert arrived.__cause__.__cause__ is arrived
    arrived.__cause__ = Exception("In worker (0, 1)")
    restore_chain(arrived)
    assert arrived.__cause__.__cause__ is arrived


@pytest.mark.skipif(GROUP is None, reason="Python has no exception groups")
def test_a_group_arrives_whatever_its_members_hold() -> None:
    inner = GROUP("inner", [Pruned(3, threading.Lock()), ValueError("fine")])
    group = GROUP("outer", [inner, raised_from(KeyError("outer"), OSError("cause"))])
    arrived = sent(group)
    assert (type(arrived), arrived.message) == (GROUP, "outer")
    (pruned, fine), key = arrived.exceptions[0].exceptions, arrived.exceptions[1]
    assert (type(pruned), pruned.trial, str(fine)) == (Pruned, 3, "fine")
    assert type(key.__cause__) is OSError


@pytest.mark.skipif(GROUP is None, reason="Python has no exception groups")
def test_a_member_of_a_group_without_any_pickle_arrives_as_its_built_in_class() -> None:
    class Local(ValueError):
        lock = threading.Lock()

    arrived = sent(GROUP("outer", [Local("text"), Frozen(3)]))
    assert [type(member) for member in arrived.exceptions] == [ValueError, Frozen]
    assert str(arrived.exceptions[0]) == "Local: text"
    assert dump_exception(Local("text")) is None


# ---------------------------------------------------------------------- tracebacks


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
