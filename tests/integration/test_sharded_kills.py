"""A member of a position is killed at every collective of its layers, and at every place outside of a step.

All kills at collectives: ``python -m pytest -m exhaustive tests/integration/test_sharded_kills.py`` (256 runs, three
seconds each).
"""

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sharded import (
    STEPS,
    AtHook,
    AtPoint,
    Kill,
    KillTwo,
    Ordinary,
    Piped,
    Victim,
    Waits,
    die,
    error,
    fit,
    kinds,
    lost,
    plain_loop,
)
from support.sampling import sampled
from support.training import TOLERANCE

COLLECTIVES = {1: 9, 2: 5}
"""Of a member in a step, by the number of stages: those of the layers, and the meeting before."""


class AtCollective(Victim):
    """Dies before its collective number ``number`` of ``step``, or after it; without a number, counts them in
    ``report``.
    """

    def __init__(self, rank: int, step: int, number: int | None, when: str = "before", report: Path | None = None):
        super().__init__(rank)
        self.step, self.number, self.when, self.report, self.seen = step, number, when, report, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.is_it(trainer):
            return
        from lightning_recycle.runtime.comm.position_mesh import MemberGroup

        strategy: Any = trainer.strategy
        run: Callable[..., Any] = MemberGroup.run

        def counted(group: Any, *args: Any, **options: Any) -> Any:
            is_due = strategy.executor.version == self.step and self.seen == self.number
            self.seen += strategy.executor.version == self.step
            if is_due and self.when == "before":
                die()
            work = run(group, *args, **options)
            if is_due:
                die()
            if self.report is not None:
                self.report.write_text(str(self.seen))
            return work

        MemberGroup.run = counted  # type: ignore[method-assign]


def every_collective() -> list[Any]:
    places = itertools.product((1, 2), (0, 1, 2, 3), range(STEPS), ("before", "after"))
    return [
        (stages, rank, step, number, when)
        for stages, rank, step, when in places
        for number in range(COLLECTIVES[stages])
    ]


@pytest.mark.parametrize("stages", COLLECTIVES)
def test_the_matrix_holds_every_collective(stages: int, tmp_path: Path) -> None:
    fit(Piped(), (2, stages, 2), AtCollective(1, 1, None, report=tmp_path / "seen"))
    assert int((tmp_path / "seen").read_text()) == COLLECTIVES[stages]


@pytest.mark.parametrize(("stages", "rank", "step", "number", "when"), sampled(every_collective(), 4))
def test_a_kill_at_a_collective_of_the_layers(stages: int, rank: int, step: int, number: int, when: str) -> None:
    module = Piped()
    assert lost(fit(module, (2, stages, 2), AtCollective(rank, step, number, when))) == 1
    assert error(module, plain_loop(2)) < TOLERANCE


# ---------------------------------------------------------------------- outside of steps


class WhileParked(Victim):
    """Dies when it is out of the roster."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.is_it(trainer):
            threading.Thread(target=self._watch, args=[trainer.strategy], daemon=True).start()

    def _watch(self, strategy: Any) -> None:
        while self.rank in strategy.live_workers:
            time.sleep(0.001)
        die()


STARTS = [AtHook(1, "setup"), AtHook(2, "on_fit_start"), AtHook(3, "on_train_start")]
IN_VALIDATION = [AtHook(1, "on_validation_batch_start", 3), AtHook(0, "on_validation_batch_end", 5)]
IN_CHECKPOINT = [AtPoint(0, "checkpoint", 2), AtHook(3, "on_save_checkpoint"), AtHook(0, "on_save_checkpoint", 1)]
LATER = [AtPoint(1, "end", STEPS), AtPoint(0, "validation", 2)]
TWICE = [
    ([Kill(1, 1, 1), WhileParked(0)], 1),
    ([KillTwo(0, 1, step=1, operation=2)], 1),
    ([KillTwo(1, 2, step=2, operation=1)], 2),
    ([Kill(0, 1, 2), Kill(3, 1, 3)], 2),
    ([Kill(2, 1, 2), Kill(1, 2, 1)], 2),
]


"""With the failures that are counted: a member that is parked leaves nothing that could fail."""


def name(value: Any) -> str:
    if isinstance(value, L.Callback):
        facts = (f"{v}" for k, v in vars(value).items() if isinstance(v, (int, str, tuple)))
        return f"{type(value).__name__}-{'-'.join(facts)}"
    return " ".join(map(name, value)) if isinstance(value, list) else ""


@pytest.mark.parametrize(
    "victim", sampled([*STARTS, *IN_VALIDATION, *IN_CHECKPOINT, *LATER], 3, rest=pytest.mark.long), ids=name
)
def test_a_kill_outside_of_steps(victim: Victim, tmp_path: Path) -> None:
    module = Ordinary()
    keep = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=2, save_last=True)
    checks = {"enable_checkpointing": True, "validates": True, "val_check_interval": 2}
    trainer = fit(module, (2, 1, 2), keep, victim, **checks)
    assert lost(trainer) == 1, kinds(trainer)
    expected = plain_loop(2)
    assert error(module, expected) < TOLERANCE
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert max(float((stored[f"model.{n}"] - p).abs().max()) for n, p in expected.named_parameters()) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize(("victims", "failures"), TWICE, ids=name)
def test_two_kills(victims: list[L.Callback], failures: int) -> None:
    module = Ordinary()
    assert lost(fit(module, (3, 1, 2), *victims)) == failures
    assert error(module, plain_loop(3)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize(
    ("victims", "failures"), [([victim], 1) for victim in [*STARTS, *IN_VALIDATION]] + TWICE, ids=name
)
def test_members_are_replaced_after_it(victims: list[L.Callback], failures: int) -> None:
    module, steps = Ordinary(), 16
    checks = {"validates": True, "val_check_interval": 2, "max_epochs": 9}
    more = {"max_steps": steps, "strategy": {"max_restarts": 8}, **checks}
    trainer = fit(module, (3, 1, 2), *victims, Waits(4, of=6), **more)
    assert lost(trainer) == failures
    assert "rejoined" in kinds(trainer), kinds(trainer)
    assert error(module, plain_loop(3, steps=steps)) < TOLERANCE
