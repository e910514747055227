"""Memory: what a worker holds, counted in it by itself, stays below the limit, whoever fails and whenever."""

from __future__ import annotations

import json
import logging
import os
import weakref
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
from support.models import Regression
from support.sampling import sampled
from support.training import exact_fit, failures
from torch import Tensor, nn

from lightning_recycle.callbacks import Fault
from lightning_recycle.control.plans.run_plans import RunPlans
from lightning_recycle.planning import Op, OpKind
from lightning_recycle.planning.contingencies import usual_limit

MEGABYTE = 1 << 20
EACH = 2 * MEGABYTE
"""What a micro-batch holds in each :class:`Hold`, but for some hundred bytes."""


class _Hold(torch.autograd.Function):
    """Keeps a large tensor from F until autograd needs it no more, and counts those that there are."""

    alive = peak = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        held = torch.ones(EACH, dtype=torch.uint8)
        ctx.save_for_backward(held)
        _Hold.alive += 1
        _Hold.peak = max(_Hold.peak, _Hold.alive)
        weakref.finalize(held, _Hold.gone)
        return x.clone()

    @staticmethod
    def gone() -> None:
        _Hold.alive -= 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Hold(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", _Hold.apply(x)) if self.training and x.requires_grad else x


class Heavy(Regression):
    """A regression whose first and last stage hold :data:`EACH` for a micro-batch; both if they are one."""

    def configure_pipeline(self) -> list[Any]:
        first, *rest, last = super().configure_pipeline()
        return [first, Hold(), *rest, Hold(), last]


class Peaks(L.Callback):
    """Writes down the most that this worker held at once, by the number of workers that were alive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peaks: dict[str, int] = {}
        self.live = 0

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        executor = cast("Any", trainer.strategy).session.executor
        executor.after_operation.append(self._after)
        self.client = executor._client

    def _after(self, step: int, op: Op) -> None:
        if op.kind is OpKind.REDUCE:
            live = len(self.client.member.roster)
            if live == self.live:  # else a part of this step was run under the plan of before
                name = f"{live} {'measured' if step > 2 else 'before'}"
                self.peaks[name] = max(self.peaks.get(name, 0), _Hold.peak)
            self.live, _Hold.peak = live, _Hold.alive
            (self.folder / f"{os.getpid()}-{op.stage}.json").write_text(json.dumps(self.peaks))


def peaks(folder: Path) -> dict[str, int]:
    """The most of the large tensors that any worker held."""
    found: dict[str, int] = {}
    for path in folder.glob("*.json"):
        for name, peak in json.loads(path.read_text()).items():
            found[name] = max(found.get(name, 0), peak)
    return found


def no_plans_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan is made when it is needed, for what has been measured by then."""
    monkeypatch.setattr(RunPlans, "plan_ahead", lambda self: None)


GRIDS = [(2, 2, (0, 0)), (2, 2, (1, 1)), (3, 2, (1, 0)), (2, 3, (1, 1)), (4, 1, (2, 0))]
CASES = [(*grid, fit_in) for grid in GRIDS for fit_in in (1, 3)]


@pytest.mark.parametrize(("pipelines", "stages", "worker", "fit_in"), sampled(CASES, 3), ids=str)
def test_no_worker_holds_more_than_the_limit(
    pipelines: int, stages: int, worker: tuple[int, int], fit_in: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the survivor of a failure takes over all micro-batches of its stage, or some; and the result is exact."""
    no_plans_ahead(monkeypatch)
    each = 1 if stages > 1 else 2
    limit = fit_in * each * EACH + EACH // 2
    run = exact_fit(
        Heavy().double(),
        pipelines,
        stages,
        [Fault("kill", *worker, step=5)],
        callbacks=[Peaks(tmp_path)],
        strategy={"memory": limit},
    )
    assert failures(run) == [worker]
    before, after = run.strategy.schedules
    assert after.problem.in_flight_limit is None, "bytes are the only limit"
    assert after.problem.memory is not None
    assert after.problem.memory.capacity == (limit,) * stages
    assert max(after.peak_memory(survivor) for survivor in after.live_workers) <= limit
    held = peaks(tmp_path)
    assert max(held[name] for name in held if "before" in name) <= each * max(usual_limit(before.grid, ()) or ())
    left = f"{pipelines * stages - 1} measured"
    assert held[left] <= fit_in * each


@pytest.mark.parametrize("step", [0, 1])
def test_before_anything_is_measured_a_survivor_holds_what_1f1b_does(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_plans_ahead(monkeypatch)
    run = exact_fit(Heavy().double(), 2, 2, [Fault("kill", 1, 1, step=step)], callbacks=[Peaks(tmp_path)])
    after = run.strategy.schedules[1]
    assert after.problem.in_flight_limit == (2, 1)
    assert max(peaks(tmp_path).values()) <= 2


def test_what_does_not_fit_is_said_and_one_microbatch_at_a_time_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_plans_ahead(monkeypatch)
    with caplog.at_level(logging.WARNING):
        run = exact_fit(
            Heavy().double(),
            2,
            2,
            [Fault("kill", 0, 1, step=4)],
            callbacks=[Peaks(tmp_path)],
            strategy={"memory": EACH // 2},
        )
    assert run.strategy.schedules[1].problem.in_flight_limit == (1, 1)
    assert peaks(tmp_path)["3 measured"] == 1
    assert "fits into memory: a worker of stage 0 has 1,048,576 bytes" in caplog.text
    assert "use smaller micro-batches" in caplog.text


def test_an_in_flight_limit_of_the_users_counts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_plans_ahead(monkeypatch)
    run = exact_fit(
        Heavy().double(),
        2,
        2,
        [Fault("kill", 1, 0, step=4)],
        callbacks=[Peaks(tmp_path)],
        strategy={"memory": EACH // 2, "in_flight_limit": 4},
    )
    assert [schedule.problem.in_flight_limit for schedule in run.strategy.schedules] == [(4, 4), (4, 4)]
    assert peaks(tmp_path)["3 measured"] == 4
