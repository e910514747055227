"""Settings of the launching process that workers get."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator

import pytest
from omegaconf import OmegaConf

from lightning_recycle.launch.worker_payload import Settings
from lightning_recycle.pickling import dumps


@pytest.fixture(autouse=True)
def _no_resolvers_stay() -> Iterator[None]:
    yield
    OmegaConf.clear_resolvers()


def test_resolvers_registered_in_a_function_travel_and_one_that_cannot_does_not_end_the_run() -> None:
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
