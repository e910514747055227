"""State in places that only a walk over all objects finds."""

from pathlib import Path
from types import MethodType
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import GradClipAlgorithmType
from support.growth import AwaitReplacement, rejoined
from support.sampling import sampled
from support.training import difference, grid_trainer, on_one_device
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.data import DataLoader, Dataset

from lightning_recycle.callbacks import Fault

SAMPLES, EPOCHS, WIDTH = 24, 4, 4


class Samples(Dataset[Tensor]):
    def __init__(self) -> None:
        self.data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class Hooked(Plain):
    """Hooks of modules, parameters and optimizers that are registered before the training, in it, and removed."""

    scale = 1.3

    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones(8, WIDTH, dtype=torch.float64)
        mask[:4] = 0
        self.frozen_rows = self.net[0].weight.register_hook(lambda gradient: gradient * mask)
        self.removed = self.net[2].weight.register_hook(lambda gradient: gradient * 0.5)

    def on_train_start(self) -> None:
        self.short = self.net[1].register_forward_hook(lambda *_: _[-1] * 1.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].register_forward_hook(self._scaled)
            self.net[2].register_forward_pre_hook(lambda _, args, kwargs: ((args[0] * 1.2,), kwargs), with_kwargs=True)
            optimizer: Any = self.optimizers()
            optimizer.optimizer.register_step_post_hook(self._after_step)
            self.net[2].bias.register_hook(lambda gradient: gradient * 0.7)
            self.short.remove()
        if self.current_epoch == 3:  # the replacement is here
            self.removed.remove()

    def _scaled(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output * self.scale

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][-1].mul_(0.9)


class RemembersFeatures(Plain):
    """Local hooks fill a list that the step reads, and count the calls in a variable of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        features, calls = self.features, 0

        def remember(_: nn.Module, __: Any, output: Tensor) -> None:
            features[:] = [output]

        def weaken(gradient: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return gradient / calls

        def amplify(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            return output * (1 + 0.1 * calls)

        self.net[0].register_forward_hook(remember)
        self.net[2].register_forward_hook(amplify)
        self.weaken = weaken

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.features[-1].pow(2).mean()

    def on_before_optimizer_step(self, _: Any) -> None:
        bias = self.net[2].bias
        bias.grad = self.weaken(bias.grad)


class Replaced(Plain):
    """Methods of single objects, attributes of parameters, options of the Trainer, a further callback."""

    def on_train_epoch_start(self) -> None:
        for parameter in self.net[2].parameters():
            parameter.rate = 1 / (1 + self.current_epoch)
        if self.current_epoch == 1:
            self.training_step = self._other_step
            layer = self.net[2]
            layer.forward = MethodType(_doubled, layer)
            self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm = 0.01, "value"
            self.trainer.fit_loop.max_epochs = EPOCHS - 1
            self.trainer.callbacks.append(Halves())

    def _other_step(self, batch: Tensor, _: int) -> Tensor:
        return self.net(batch).abs().mean()

    def on_before_optimizer_step(self, _: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(getattr(parameter, "rate", 1.0))


def _doubled(layer: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, layer.weight, layer.bias) * 2


class Halves(L.Callback):
    def on_before_optimizer_step(self, _: Any, module: L.LightningModule, __: Any) -> None:
        for parameter in module.parameters():
            parameter.grad.mul_(0.5)


class SharedMemory(Plain):
    """A weight and a buffer with views of them in attributes; a weight that both ways of normalization compute."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.randn(8 * WIDTH, dtype=torch.float64)
        self.net[0].weight = nn.Parameter(self.flat.view(8, WIDTH))
        self.register_buffer("bank", torch.ones(4, 2, dtype=torch.float64))
        self.first = self.bank[0]
        self.net.append(spectral_norm(nn.Linear(2, 2).double()))
        self.net.append(parametrizations.spectral_norm(nn.Linear(2, 2).double()))
        self.net.append(parametrizations.weight_norm(nn.Linear(2, 2).double()))

    def on_train_epoch_start(self) -> None:
        self.first.add_(0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.flat.clamp_(-0.8, 0.8)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return (self.net(batch) - self.bank.mean(0)).pow(2).mean()


class Mapped(Samples):
    """Samples in a memory-mapped file, in a part of it."""

    def __init__(self, path: Path) -> None:
        self.file: Any = np.memmap(path, dtype=np.float64, mode="r", shape=(3 * SAMPLES, 2 * WIDTH))
        self.part = self.file[SAMPLES::2, 1 : 1 + WIDTH]

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(np.array(self.part[index]))


class Scaled:
    """A collate function with a state."""

    factor = 1.0

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) * self.factor


class ScalesData(Plain):
    def on_train_epoch_start(self) -> None:
        loader: Any = self.trainer.train_dataloader
        loader.collate_fn.factor = 1.0 + self.current_epoch
        assert type(loader.dataset.file) is np.memmap


def _fit(module: L.LightningModule, data: Dataset[Tensor], devices: int, collate: Any = None) -> L.Trainer:
    faults, options = [Fault("kill", 1, 0, step=3)], {"max_restarts": 10}
    trainer = (
        grid_trainer(devices, 1, faults, options, callbacks=[AwaitReplacement([4])], max_epochs=EPOCHS)
        if devices > 1
        else on_one_device(max_epochs=EPOCHS)
    )
    trainer.fit(module, DataLoader(data, batch_size=8 // devices, collate_fn=collate))
    return trainer


def _assert_same_after_a_replacement(
    kind: type[L.LightningModule], data: Dataset[Tensor], collate: type[Any] = lambda: None
) -> tuple[L.LightningModule, L.Trainer]:
    expected, module = kind(), kind()
    _fit(expected, data, 1, collate())
    trainer = _fit(module, data, 2, collate())
    assert rejoined(trainer) == [(1, 0)]
    assert difference(module.state_dict(), expected.state_dict()) < 1e-10
    return module, trainer


class Counting(torch.optim.SGD):
    """An optimizer whose state dict has a number of its own, by which it steps."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict.pop("steps")
        super().load_state_dict(state_dict)


def _halve(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.5)


class Transforms(Plain):
    """Steps that return None, transforms of torch.func, hooks after an accumulation, an optimizer with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[str] = []
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(_halve)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if batch_idx == 1:
            return None
        slopes = torch.func.vmap(torch.func.grad(lambda sample: self.net(sample).sum()))(batch)
        out, tangents = torch.func.jvp(self.net, (batch,), (torch.ones_like(batch),))
        return out.pow(2).mean() + tangents.pow(2).mean() + slopes.pow(2).mean()

    def on_before_backward(self, _: Tensor) -> None:
        self.passes.append("backward")

    def on_after_backward(self) -> None:
        self.passes.append(f"done, {float(self.net[0].weight.grad.norm()):.6f}")

    def configure_optimizers(self) -> Any:
        return Counting(self.parameters(), lr=0.1, momentum=0.5)


def test_steps_may_use_what_sees_gradients_and_saved_tensors(tmp_path):
    expected, module = Transforms(), Transforms()
    one = _fit(expected, Samples(), 1)
    trainer = _fit(module, Samples(), 2)
    assert rejoined(trainer) == [(1, 0)]
    assert difference(module.state_dict(), expected.state_dict()) < 1e-10
    assert module.passes == expected.passes
    assert trainer.optimizers[0].steps == one.optimizers[0].steps == 3 * EPOCHS


def _bound(parameter: nn.Parameter) -> None:
    parameter.grad.clamp_(-0.02, 0.02)


class ManualBounds(Plain):
    """Bounds accumulated gradients where it optimizes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(_bound)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.manual_backward(super().training_step(batch + 1, batch_idx))
        self.optimizers().step()
        self.optimizers().zero_grad()
        return loss


class Counts(Plain):
    def configure_optimizers(self) -> Any:
        return Counting(self.parameters(), lr=0.1)


@pytest.mark.parametrize("folder", [False, True])
def test_what_only_an_optimizer_and_the_trainer_know_is_in_checkpoints(folder, tmp_path):
    def train(resumed: Path | None = None) -> L.Trainer:
        options = {"num_microbatches": 2, "save_distributed_checkpoint": folder}
        clipping = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "norm"}
        saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = grid_trainer(1, 2, (), options, callbacks=[saves], enable_checkpointing=True, max_steps=4, **clipping)
        trainer.fit(Counts(), DataLoader(Samples(), batch_size=8), ckpt_path=resumed)
        return trainer

    undisturbed = train().model.state_dict()
    trainer = train(tmp_path / "step=2.ckpt")
    assert difference(trainer.model.state_dict(), undisturbed) < 1e-10
    assert trainer.gradient_clip_algorithm == GradClipAlgorithmType.NORM
    if folder:
        return  # the optimizers stay in the workers
    assert trainer.optimizers[0].steps == 4
    assert torch.load(tmp_path / "step=4.ckpt", weights_only=True)["optimizer_states"][0]["steps"] == 4


@pytest.mark.parametrize(
    "kind", [ManualBounds, *sampled([Hooked, RemembersFeatures, Replaced, SharedMemory], 2, rest=pytest.mark.long)]
)
def test_a_replacement_has_what_hooks_have_put_into_odd_places(kind):
    module, trainer = _assert_same_after_a_replacement(kind, Samples())
    if isinstance(module, Replaced):  # settings and callbacks come home
        assert trainer.gradient_clip_val == 0.01
        assert trainer.current_epoch == EPOCHS - 1
        assert isinstance(trainer.callbacks[-1], Halves)
    if isinstance(module, SharedMemory):
        assert module.flat.data_ptr() == module.net[0].weight.data_ptr()
    if isinstance(module, Hooked):
        assert len(module.net[0]._forward_hooks) == 1
        module.frozen_rows.remove()
        assert not module.net[0].weight._backward_hooks


def test_a_replacement_reads_mapped_files_and_has_the_state_of_the_collate_function(tmp_path):
    content = np.random.default_rng(0).random((3 * SAMPLES, 2 * WIDTH))
    content.tofile(tmp_path / "samples")
    _assert_same_after_a_replacement(ScalesData, Mapped(tmp_path / "samples"), Scaled)


class Late(Plain):
    """A buffer that a hook makes, where the layers are on several workers."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.register_buffer("late", torch.full((2,), 3.0, dtype=torch.float64))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        output = self.net(batch)
        return (output * self.late if self.current_epoch else output).pow(2).mean()


@pytest.mark.parametrize("kind", sampled([Late, SharedMemory], 1, rest=pytest.mark.long))
def test_stages_bring_home_what_hooks_have_made(kind):
    expected, module = kind(), kind()
    _fit(expected, Samples(), 1)
    grid_trainer(1, 2, (), {"num_microbatches": 1}, max_epochs=EPOCHS).fit(module, DataLoader(Samples(), batch_size=8))
    assert difference(module.state_dict(), expected.state_dict()) < 1e-10
