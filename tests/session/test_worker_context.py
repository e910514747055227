"""Steps that ask torch for a process group, and workers that are alone."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.planning.grid import Grid, Positions
from lightning_recycle.session.worker_context import WorkerCollectives, watch_process_group


def gather_negatives() -> bool:
    return dist.is_available() and dist.is_initialized()


def test_a_step_that_asks_for_a_process_group_is_warned_once(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", dist.is_initialized)  # restored afterwards
    in_step = False
    watch_process_group(lambda: in_step)
    library = eval("lambda dist: dist.is_initialized()", {"__name__": "torch.nn.parallel"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not gather_negatives()  # in a hook
        in_step = True
        assert not library(dist)
    with pytest.warns(UserWarning, match="gather_negatives .*larger batch_size"):
        assert not gather_negatives()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not gather_negatives()


@pytest.mark.parametrize("of_members", [False, True])
def test_the_group_of_a_positions_members_is_for_torch_alone(monkeypatch, of_members):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    watch_process_group(lambda: False, of_members)
    asks = {
        name: eval("lambda dist: dist.is_initialized()", {"__name__": name})
        for name in ("torch.distributed.tensor", "torchmetrics.metric", "lightning.fabric")
    }
    assert [ask(dist) for ask in asks.values()] == [True, not of_members, not of_members]
    assert gather_negatives() is not of_members


def alone(stages: int) -> WorkerCollectives:
    """The collectives of a worker that is about to join, of whose messages none is answered."""
    positions = Positions(Grid(2, stages, 1))
    client: Any = SimpleNamespace(rank=1, is_joining=True, arrive=lambda name, value: {1: value})
    client.member = SimpleNamespace(roster=(0, 1), leader=0)
    run: Any = SimpleNamespace(grid=positions.grid, positions=positions)
    return WorkerCollectives(run, client, lambda: False)


def test_a_worker_that_is_alone_waits_for_no_answer_of_others():
    assert alone(1).gather_stages("weights", lambda: {"weight": 1.0}) == [{"weight": 1.0}]
    with pytest.raises(
        UnsupportedFeatureError, match="all stages for weights, in a hook that a replacement runs alone"
    ):
        alone(2).gather_stages("weights", dict)
    with pytest.raises(UnsupportedFeatureError, match="the leader for predictions"):
        alone(1).by_leader("predictions", dict)
