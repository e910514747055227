"""Every kind of fault, injected once, at points of every sort: the others go on, and the weights are exact."""

import itertools
import json
import logging
from typing import Any

import pytest
from support.growth import AwaitReplacement, causes, happened, rejoined
from support.models import Regression
from support.training import committed_steps, exact_fit, failures, fit

from lightning_recycle.callbacks import Fault, HeartbeatCallback

OPERATIONS = ["forward", "backward_input", "backward_weight", "reduce", "optimizer"]
BROKE = "its connection to the coordinator broke"  # where the system has not said yet how the process ended
CAUSES = {
    "kill": ("SIGKILL", BROKE),
    "exit": ("code 1", BROKE),
    "exception": ("InjectedFaultError",),
    "hang": ("silent",),
    "deadlock": ("without waiting for anybody",),
    "partition": ("silent",),
}


TIMEOUT = 1.5  # seconds


def heartbeat() -> HeartbeatCallback:
    return HeartbeatCallback(interval=0.2, timeout=TIMEOUT)


def train(*faults: Fault, **options: Any) -> Any:
    """Trains, with exact weights and each step once; returns the Trainer."""
    run = exact_fit(Regression().double(), 2, 2, faults, **{"callbacks": [heartbeat()], **options})
    assert committed_steps(run) == list(range(10))
    return run


ALWAYS = [
    ("exit", "reduce", "after"),
    ("exception", "optimizer", "after"),
    ("hang", "backward_input", "after"),
    ("deadlock", "reduce", "after"),
    ("partition", "forward", "after"),
]
OTHERS = [case for case in itertools.product(CAUSES, OPERATIONS, ["before", "after"]) if case not in ALWAYS]


@pytest.mark.parametrize(
    ("kind", "at", "when"), [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS)]
)
def test_a_fault_is_survived_named_and_leaves_exact_weights(kind, at, when):
    run = train(Fault(kind, 1, 0, 4, at, when=when))
    (failure,) = happened(run, "failure")
    assert (failure.worker, failure.details["kind"]) == ((1, 0), kind)
    assert any(cause in failure.details["cause"] for cause in CAUSES[kind])
    suspected = [event.worker for event in happened(run, "suspected")]
    assert suspected == [event.worker for event in happened(run, "evicted")]
    assert suspected == ([(1, 0)] if kind in ("hang", "deadlock", "partition") else [])
    assert (TIMEOUT if kind == "deadlock" else 0) <= failure.seconds < 10


# ---------------------------------------------------------------------- points of the run


KILL = Fault("kill", 1, 0, 4)


@pytest.mark.parametrize(
    ("faults", "replaced"),
    [([KILL, Fault("exception", 0, 1, at="recovery")], False), ([Fault("exception", 0, 1, at="setup")], True),
     ([Fault("kill", 0, 1, at="end")], False)],
    ids=["in the recovery from another failure", "before the first generation", "after the last step"],
)  # fmt: skip
def test_a_worker_may_fail_outside_of_steps(faults, replaced):
    callbacks = [AwaitReplacement([7])] if replaced else []
    run = train(*faults, strategy={"max_restarts": 10 * replaced}, callbacks=callbacks)
    assert failures(run) == [(fault.pipeline, fault.stage) for fault in faults]
    assert any(cause in causes(run)[-1] for cause in CAUSES[faults[-1].kind])
    assert rejoined(run) == ([(0, 1)] if replaced else [])
    assert "train_loss" in run.callback_metrics
    assert run.global_step == 10


# ---------------------------------------------------------------------- the record


def test_every_event_is_one_line_of_json_in_the_log(caplog):
    with caplog.at_level(logging.DEBUG, logger="lightning_recycle.events"):
        faults = [Fault("kill", 0, 0, 4, "reduce"), Fault("preempt", 0, 1, 7)]
        strategy = {"split_backward": False, "rebalance": "never"}  # what is measured is not an event then
        run = fit(Regression().double(), 2, 2, faults, strategy=strategy)
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "lightning_recycle.events"]
    assert [(line["kind"], line["step"], line["time"]) for line in lines] == [
        (event.kind, event.step, event.time) for event in run.strategy.history
    ]
    kinds = [line["kind"] for line in lines if line["kind"] != "step"]
    assert kinds == [
        *("resumed", "regrouped"),
        *("failure", "redone", "resumed", "regrouped", "recovered"),
        *("paused", "left", "resumed", "regrouped"),
        "memory",
    ]
    times = [line["time"] for line in lines]
    assert times == sorted(times)
    (failure,) = [line for line in lines if line["kind"] == "failure"]
    assert failure["worker"] == [0, 0]
    assert failure["details"]["operation"].startswith("REDUCE")
    assert causes(run) == [failure["details"]["cause"]]
    metrics = run.callback_metrics
    assert {name: float(metrics[f"recycle/{name}"]) for name in ("live_workers", "failures", "redone_steps")} == {
        "live_workers": 2,
        "failures": 1,
        "redone_steps": 1,
    }
    (recovered,) = happened(run, "recovered")
    assert float(metrics["recycle/recovery_seconds"]) == pytest.approx(recovered.seconds)
