"""The helpers of multiprocessing may die: the fork server that starts workers, and its resource tracker."""

import time
from typing import Any

import psutil
import pytest
from support.growth import AwaitReplacement, Marks, Meanwhile, causes, kill, mark_of, rejoined
from support.models import GLOBAL_BATCH, Regression, dataset
from support.sampling import sampled
from support.training import exact_fit, failures

pytestmark = pytest.mark.long

STEPS = 40


def helpers(name: str) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if f"multiprocessing.{name}" in " ".join(child.cmdline())]


@pytest.mark.parametrize("name", sampled(["forkserver", "resource_tracker"], 1))
def test_the_run_goes_on_and_so_do_replacements_and_the_next_run(name, tmp_path):
    def strike(found: Any) -> None:
        for helper in helpers(name):
            helper.kill()
        time.sleep(1.0)  # nobody ends with it
        kill(found)

    first = [AwaitReplacement(range(20, STEPS), pace=0.1), Marks(tmp_path)]
    with Meanwhile(lambda: mark_of(tmp_path, 3, 0), strike):
        data = dataset(GLOBAL_BATCH * STEPS)
        strategy = {"max_restarts": 10}
        run = exact_fit(Regression().double(), 2, 2, data=data, max_steps=STEPS, strategy=strategy, callbacks=first)
    assert failures(run) == rejoined(run) == [(1, 1)]
    (cause,) = causes(run)
    assert cause == "it was killed by SIGKILL" if name == "resource_tracker" else "fork server" in cause
    assert failures(exact_fit(Regression().double(), 2, 2)) == []
