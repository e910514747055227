"""The lines at the end of a run say what its record says."""

from typing import Any

from lightning_recycle.control.monitoring.history import Event, summary
from lightning_recycle.planning.grid import Grid, Positions

POSITIONS = Positions(Grid(2, 2, 4))
ALL = (0, 1, 2, 3)


def event(kind: str, time: float, step: int = 0, seconds: float | None = None, **details: Any) -> Event:
    worker = details.pop("worker", None)
    return Event(kind, time, generation=0, step=step, worker=worker, seconds=seconds, details=details)


BEGIN = [event("resumed", 10.0), event("regrouped", 10.5, roster=ALL), event("step", 11.0, loss=2.0)]


def test_the_most_memory_is_told_with_its_stage():
    history = [*BEGIN, event("memory", 13.0, peak_bytes=(3_214_000_000, None, 12_500_000_000))]
    assert summary(history, POSITIONS)[0].endswith("4 workers, the largest with 12.5 GB of memory (stage 2).")
    history.append(event("memory", 19.0, peak_bytes=(13_000_000_000, 1, 2)))  # after the loss of a stage
    assert summary(history, POSITIONS)[0].endswith("4 workers, the largest with 13 GB of memory (stage 0).")


def test_a_run_without_a_step_has_no_lines():
    assert summary(BEGIN[:2], POSITIONS) == []


def test_a_run_that_went_on_says_its_last_loss_only():
    history = [*BEGIN[:2], event("step", 11.0, 1400, loss=2.0), event("step", 12.0, 1401, loss=1.0)]
    assert summary(history, POSITIONS) == ["Run: at step 1,402 after 2.0 s, loss 1, 4 workers."]


def test_time_that_was_lost_is_told():
    history = [
        *BEGIN,
        event("failure", 12.0, 1, worker=(1, 0), cause="it was killed by SIGKILL"),
        event("failure", 12.1, 1, worker=(0, 1), cause="silent for 5 s"),
        event("redone", 12.2, 1),
        event("regrouped", 12.3, roster=(0, 3, 4)),
        event("step", 13.5, 1, loss=1.0),
        event("recovered", 13.5, 1, seconds=1.5),
        *(event("rejoined", 14.0, 2, seconds=0.3, worker=worker) for worker in ((1, 0), (0, 1), (2, 0))),
        event("cleared", 15.0, 2, seconds=4.0, worker=(0, 0)),
        event("regrouped", 15.0, roster=ALL),
        event("step", 16.0, 2, loss=0.12345),
    ]
    assert summary(history, POSITIONS) == [
        "Run: at step 3 after 6.0 s, loss 2 at first and 0.1235 now, 4 workers.",
        "2 failures, 1 redone step, 2 replacements, 1 newcomer; 6.4 s lost.",
    ]


def test_a_lost_stage_costs_until_the_next_step():
    history = [
        *BEGIN,
        event("failure", 12.0, 1, worker=(1, 0), cause="gone"),
        event("stage_lost", 12.0, 1),
        event("resumed", 15.0),
        event("regrouped", 15.0, roster=(0, 1)),
        event("step", 17.0, 1, loss=1.0),
    ]
    assert summary(history, POSITIONS)[1:] == ["1 failure; 5.0 s lost."]


def test_the_effect_of_split_backwards_is_told():
    fused = {"split": False, "cost": 0.101, "wins": -0.07, "fused_seconds": 1.0, "split_seconds": 1.07}
    history = [*BEGIN, event("chosen", 12.0, 1, **fused), event("step", 12.5, 1, loss=0.1)]
    assert summary(history, POSITIONS)[1:] == []
    split = {**fused, "split": True, "wins": 0.2}
    history += [event("resumed", 13.0, 1, backward=split), event("step", 13.5, 2, loss=0.1)]
    line = "The backward pass is split in two, for 10.1 % more computing time and 20.0 % shorter steps."
    assert summary(history, POSITIONS)[-1] == line
