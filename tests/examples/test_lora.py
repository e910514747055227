"""Low-rank adapters of a Hugging Face model train as on one device, whoever dies, and nothing else changes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import lightning as L
import pytest
import torch
from support.training import QUIET, TOLERANCE, difference, failures, on_one_device
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_recycle import ReCycleStrategy
from lightning_recycle.callbacks import Fault, FaultInjectionCallback

if TYPE_CHECKING:
    from unmodified_lora import Adapted

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("peft") is None, reason="pip install peft")]

BATCH = 16
STEPS = 6


def adapted() -> Adapted:
    from unmodified_lora import Adapted  # slow: by the one process that runs these tests

    torch.manual_seed(0)
    return Adapted(dropout=0.0).double()


def loader(batch_size: int) -> DataLoader[Tensor]:
    from unmodified_lora import Repeating

    return DataLoader(Repeating(BATCH * STEPS), batch_size=batch_size)


def grid(devices: int, stages: int, *faults: Fault, **kwargs: Any) -> L.Trainer:
    strategy = ReCycleStrategy(pipeline_parallel_size=stages, num_microbatches=2)
    callbacks = [FaultInjectionCallback(list(faults))]
    return L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, callbacks=callbacks, **{**QUIET, **kwargs})


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    model = adapted()
    on_one_device(max_epochs=1).fit(model, loader(BATCH))
    return model.state_dict()


def trained(devices: int, stages: int, kill: Fault, expected: dict[str, torch.Tensor]) -> tuple[Any, set[str]]:
    """A model after an epoch, and the names of the tensors that changed: those of adapters, as ``expected``."""
    model, before = adapted(), adapted().state_dict()
    run = grid(devices, stages, kill, max_epochs=1)
    run.fit(model, loader(BATCH // 2))
    assert failures(run) == [(kill.pipeline, kill.stage)]
    assert difference(model.state_dict(), expected) < TOLERANCE
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    return model, changed


def test_adapters_of_an_ordinary_module_are_trained_and_the_rest_is_left(expected, tmp_path):
    from peft import PeftModel

    model, changed = trained(2, 1, Fault("kill", pipeline=1, stage=0, step=3), expected)
    model.model.save_pretrained(tmp_path)
    saved = PeftModel.from_pretrained(adapted().model.unload(), tmp_path).double().state_dict()
    assert {name for name in saved if "lora_" in name} == {name.removeprefix("model.") for name in changed}
    for name in changed:
        torch.testing.assert_close(saved[name.removeprefix("model.")], model.state_dict()[name])


def test_adapters_in_two_stages(expected):
    trained(4, 2, Fault("kill", pipeline=0, stage=1, step=2), expected)
