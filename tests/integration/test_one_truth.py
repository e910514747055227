"""Files and what is left after ``fit`` are those of one device: averages, states of no parameter, buffers, passes."""

import itertools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support.comparison import differences
from support.sampling import sampled
from support.training import TOLERANCE, failures, grid_trainer, on_one_device
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_recycle import UnsupportedFeatureError
from lightning_recycle.callbacks import Fault

BATCH, STEPS = 16, 3


def data() -> TensorDataset:
    x = torch.randn(BATCH * STEPS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        for parameter in self.net[2].parameters():
            parameter.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def run_on(
    stages: int,
    microbatches: int,
    dies: bool,
    model: L.LightningModule,
    callbacks: Any = (),
    make: Any = None,
    **more: Any,
) -> L.Trainer:
    """On one device if there are no ``stages``, else on 2 pipelines; ``make``: the loader of a batch size."""
    make = make or (lambda size: DataLoader(data(), size))
    more = {"max_epochs": 2, "callbacks": list(callbacks), "enable_checkpointing": bool(callbacks), **more}
    if not stages:
        run = on_one_device(**more)
        run.fit(model, make(BATCH))
        return run
    faults = [Fault("kill", 1, stages - 1, step=2)] if dies else []
    run = grid_trainer(2, stages, faults, {"num_microbatches": microbatches}, **more)
    run.fit(model, make(BATCH // 2))
    assert failures(run) == [(fault.pipeline, fault.stage) for fault in faults]
    return run


PLACES = list(itertools.product([1, 2], [1, 4], [False, True]))  # stages, micro-batches, whether one dies


class Hook(Callback):
    """Changes the state dict of checkpoints; keeps averages of the layers that its worker has."""

    def __init__(self, how: str) -> None:
        self.how, self.average = how, {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        now = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}
        self.average = {name: 0.5 * (self.average.get(name, value) + value) for name, value in now.items()}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        getattr(self, f"_{self.how}")(trainer, pl_module, checkpoint["state_dict"], checkpoint)

    def _replaces(self, trainer: Any, module: Any, state: Any, checkpoint: Any) -> None:
        checkpoint["state_dict"] = dict(self.average)

    def _writes(self, trainer: Any, module: Any, state: Any, checkpoint: Any) -> None:
        for name, value in self.average.items():
            state[name].copy_(value)

    def _adds(self, trainer: Any, module: Any, state: Any, checkpoint: Any) -> None:
        state.update({f"average.{name}": value for name, value in self.average.items()})

    def _drops_frozen(self, trainer: Any, module: Any, state: Any, checkpoint: Any) -> None:
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                del state[name]

    def _keeps_trained(self, trainer: Any, module: Any, state: Any, checkpoint: Any) -> None:
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        checkpoint["state_dict"] = {name: value for name, value in state.items() if name in trained}

    def _renames(self, trainer: Any, module: Any, state: Any, checkpoint: Any) -> None:
        checkpoint["state_dict"] = {name.removeprefix("net."): value for name, value in state.items()}

    def _leader_writes(self, trainer: Any, module: Any, state: Any, checkpoint: Any) -> None:
        if trainer.is_global_zero:
            state["note"] = torch.ones(1)
            state["net.0.bias"] = state["net.0.bias"] * 2

    def _leader_drops(self, trainer: Any, module: Any, state: Any, checkpoint: Any) -> None:
        if trainer.is_global_zero:
            del state["net.0.bias"]


HOOKS = ("replaces", "writes", "adds", "drops_frozen", "keeps_trained", "renames", "leader_writes")


def files(folder: Path) -> dict[str, Any]:
    return {path.name: torch.load(path)["state_dict"] for path in folder.glob("*.ckpt")}


def saving(folder: Path, how: str) -> list[Callback]:
    return [Hook(how), ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)]


@pytest.mark.parametrize(("how", "place"), sampled(itertools.product(HOOKS, PLACES), 2, seed=174))
def test_files_have_what_hooks_put_into_the_state_dict(tmp_path, how, place):
    run_on(0, 1, False, Net(), saving(tmp_path / "one", how))
    run_on(*place, Net(), saving(tmp_path / "grid", how))
    theirs, ours = files(tmp_path / "one"), files(tmp_path / "grid")
    assert len(theirs) == 3
    assert not list(differences(theirs, ours, TOLERANCE))


def test_what_one_worker_takes_from_another_stage_is_refused(tmp_path):
    with pytest.raises(UnsupportedFeatureError, match=r"Hook\.on_save_checkpoint\(\) takes net\.0\.bias"):
        run_on(2, 1, False, Net(), saving(tmp_path, "leader_drops"))


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        state = self.state["all"]
        state["steps"] = state.get("steps", 0) + 1
        state["half"] = torch.tensor(state["steps"] / 2)
        return found


class Kept(Net):
    """Its optimizer has a state of no parameter, and hooks set buffers that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.net[0].register_buffer("scale", torch.ones(2), persistent=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        if hasattr(self.net[0], "scale"):  # on the stage that has this layer
            self.net[0].scale = self.net[0].scale * 2

    def configure_optimizers(self) -> Any:
        return Counting(self.parameters(), lr=0.05)


@pytest.mark.parametrize(("place", "folder"), sampled(itertools.product(PLACES, [False, True]), 1))
def test_states_of_no_parameter_and_buffers_beside_state_dicts(tmp_path, place, folder):
    theirs, ours = Kept(), Kept()
    one, grid = run_on(0, 1, False, theirs), run_on(*place, ours)
    assert not list(differences(dict(theirs.named_buffers()), dict(ours.named_buffers()), TOLERANCE))
    expected = one.optimizers[0].state["all"]
    assert grid.optimizers[0].state["all"] == expected == {"steps": 6, "half": torch.tensor(3.0)}
    grid.save_checkpoint(tmp_path / "grid.ckpt")
    assert torch.load(tmp_path / "grid.ckpt")["optimizer_states"][0]["state"]["all"] == expected
    stages, microbatches, _ = place
    options = {"num_microbatches": microbatches, "save_distributed_checkpoint": folder}
    saves = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, filename="{step}")
    part = grid_trainer(2, stages, (), options, max_steps=2, callbacks=[saves], enable_checkpointing=True)
    part.fit(Kept(), DataLoader(data(), BATCH // 2))
    again = grid_trainer(2, stages, (), {"num_microbatches": microbatches}, max_epochs=2)
    again.fit(Kept(), DataLoader(data(), BATCH // 2), ckpt_path=tmp_path / "saved" / "step=2.ckpt")
    assert again.optimizers[0].state["all"] == expected


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([data()[i] for i in range(BATCH * STEPS)])


class Batches:
    """The same batches each time, whatever their number of pipelines."""

    def __iter__(self) -> Any:
        return iter(DataLoader(data(), BATCH))


LOADERS = {
    "addresses": lambda size: DataLoader(data(), size),
    "stream": lambda size: DataLoader(Stream(), size),
    "batches": lambda size: Batches(),
}


class Reads(Net):
    """Computes means over the training data, in a hook, and uses them."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook, self.centre = hook, torch.zeros(4, dtype=torch.float64)

    def _read(self, hook: str) -> None:
        if hook == self.hook:
            seen = torch.cat([batch[0] for batch in self.trainer.train_dataloader]).to(self.device)
            assert len(seen) == BATCH * STEPS
            self.centre = seen.mean(0) + 0.01 * self.net[0](seen).mean() if hook == "start" else seen.mean(0)

    def on_train_start(self) -> None:
        self._read("start")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._read("batch")

    def on_train_epoch_end(self) -> None:
        self._read("epoch")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0] - 0.5 * self.centre.to(batch[0].device)), batch[1])


@pytest.mark.parametrize(
    ("kind", "hook", "place"), sampled(itertools.product(LOADERS, ["batch", "epoch"], PLACES), 1, seed=3)
)
def test_hooks_read_the_training_data_from_its_beginning(kind, hook, place):
    theirs, ours = Reads(hook), Reads(hook)
    run_on(0, 1, False, theirs, make=LOADERS[kind])
    run_on(*place, ours, make=LOADERS[kind])
    assert not list(differences(theirs.state_dict(), ours.state_dict(), TOLERANCE))


@pytest.mark.parametrize(
    ("kind", "stages"),
    [("stream", 2), *(pytest.param(kind, 1, marks=pytest.mark.long) for kind in ("addresses", "batches"))],
)
def test_so_they_do_when_the_run_goes_on_in_the_middle_of_an_epoch(tmp_path, kind, stages):
    theirs, ours = Reads("epoch"), Reads("epoch")
    run_on(0, 1, False, theirs, make=LOADERS[kind])
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}")
    run_on(stages, 1, False, Reads("epoch"), [saves], LOADERS[kind], max_steps=2)
    again = grid_trainer(2, stages, max_epochs=2)
    again.fit(ours, LOADERS[kind](BATCH // 2), ckpt_path=tmp_path / "step=2.ckpt")
    assert not list(differences(theirs.state_dict(), ours.state_dict(), TOLERANCE))


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[4] = nn.LazyLinear(1, dtype=torch.float64)


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_lazy_layer_without_a_shape_is_refused(stages):
    with pytest.raises(UnsupportedFeatureError, match=r"net\.4\.weight of Lazy gets its shape.*before fit"):
        run_on(stages, 1, False, Lazy())
