"""Steps that ask torch for a process group."""

from __future__ import annotations

import warnings

import pytest
import torch.distributed as dist

from lightning_recycle.session.collectives import watch_process_group


def gather_negatives() -> bool:
    return dist.is_available() and dist.is_initialized()


def test_a_step_that_asks_for_a_process_group_is_warned_once(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_group_of_a_positions_members_is_for_torch_alone(monkeypatch: pytest.MonkeyPatch, of_members: bool) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    watch_process_group(lambda: False, of_members)
    asks = {
        name: eval("lambda dist: dist.is_initialized()", {"__name__": name})
        for name in ("torch.distributed.tensor", "torchmetrics.metric", "lightning.fabric")
    }
    assert [ask(dist) for ask in asks.values()] == [True, not of_members, not of_members]
    assert gather_negatives() is not of_members
