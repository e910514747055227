"""What of a micro-batch can be compared, given the order of a worker's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_recycle.planning.grid import Grid, Microbatch
from lightning_recycle.planning.ops import Op, OpKind
from lightning_recycle.planning.program import Program, Task
from lightning_recycle.runtime.stage import Stage
from lightning_recycle.runtime.verification import Verifier


def program(order: str) -> Program:
    kinds = {"F": OpKind.FORWARD, "B": OpKind.BACKWARD_INPUT, "W": OpKind.BACKWARD_WEIGHT, "X": OpKind.BACKWARD}
    words = order.split()
    tasks = (Task(Op(kinds[word[0]], 0, Microbatch(0, int(word[1]))), word, int(word[1])) for word in words)
    return Program((*tasks, Task(Op(OpKind.CHECK, 0), "C@0"), Task(Op(OpKind.REDUCE, 0), "REDUCE@0")))


@pytest.mark.parametrize(
    ("order", "alone"),
    [
        ("F0 X0 F1 X1", True),
        ("F0 B0 W0 F1 B1 W1", True),
        ("F0 F1 B0 W0 B1 W1", True),
        ("F0 F1 B0 B1 W0 W1", False),  # a LayerNorm has its gradients of both after B1
        ("F0 F1 B0 B1 W1 W0", False),
        ("F0 X0", False),  # their sum over the stage may begin before it is over
        ("", False),
    ],
)
def test_weight_gradients_are_compared_where_they_are_alone(order: str, alone: bool) -> None:
    nobody: Any = None
    stage = Stage([torch.nn.Linear(1, 1)], 0, 0, torch.device("cpu"))
    verifier = Verifier(nobody, nobody, stage, [], Grid(2, 1, 2), "cpu:0", possible=True)
    verifier.follow(program(order))
    assert verifier.compares_weights == alone
