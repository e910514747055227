"""Exceptions keep class, message and attributes between processes."""

import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lightning_recycle.launch.worker_payload import dump_exception, from_users_code
from lightning_recycle.launch.worker_process import explain, retry_connecting
from lightning_recycle.runtime.machine_errors import suspicion_of
from lightning_recycle.runtime.stage import Stage
from lightning_recycle.session.configuration import check_optimizers


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


@pytest.mark.parametrize("error", [
    Pruned(3, 0.5),
    Pruned(trial=3, value=0.5),
    Slotted(trial=3),
    Frozen(3),
    Missing(3),
    PicklesItself(3, "text"),
    PicklesItselfWrongly(3, "text"),
])  # fmt: skip
def test_class_message_and_attributes_arrive(error):
    arrived = sent(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.args == error.args
    assert arrived.trial == 3


def test_what_built_in_classes_keep_besides_their_arguments_arrives():
    assert str(sent(Prefixed("text"))) == "prefix text"
    arrived = sent(Missing(3))
    assert (arrived.errno, arrived.filename) == (2, "3.txt")
    assert sent(SystemExit(4)).code == 4
    assert sent(UnicodeDecodeError("ascii", b"\xff", 0, 1, "why")).start == 0
    assert sent(ImportError("no", name="module")).name == "module"


def test_members_that_cannot_be_pickled_are_left_out():
    arrived = sent(Pruned(3, threading.Lock()))
    assert (type(arrived), arrived.trial, hasattr(arrived, "value")) == (Pruned, 3, False)
    assert sent(ValueError(threading.Lock())).args[0].startswith("<unlocked")


def test_classes_without_a_name_arrive():
    class Local(Pruned):
        pass

    arrived = sent(Local(3, 0.5))
    assert (type(arrived).__name__, arrived.trial, arrived.value) == ("Local", 3, 0.5)


def test_a_class_that_cannot_be_pickled_has_no_pickle():
    class Local(ValueError):
        lock = threading.Lock()

    assert dump_exception(Local("text")) is None


# ---------------------------------------------------------------------- tracebacks


class Bug(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.nn.functional.linear(x, None)


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


def test_what_leads_to_the_users_code_is_left_out_and_what_follows_is_shown():
    text = from_users_code(raised(lambda: nn.Sequential(Bug())(torch.ones(1))))
    assert "in forward" in text.splitlines()[1]
    assert "container.py" not in text
    assert text.splitlines()[-1].startswith("TypeError")


def test_an_exception_without_users_code_is_shown_whole():
    text = from_users_code(raised(lambda: nn.Sequential(nn.Linear(1, 2), nn.Linear(1, 2))(torch.ones(1))))
    assert "container.py" in text
    assert "linear.py" in text
    text = from_users_code(raised(lambda: suspicion_of(3)))
    assert "machine_errors.py" in text


def test_of_an_error_with_a_remedy_the_frames_that_lead_to_it_are_left_out():
    text = from_users_code(raised(lambda: check_optimizers([])))
    assert text.count("  File ") == 1
    assert "configuration.py" in text
    assert "torch.optim.AdamW(self.parameters())" in text


def test_an_error_in_a_layer_of_torch_is_shown_from_that_layer_on():
    layers = [nn.Linear(1, 2), nn.Linear(1, 2)]
    stage = Stage(layers, 0, 1, torch.device("cpu"))
    text = from_users_code(raised(lambda: stage.forward(0, 0, torch.ones(3, 1), split_backward=False)))
    assert "linear.py" in text
    assert "stage.py" not in text
    if sys.version_info >= (3, 11):
        assert "In layers[1], Linear(in_features=1" in text
        assert "(3, 2) torch.float32" in text


def test_the_cause_of_an_exception_is_shown_likewise():
    text = from_users_code(raised(lambda: chained()))
    first, second = text.split("The above exception was the direct cause of the following exception:")
    assert "in chained" in first
    assert "in forward" in first
    assert "from a type error" in second


def users_inner() -> Any:
    raise ValueError("why")


def users_outer() -> Any:
    return retry_connecting(users_inner, 0.0, "")


def test_frames_of_the_package_between_those_of_the_user_are_left_out():
    text = from_users_code(raised(lambda: users_outer()))
    assert "in users_outer" in text
    assert "in users_inner" in text
    assert "outside_worker.py" not in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no exception groups")
def test_members_of_a_group_are_shown_likewise():
    def grouped() -> None:
        raise ExceptionGroup(  # noqa: F821 - of Python 3.11
            "both", [raised(lambda: users_outer()), raised(lambda: nn.Sequential(Bug())(torch.ones(1)))]
        )

    text = from_users_code(raised(lambda: grouped()))
    assert "in users_inner" in text
    assert "outside_worker.py" not in text
    assert "container.py" not in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_torchs_error_without_a_process_group_says_that_there_is_none():
    with pytest.raises(ValueError, match="process group") as caught:
        torch.distributed.get_world_size()
    explain(caught.value)
    assert caught.value.__notes__[0].startswith("ReCycleStrategy's workers have no process group")
