"""When a fault is due, and which faults make no sense."""

import pickle
from typing import Any

import pytest

from lightning_recycle.callbacks import Fault
from lightning_recycle.callbacks.faults import KINDS, POINTS
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Microbatch
from lightning_recycle.planning.ops import Op, OpKind


def op(kind: OpKind, index: int | None = None, pipeline: int = 0) -> Op:
    return Op(kind, 1, None if index is None else Microbatch(pipeline, index))


F, B, W, BW = OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT, OpKind.BACKWARD
REDUCE, STEP = OpKind.REDUCE, OpKind.STEP


@pytest.mark.parametrize(
    ("at", "due"),
    [
        ("forward", {F}),
        ("backward_input", {B, BW}),
        ("backward_weight", {W, BW}),
        ("reduce", {REDUCE}),
        ("optimizer", {STEP}),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fault_is_due_at_its_kind_of_operation_only(at: str, due: set[OpKind], when: str) -> None:
    fault = Fault("kill", 0, 1, 3, at=at, when=when)
    other = {"before": "after", "after": "before"}[when]
    operations = {kind: op(kind, None if kind in (REDUCE, STEP) else 0) for kind in OpKind}
    assert {kind for kind, o in operations.items() if fault.matches(3, o, when)} == due
    assert not any(fault.matches(3, o, other) for o in operations.values())
    assert not any(fault.matches(2, o, when) or fault.matches(4, o, when) for o in operations.values())


@pytest.mark.parametrize(
    ("operation", "due"), [(op(F, 2), True), (op(F, 2, pipeline=1), True), (op(F, 1), False), (op(B, 2), False)]
)
def test_a_microbatch_is_meant_by_its_index_whatever_its_pipeline(operation: Op, due: bool) -> None:
    assert Fault("kill", 0, 1, 3, microbatch=2).matches(3, operation) is due


@pytest.mark.parametrize("point", POINTS)
def test_a_point_without_a_step_is_its_first_time_and_with_one_that_step(point: str) -> None:
    anytime, third = Fault("kill", 0, 1, at=point), Fault("kill", 0, 1, 3, point)
    assert anytime.matches_point(point, 0)
    assert anytime.matches_point(point, 7)
    assert [third.matches_point(point, step) for step in (2, 3, 4)] == [False, True, False]
    others = [other for other in POINTS if other != point]
    assert not any(anytime.matches_point(other, 3) or third.matches_point(other, 3) for other in others)
    assert not any(third.matches(3, op(kind)) for kind in OpKind)


def test_a_fault_at_an_operation_is_due_at_no_point() -> None:
    fault = Fault("kill", 0, 1, 3)
    assert not any(fault.matches_point(name, 3) for name in (*POINTS, "forward"))


def test_the_order_of_positional_arguments_is_fixed() -> None:
    fault = Fault("kill", 1, 2, 3, "backward_input", 4)
    assert (fault.kind, fault.pipeline, fault.stage, fault.step) == ("kill", 1, 2, 3)
    assert (fault.at, fault.microbatch, fault.when) == ("backward_input", 4, "before")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_written_compared_and_sent(kind: str) -> None:
    extra: dict[str, Any] = {"factor": 2.5, "steps": 3} if kind == "slow" else {}
    extra |= {"target": "parameter", "bit": 3} if kind == "bitflip" else {}
    fault = Fault(kind, 0, 1, 2, when="after", **extra)
    assert pickle.loads(pickle.dumps(fault)) == fault
    assert eval(str(fault)) == fault


def test_a_fault_is_shown_without_its_defaults() -> None:
    assert str(Fault("kill", 1, 0, at="setup")) == "Fault(kind='kill', pipeline=1, stage=0, at='setup')"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Fault("murder", 0, 0, 1), ["'murder'", "'kill'", "'preempt'"]),
        (lambda: Fault("kill", 0, 0, 1, at="lunch"), ["'lunch'", "'forward'", "'checkpoint'"]),
        (lambda: Fault("kill", 0, 0, 1, when="during"), ["when='during'", "'before'"]),
        (lambda: Fault("kill", -1, 0, 1), ["pipeline=-1", "at least 0"]),
        (lambda: Fault("kill", 0, True, 1), ["stage=True", "at least 0"]),
        (lambda: Fault("kill", 0, 0, -1), ["step=-1", "at least 0"]),
        (lambda: Fault("kill", 0, 0, 1.0), ["step=1.0", "integer"]),
        (lambda: Fault("kill", 0, 0, 1, microbatch=-2), ["microbatch=-2", "at least 0"]),
        (lambda: Fault("kill", 0, 0), ["'forward'", "give step"]),
        (lambda: Fault("kill", 0, 0, at="reduce"), ["'reduce'", "give step"]),
        (lambda: Fault("kill", 0, 0, 1, at="reduce", microbatch=1), ["'reduce'", "leave microbatch out"]),
        (lambda: Fault("kill", 0, 0, 1, at="optimizer", microbatch=1), ["'optimizer'", "leave microbatch out"]),
        (lambda: Fault("kill", 0, 0, at="validation", microbatch=0), ["'validation'", "leave microbatch out"]),
        (lambda: Fault("kill", 0, 0, at="setup", when="after"), ["'setup'", "leave when out"]),
        (lambda: Fault("kill", 0, 0, 1, factor=2.0), ["'kill'", "factor"]),
        (lambda: Fault("preempt", 0, 0, 1, steps=2), ["'preempt'", "steps"]),
        (lambda: Fault("slow", 0, 0, 1), ["factor=None", "factor=3.0"]),
        (lambda: Fault("slow", 0, 0, 1, factor=1.0, steps=2), ["factor=1.0"]),
        (lambda: Fault("slow", 0, 0, 1, factor=float("nan"), steps=2), ["factor=nan"]),
        (lambda: Fault("slow", 0, 0, 1, factor=2.0), ["steps=None", "steps=2"]),
        (lambda: Fault("slow", 0, 0, 1, factor=2.0, steps=0), ["steps=0"]),
        (lambda: Fault("slow", 0, 0, at="end", factor=2.0, steps=1), ["end", "another point"]),
    ],
)
def test_nonsense_is_refused_with_the_value_and_the_remedy(build: Any, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build()
    assert all(word in str(caught.value) for word in words), caught.value
