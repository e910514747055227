"""A failure while hooks run collectives of a position's layers: the run goes on, and each hook runs once."""

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import sharded
import torch
from support.sampling import sampled
from support.training import TOLERANCE
from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def norm(tensors: Any) -> float:
    return float(sum(whole(tensor).square().sum() for tensor in tensors))


class Asks:
    """Its hooks run collectives, and leave what they have found."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, float]] = []

    def note(self, hook: str, value: float) -> None:
        self.seen.append((hook, self.trainer.global_step, value))

    def on_train_batch_start(self, *_: Any) -> None:
        self.note("start", norm(self.parameters()))

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.note("gradient", norm(p.grad for p in self.parameters()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.note("end", norm(self.parameters()))
        if hasattr(self, "model"):
            with torch.no_grad():
                self.note("output", float(self.model(sharded.dataset()[:6][0]).sum()))
        self.all_gather(torch.ones(1))
        self.note("again", norm(self.parameters()))


class AsksAll(Asks, sharded.Ordinary):
    pass


class AsksOfStage(Asks, sharded.Piped):
    pass


def expected(parts: int) -> list[tuple[str, int, float]]:
    """What the hooks of a single device find."""
    found: list[tuple[str, int, float]] = []
    layers = sharded.plain_loop(parts, steps=0)
    optimizer, data = torch.optim.AdamW(layers.parameters(), lr=0.01), sharded.dataset()
    for step in range(sharded.STEPS):
        begin = step * parts * 4
        x, y = data[begin : begin + parts * 4]
        found.append(("start", step, norm(layers.parameters())))
        optimizer.zero_grad()
        (layers(x) - y).square().mean().backward()
        found.append(("gradient", step, norm(p.grad for p in layers.parameters())))
        optimizer.step()
        for hook in ("end", "output", "again"):
            value = float(layers(data[:6][0]).detach().sum()) if hook == "output" else norm(layers.parameters())
            found.append((hook, step + 1, value))
    return found


class AtHookCollective(sharded.Victim):
    """Dies before its collective number ``number`` in a hook of ``step``, or after it; the others take their time."""

    def __init__(self, rank: int, step: int, number: int, when: str = "before") -> None:
        super().__init__(rank)
        self.step, self.number, self.when, self.seen = step, number, when, 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        from lightning_recycle.runtime.position_mesh import MemberGroup

        strategy: Any = trainer.strategy
        run: Callable[..., Any] = MemberGroup.run

        def counted(group: Any, *args: Any, **options: Any) -> Any:
            in_hook = not strategy.executor.runner.attempt.computes
            if not in_hook or trainer.fit_loop.epoch_loop.total_batch_idx != self.step:
                return run(group, *args, **options)
            is_due = self.is_it(trainer) and self.seen == self.number
            self.seen += 1
            if is_due and self.when == "before":
                sharded.die()
            work = run(group, *args, **options)
            if is_due:
                sharded.die()
            time.sleep(0.02)
            return work

        sharded.run_collectives_by(counted)


COLLECTIVES = {sharded.TENSOR: 26, sharded.FSDP: 50}
"""Of a member in the hooks of a step."""

PLACES = [
    (grid, rank, number, when)
    for grid, count in COLLECTIVES.items()
    for rank in (1, 2)
    for number in range(count)
    for when in ("before", "after")
]


@pytest.mark.parametrize(("grid", "rank", "number", "when"), sampled(PLACES, 1), ids=str)
def test_a_kill_at_a_collective_of_a_hook(grid, rank, number, when):
    module = AsksAll()
    sharded.exact_fit(module, grid, AtHookCollective(rank, 1, number, when))
    values = expected(sharded.parts_of(grid))
    assert [(hook, step) for hook, step, _ in module.seen] == [(hook, step) for hook, step, _ in values]
    assert max(abs(x - y) for (*_, x), (*_, y) in zip(module.seen, values, strict=True)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, 5])
def test_hooks_of_several_stages(rank):
    """A stage's hooks run collectives of its own layers."""
    sharded.exact_fit(AsksOfStage(), (2, 2, 2), AtHookCollective(rank, 1, 2))


class AsksEarly(AsksAll):
    def on_fit_start(self) -> None:
        self.note("fit", norm(self.parameters()))

    def on_train_start(self) -> None:
        self.note("train", norm(self.parameters()))

    def on_validation_epoch_end(self) -> None:
        self.note("validation", norm(self.parameters()))

    def on_train_epoch_end(self) -> None:
        self.note("epoch", norm(self.parameters()))


@pytest.mark.long
@pytest.mark.parametrize("grid", [sharded.TENSOR, sharded.FSDP], ids=str)
def test_members_are_replaced_after_it(grid):
    """The new ones run the hooks before their first step alone."""
    module = AsksEarly()
    checks = {"max_steps": 20, "max_epochs": 9, "validates": True, "val_check_interval": 2}
    sharded.exact_fit(module, grid, AtHookCollective(1, 1, 3), sharded.Waits(2), **checks, strategy={"max_restarts": 4})
    steps = {name: [step for hook, step, _ in module.seen if hook == name] for name in ("fit", "train", "validation")}
    assert steps == {"fit": [0], "train": [0], "validation": [0, *range(2, 21, 2)]}, "each once, and the sanity check"
