"""What users see when workers die, when everything dies, and when it is their own code that fails."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from support.models import Regression
from support.sampling import sampled
from support.training import exact_fit, failures, fit
from torch import Tensor

from lightning_recycle.errors import ReCycleError, StageLostError


class UserBug(Exception):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> Any:
        return UserBug, (self.args[0], self.code)


class BrokenLoss(Regression):
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.trainer.global_step == 2:
            raise UserBug("a bug in loss", 42)
        return super().loss(output, target)


def test_a_users_exception_surfaces_once_as_itself_and_quickly():
    started = time.monotonic()
    with pytest.raises(UserBug, match="a bug in loss") as caught:
        fit(BrokenLoss().double(), 2, 2)
    assert caught.value.code == 42
    assert "in loss" in str(caught.value.__cause__)
    assert "In worker" in str(caught.value.__cause__)
    assert time.monotonic() - started < 15


class Retries(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.strategy.grid_rank == 1:
            try:
                {}["missing"]
            except KeyError as error:
                raise RuntimeError("the row cannot be read") from error


def test_an_exception_shows_its_cause_and_where_both_were_raised():
    with pytest.raises(RuntimeError, match="the row cannot be read") as raised:
        fit(Regression().double(), 2, 2, callbacks=[Retries()])
    shown = str(raised.value.__cause__)
    assert shown.startswith("In worker (0, 1):")
    assert "KeyError: 'missing'" in shown
    assert shown.count("in on_train_batch_start") == 2


# ---------------------------------------------------------------------- code that ends its process


class Leaves(L.Callback):
    """Calls ``leave(code)`` in its third step, on one worker or on all."""

    def __init__(self, leave: Callable[[Any], Any], code: Any, everywhere: bool = False) -> None:
        self._leave, self._code, self._everywhere = leave, code, everywhere

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and (self._everywhere or trainer.strategy.grid_rank == 1):
            self._leave(self._code)


@pytest.mark.parametrize("everywhere", sampled([False, True], 1, rest=pytest.mark.long))
@pytest.mark.parametrize("code", sampled([0, None], 1, rest=pytest.mark.long))
def test_sys_exit_without_an_error_is_one(code, everywhere):
    with pytest.raises(ReCycleError, match=r"Worker \(., .\) called sys\.exit\(0?\) before .*should_stop"):
        fit(Regression().double(), 2, 2, callbacks=[Leaves(sys.exit, code, everywhere)])


def test_sys_exit_with_a_status_ends_the_launching_process_with_it(caplog):
    with pytest.raises(SystemExit) as ended:
        fit(Regression().double(), 2, 2, callbacks=[Leaves(sys.exit, 3)])
    assert ended.value.code == 3
    assert "Worker (0, 1) called sys.exit(3)" in caplog.text


@pytest.mark.long
def test_a_process_that_just_ends_is_a_failure_whatever_its_status():
    assert failures(exact_fit(Regression().double(), 2, 2, callbacks=[Leaves(os._exit, 0)])) == [(0, 1)]
    with pytest.raises(StageLostError, match="it exited with code 0"):
        fit(Regression().double(), 2, 2, callbacks=[Leaves(os._exit, 0, everywhere=True)])
