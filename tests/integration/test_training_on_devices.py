"""Training on CUDA devices, which workers share where there are too few (make gpu).

None of these tests has run on a device yet. What they are made of has, on the processor.
"""

from typing import Any

import lightning as L
import pytest
import torch
from support.device_models import Compiled, Heavy, SharedDevices, Taken, Wide
from support.models import GLOBAL_BATCH, GLOBAL_MICROBATCHES, STEPS, dataset
from support.options import recycle_strategy
from support.training import QUIET, TOLERANCE, difference, failures, plain_loop
from torch.utils.data import DataLoader, TensorDataset

from lightning_recycle.callbacks import Fault, FaultInjectionCallback

MEGABYTE = 1 << 20
PIPELINES, STAGES = 2, 2
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
KILLS = [
    pytest.param([], id="undisturbed"),
    pytest.param([Fault("kill", pipeline=1, stage=0, step=3)], id="kill in a forward"),
    pytest.param([Fault("kill", pipeline=0, stage=1, step=4, at="reduce")], id="kill in a reduction"),
]
KILL_LATE = [Fault("kill", pipeline=1, stage=0, step=6)]


def train(model: Any, device: str, faults: Any = (), strategy: Any = None, **options: Any) -> L.Trainer:
    accelerator: Any = SharedDevices() if device == "cuda" else "cpu"
    arguments = {"pipeline_parallel_size": STAGES, "num_microbatches": GLOBAL_MICROBATCHES // PIPELINES}
    run = L.Trainer(
        accelerator=accelerator,
        devices=PIPELINES * STAGES,
        strategy=recycle_strategy(**{**arguments, **(strategy or {})}),
        callbacks=[FaultInjectionCallback(list(faults)), *options.pop("callbacks", [])],
        **{"max_steps": STEPS, **QUIET, **options},
    )
    tensors = (t.to(next(iter(model.state_dict().values())).dtype) for t in dataset().tensors)
    run.fit(model, DataLoader(TensorDataset(*tensors), GLOBAL_BATCH // PIPELINES))
    return run


def regroup_seconds(run: L.Trainer) -> float:
    """From the failure until the others were connected again."""
    times = {event.kind: event.time for event in run.strategy.history}
    return float(times["regrouped"] - times["failure"])


@pytest.mark.parametrize("faults", KILLS)
@pytest.mark.parametrize(("device", "transport"), [
    pytest.param("cpu", "gloo", marks=pytest.mark.long),
    pytest.param("cuda", "gloo", marks=pytest.mark.gpu),
    pytest.param("cuda", "nccl", marks=pytest.mark.gpu),
])  # fmt: skip
def test_weights_are_those_of_one_process(device, transport, faults):
    model = Wide().double()
    expected = plain_loop(model, dataset())
    run = train(model, device, faults, {"transport": transport})
    assert failures(run) == [(fault.pipeline, fault.stage) for fault in faults]
    if faults:
        print(f"{transport}: connected {regroup_seconds(run):.3f} s after the failure")
    assert difference({name: t.cpu() for name, t in model.state_dict().items()}, expected) < TOLERANCE


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.long), CUDA])
def test_half_precision_trains_and_survives(device):
    model = Wide()
    run = train(model, device, [Fault("kill", pipeline=1, stage=0, step=3)], precision="bf16-mixed")
    assert failures(run) == [(1, 0)]
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


class MovesOnce(L.Callback):
    """Asks for other sizes of the stages."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.strategy.move_layers([1, 3])


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_layers_move_from_device_to_device(transport):
    model = Wide().double()
    expected = plain_loop(model, dataset())
    run = train(model, "cuda", KILL_LATE, {"transport": transport}, callbacks=[MovesOnce()])
    assert [event.details["cuts"] for event in run.strategy.history if event.kind == "layers_moved"] == [(0, 1, 4)]
    assert failures(run) == [(1, 0)]
    assert difference({name: t.cpu() for name, t in model.state_dict().items()}, expected) < TOLERANCE


@pytest.mark.gpu
def test_peers_on_devices_hold_and_compute_the_same_bits():
    model = Wide().double()
    run = train(model, "cuda", strategy={"checksum_every": 1, "verify": 0.5})
    assert not {"corruption", "disputed"} & {event.kind for event in run.strategy.history}


@pytest.mark.gpu
def test_a_survivor_takes_no_more_than_its_plan_says(tmp_path):
    limit = 64 * MEGABYTE
    model = Heavy().double()
    faults = [Fault("kill", pipeline=1, stage=0, step=5)]
    run = train(model, "cuda", faults, {"memory": limit}, callbacks=[Taken(tmp_path)])
    assert failures(run) == [(1, 0)]
    print("before:", Taken.read(tmp_path, 4), "after:", Taken.read(tmp_path, 3), "limit:", limit)
    assert max(Taken.read(tmp_path, 3)) <= limit


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_layers_train_the_same(mode):
    """With "reduce-overhead" each layer is a CUDA graph, and several micro-batches are in flight."""
    model, plain = Compiled(mode).double(), Wide().double()
    expected = plain_loop(plain, dataset())
    assert failures(train(model, "cuda", [Fault("kill", pipeline=1, stage=0, step=4)])) == [(1, 0)]
    trained = {name.replace("_orig_mod.", ""): tensor.cpu() for name, tensor in model.state_dict().items()}
    assert difference(trained, expected) < TOLERANCE
