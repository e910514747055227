"""A module that is made recordable stays what it is for everybody else."""

import copy
import pickle
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_recycle.model.recorded_module import RecordedModule, make_recorded, restore_class


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.seen: list[str] = []

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.seen.append(name)  # a user's own


def test_logging_is_recorded_and_otherwise_reaches_the_users_method():
    module = make_recorded(Module())
    module.recorded_logs = []
    module.log("a", 1.0, on_step=True)
    assert [(name, value, kwargs["on_step"]) for name, value, kwargs in module.recorded_logs] == [("a", 1.0, True)]
    module.recorded_logs = None
    module.log("b", 1.0)
    assert module.seen == ["b"]


def test_it_keeps_its_name_its_state_and_its_class_in_copies():
    original = Module()
    module = make_recorded(original)
    assert module is original
    assert make_recorded(module) is module
    assert (type(module).__name__, type(module).__module__) == (Module.__name__, Module.__module__)
    for double in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert type(double) is Module
        assert torch.equal(double.layer.weight, module.layer.weight)
    restore_class(module)
    assert type(original) is Module
    assert not isinstance(original, RecordedModule)
