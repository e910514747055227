"""Gradients that are reduced in buckets while the last backward goes on: the same weights, whatever fails between."""

import hashlib
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.models import Regression
from support.sampling import sampled
from support.training import committed_steps, exact_fit, failures, fit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_recycle.errors import UnsupportedFeatureError

pytestmark = pytest.mark.long

TINY = 1e-4
"""MiB, about a hundred numbers of 8 bytes: a bucket for almost each parameter."""

MOMENTS = ("before it begins", "once it has begun", "before it ends", "once it has ended")


class Watcher(L.Callback):
    """Follows the reductions of gradients, and kills a worker at one of them.

    ``folder`` has which began before REDUCE; ``kill`` is a worker, the number of its reduction, and a moment.
    """

    def __init__(self, folder: Path | None = None, kill: Any = None, step: int = 2) -> None:
        self.folder, self.kill, self.step = folder, kill, step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        executor: Any = trainer.strategy.executor
        communicator, me = executor.communicator, (executor.worker.pipeline, executor.worker.stage)
        begin, end = communicator.begin_collective, communicator.end_collective
        begun = {"version": -1, "number": 0, "ended": 0}
        is_reducing = False

        def strike(number: int, moment: int) -> None:
            if executor.version == self.step and self.kill == (me, number, MOMENTS[moment]):
                os.kill(os.getpid(), signal.SIGKILL)

        def watched_begin(tensor: Tensor, stages: tuple[int, ...] = (), source: int | None = None) -> Any:
            if begun["version"] != executor.version:
                begun.update(version=executor.version, number=0, ended=0)
            if tensor.numel() == 1:  # peers await each other
                return begin(tensor, stages, source)
            number = begun["number"]
            begun["number"] += 1
            strike(number, 0)
            if self.folder is not None and not is_reducing:
                with (self.folder / f"{me}").open("a") as file:
                    file.write(f"{executor.version} {number}\n")
            found = begin(tensor, stages, source)
            strike(number, 1)
            return found

        def watched_end(reduction: Any) -> None:
            number = begun["ended"]
            begun["ended"] += bool(reduction.parts) and reduction.parts[0][0].numel() > 1
            strike(number, 2)
            end(reduction)
            strike(number, 3)

        def before(step: int, op: Any) -> None:
            nonlocal is_reducing
            is_reducing = op.kind.value == "REDUCE"

        executor.before_operation.append(before)
        communicator.begin_collective, communicator.end_collective = watched_begin, watched_end


def early(folder: Path) -> dict[str, set[int]]:
    """For each worker, the numbers of buckets that have begun before REDUCE."""
    return {path.name: {int(line.split()[1]) for line in path.read_text().splitlines()} for path in folder.iterdir()}


TECHNIQUES: dict[str, dict[str, Any]] = {
    "staggered": {"strategy": {"split_backward": True}},
    "together": {"strategy": {"split_backward": True, "staggered": False}},
    "fused": {"strategy": {"split_backward": False}},
    "clipped": {"gradient_clip_val": 0.5, "strategy": {"split_backward": True}},
}


def options(technique: str) -> dict[str, Any]:
    chosen = TECHNIQUES[technique]
    return {**chosen, "strategy": {"bucket_cap_mb": TINY, **chosen.get("strategy", {})}}


@pytest.mark.parametrize(("grid", "technique"), sampled(itertools.product([(2, 1), (3, 2)], TECHNIQUES), 2))
def test_buckets_leave_before_the_last_backward_has_ended(tmp_path, grid, technique):
    model = Regression(clip_scale=100.0 if technique == "clipped" else 1.0).double()
    exact_fit(model, *grid, callbacks=[Watcher(tmp_path)], **options(technique))
    found = early(tmp_path)
    assert len(found) == grid[0] * grid[1]
    assert all(0 in numbers for numbers in found.values()), found


class Digests(L.Callback):
    """Each worker notes what its parameters are in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        worker = trainer.strategy.worker
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in pl_module.parameters())).hexdigest()
        (self.folder / f"{worker.stage} {worker.pipeline}").write_text(digest)

    def by_stage(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for path in self.folder.iterdir():
            found.setdefault(path.name.split()[0], set()).add(path.read_text())
        return found


KILLS = [
    (grid, technique, (worker, number, moment))
    for grid, technique in itertools.product([(2, 2), (3, 1)], TECHNIQUES)
    for worker in itertools.product(range(grid[0]), range(grid[1]))
    for number in range(3)
    for moment in MOMENTS
]


@pytest.mark.parametrize(("grid", "technique", "kill"), sampled(KILLS, 4))
def test_a_kill_between_buckets_changes_nothing(tmp_path, grid, technique, kill):
    model = Regression(clip_scale=100.0 if technique == "clipped" else 1.0).double()
    digests = Digests(tmp_path)
    run = exact_fit(model, *grid, max_steps=5, callbacks=[Watcher(kill=kill), digests], **options(technique))
    assert failures(run) == [kill[0]]
    assert committed_steps(run) == list(range(5))
    assert [len(found) for found in digests.by_stage().values()] == [1] * grid[1], "replicas differ"


class Recomputed(nn.Module):
    """Two layers of which the second is also the first, each computed once more in a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.free = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.clone().requires_grad_()
        x = checkpoint(self.layer, x, use_reentrant=True)
        return self.free(checkpoint(self.layer, torch.tanh(x), use_reentrant=True))


class Recomputing(Regression):
    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        return [nn.Linear(8, 8), Recomputed(), nn.Tanh(), nn.Linear(8, 1)]


class Alternates(L.Callback):
    """Trains weights in every other step, and biases always."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.requires_grad = parameter.dim() == 1 or trainer.global_step % 2 == 0


class Ordinary(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Regression().configure_pipeline())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_a_gradient_that_comes_in_several_parts_is_complete_with_the_last(tmp_path):
    """DistributedDataParallel refuses that. The bucket of the last layer leaves early all the same."""
    exact_fit(Recomputing().double(), 2, 1, callbacks=[Watcher(tmp_path)], **options("fused"))
    assert all(0 in numbers for numbers in early(tmp_path).values())


@pytest.mark.parametrize(("make", "grid", "kwargs"), [
    (Regression, (2, 2), {"callbacks": [Alternates()]}),
    (Ordinary, (2, 1), {}),
    (Ordinary, (3, 1), {"accumulate_grad_batches": 2}),
], ids=["what is trained changes", "an ordinary module", "accumulation"])  # fmt: skip
def test_buckets_change_nothing(tmp_path, make, grid, kwargs):
    models = [make().double() for _ in range(2)]
    callbacks = kwargs.pop("callbacks", [])
    for model, cap in zip(models, (TINY, None), strict=True):
        watcher = Watcher(tmp_path if cap else None)
        fit(model, *grid, strategy={"bucket_cap_mb": cap}, callbacks=[watcher, *callbacks], **kwargs)
    assert all(0 in numbers for numbers in early(tmp_path).values())
    states = [model.state_dict() for model in models]
    assert max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0]) < 1e-10


class Replaces(Regression):
    """A gradient does not stay where it is expected, in the last step but not before."""

    def on_train_start(self) -> None:
        parameter = list(self.parameters())[-1]

        def replace(_: Tensor) -> None:
            if self.trainer.global_step == 2:
                parameter.grad = parameter.grad.clone()

        parameter.register_hook(replace)


class Raises(nn.Module):
    """An error of the user's in the backward of the first layer, when later layers have their gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return _Raise.apply(x)


class _Raise(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        _Raise.calls += 1
        if _Raise.calls == 12:  # the last of the second step
            raise ZeroDivisionError("the user's own")
        return grad_outputs[0]


class Raising(Regression):
    def configure_pipeline(self) -> list[Any]:
        torch.manual_seed(0)
        return [nn.Linear(8, 8), Raises(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)]


def test_a_gradient_that_has_left_its_bucket_is_an_error():
    with pytest.raises(UnsupportedFeatureError, match="became a separate"):
        fit(Replaces().double(), 2, 1, **options("fused"))


def test_an_error_of_the_users_own_ends_the_run_while_buckets_are_under_way():
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        fit(Raising().double(), 2, 1, **options("fused"))
