"""What the launching process sends to workers: its settings, and an error for what cannot be sent."""

import io
import os
import pickle
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.launch.worker_payload import Settings, dump, modules_found
from lightning_recycle.pickling import MainModule, dumps


@pytest.fixture(autouse=True)
def _no_resolvers_stay() -> Iterator[None]:
    yield
    OmegaConf.clear_resolvers()


def test_resolvers_registered_in_a_function_travel_and_one_that_cannot_does_not_end_the_run():
    factor, lock = 2, threading.Lock()
    OmegaConf.register_new_resolver("times", lambda x: factor * x)
    OmegaConf.register_new_resolver("locked", lambda x: (lock, x))
    sent = dumps(Settings.capture().resolvers)
    OmegaConf.clear_resolvers()
    settings = Settings.capture()
    settings.resolvers.update(pickle.loads(sent))
    settings.restore()
    assert OmegaConf.create({"weight": "${times:2}"}).weight == 4
    assert not OmegaConf.has_resolver("locked")


def test_hydras_configuration_of_the_job_travels(monkeypatch):
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    with initialize_config_module("lightning_recycle.conf", version_base=None):
        HydraConfig.instance().set_config(compose("plan", return_hydra_config=True))
    sent = dumps(Settings.capture())
    HydraConfig.instance().cfg = None
    pickle.loads(sent).restore()
    assert HydraConfig.get().job.config_name == "plan"


class Refuses:
    """Says itself that it cannot be pickled."""

    def __getstate__(self) -> Any:
        raise TypeError("it holds a connection")


def test_something_that_refuses_to_be_pickled_is_named_with_its_reason():
    call = SimpleNamespace(arguments={"model": {"helpers": [1, Refuses()]}}, trainer=None)
    expected = r"model\['helpers'\]\[1\] cannot be sent to the worker processes: TypeError: it holds a connection\."
    with pytest.raises(ConfigurationError, match=expected):
        dump((call,), MainModule(imported=False), io.BytesIO())


def test_an_open_file_is_refused_by_name_and_no_copy_of_it_is_sent():
    with open(__file__) as file:
        call = SimpleNamespace(arguments={"model": {"log": file}}, trainer=None)
        with pytest.raises(ConfigurationError, match=r"model\['log'\] cannot be sent .*: cannot pickle an open file\."):
            dump((call,), MainModule(imported=False), io.BytesIO())


def test_two_threads_that_start_processes_leave_the_environment_as_it_was():
    before, has_entered, may_leave = dict(os.environ), threading.Event(), [threading.Event(), threading.Event()]

    def start(number: int) -> None:
        with modules_found():
            has_entered.set()
            may_leave[number].wait(30)

    first, second = (threading.Thread(target=start, args=(number,)) for number in range(2))
    first.start()
    assert has_entered.wait(30)
    second.start()
    second.join(0.3)  # unless it waits, it is in the block now, and leaves it last
    for event, thread in zip(may_leave, (first, second), strict=True):
        event.set()
        thread.join()
    assert dict(os.environ) == before
