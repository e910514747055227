"""Compiled layers and modules train as the others do, and a compilation is no reason to suspect anybody.

The backend is "aot_eager": all of torch.compile but the compiler of the machine's own language.
"""

from typing import Any

import lightning as L
import pytest
import torch
from support.models import GLOBAL_BATCH, STEPS, Regression, dataset
from support.training import QUIET, TOLERANCE, difference, failures, fit, on_one_device
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_recycle.callbacks import Fault
from lightning_recycle.launch.launcher import SupervisorLauncher

pytestmark = pytest.mark.long


def compiled(layer: nn.Module) -> Any:
    return torch.compile(layer, backend="aot_eager", fullgraph=True)


class CompiledLayers(Regression):
    def configure_pipeline(self) -> list[Any]:
        return [compiled(layer) for layer in super().configure_pipeline()]


@pytest.mark.long
def test_compiled_layers_train_the_same_when_a_worker_dies():
    one, expected = CompiledLayers().double(), Regression().double()
    for model in (one, expected):
        on_one_device(max_steps=STEPS).fit(model, DataLoader(dataset(), GLOBAL_BATCH))
    model = CompiledLayers().double()
    run = fit(model, 2, 2, [Fault("kill", pipeline=1, stage=0, step=4)])
    assert failures(run) == [(1, 0)]
    assert not any(event.kind == "suspected" for event in run.strategy.history)
    assert difference(one.state_dict(), model.state_dict()) < TOLERANCE  # the names are those of one device, too
    plain = {name.replace("_orig_mod.", ""): tensor for name, tensor in model.state_dict().items()}
    assert difference(expected.state_dict(), plain) < TOLERANCE


class Configured(L.LightningModule):
    """Makes and compiles its network where Lightning says so: in the workers."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = compiled(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_what_configure_model_makes_and_compiles_comes_home():
    one, model = Configured(), Configured()
    on_one_device(max_steps=STEPS).fit(one, DataLoader(dataset(), GLOBAL_BATCH))
    run = L.Trainer(accelerator="cpu", devices=2, strategy="recycle", max_steps=STEPS, **QUIET)
    run.fit(model, DataLoader(dataset(), GLOBAL_BATCH // 2))
    assert "net._orig_mod.0.weight" in one.state_dict()
    assert difference(one.state_dict(), model.state_dict()) < TOLERANCE
    assert len(run.optimizers[0].state) == 4


class InPlace(Configured):
    """Compiled where only the launching process sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.net.compile(backend="aot_eager")


class Itself(Configured):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1).double()
        self.compile(backend="aot_eager")


def test_a_module_that_compiled_itself_trains_without():
    run = L.Trainer(accelerator="cpu", devices=2, strategy="recycle", max_steps=1, **QUIET)
    with pytest.warns(UserWarning, match="Itself will run without being compiled"):
        run.fit(Itself(), DataLoader(dataset(), GLOBAL_BATCH // 2))
    assert run.global_step == 1


def test_a_compilation_that_workers_do_not_get_is_told(monkeypatch):
    monkeypatch.setattr(SupervisorLauncher, "_launch", lambda *_: None)
    run = L.Trainer(accelerator="cpu", devices=2, strategy="recycle", max_steps=1, **QUIET)
    with pytest.warns(UserWarning, match=r"InPlace\.net will run without being compiled.*configure_model"):
        run.fit(InPlace(), DataLoader(dataset(), GLOBAL_BATCH))
