"""Exceptions keep class, message and attributes between processes."""

from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_recycle.launch.exceptions import dump_exception


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
