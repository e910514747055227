"""Copies for checkpoints that are written in the background, and how their outcome is agreed on."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_recycle.control.client import Interrupted
from lightning_recycle.control.protocol.positions import Positions
from lightning_recycle.planning.grid import Grid
from lightning_recycle.session.background_saves import (
    Action,
    BackgroundSaves,
    BatchReport,
    GivenUp,
    HolderGroup,
    StateCopies,
)
from lightning_recycle.session.configuration import CheckpointOptions, Options


def state_of(weight: torch.Tensor) -> dict[str, Any]:
    return {"weight": weight, "tied": weight.detach(), "groups": [{"lr": 0.1, "betas": (0.9, 0.999)}]}


def test_a_copy_keeps_the_values_and_what_is_tied() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    copy = StateCopies().take(state_of(weight))
    with torch.no_grad():
        weight.zero_()
    assert copy["weight"].tolist() == [1.0, 1.0, 1.0]
    assert copy["tied"] is copy["weight"]
    assert not copy["weight"].requires_grad
    assert copy["groups"] == [{"lr": 0.1, "betas": (0.9, 0.999)}]


def test_a_tensor_is_copied_once_until_it_is_written() -> None:
    weight, copies = torch.ones(3), StateCopies()
    first = copies.take({"weight": weight})["weight"]
    assert copies.take({"weight": weight})["weight"] is first
    weight.mul_(2)
    second = copies.take({"weight": weight})["weight"]
    assert first.tolist() == [1.0, 1.0, 1.0]
    assert second.tolist() == [2.0, 2.0, 2.0]


def test_memory_of_an_earlier_boundary_is_used_again_where_it_fits() -> None:
    earlier = StateCopies()
    old = earlier.take({"weight": torch.ones(3), "bias": torch.ones(2)})
    earlier.forget_originals()
    new = StateCopies(earlier).take({"weight": torch.full((3,), 5.0), "bias": torch.ones(4)})
    assert new["weight"].data_ptr() == old["weight"].data_ptr()
    assert new["weight"].tolist() == [5.0, 5.0, 5.0]
    assert new["bias"].tolist() == [1.0] * 4


def test_tensors_without_a_version_or_plain_memory_are_copied() -> None:
    with torch.inference_mode():
        frozen = torch.ones(2)
    sparse = torch.eye(2).to_sparse()
    copy = StateCopies().take({"frozen": frozen, "sparse": sparse})
    assert copy["frozen"].tolist() == [1.0, 1.0]
    assert copy["sparse"].to_dense().tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("pieces", range(5))
def test_a_part_whose_receiver_is_lost_is_given_up_wherever_torch_is_in_its_archive(pieces: int) -> None:
    taken = iter(range(pieces))

    def take(*_: Any) -> None:
        if next(taken, None) is None:
            raise Interrupted

    client: Any = SimpleNamespace(
        rank=0, generation=0, returns=0, give=lambda *_: None, take=take, has_parcel=lambda *_: False
    )
    group = HolderGroup(client, Positions(Grid(2, 2, 1)), 1, (0, 3), 3)
    with pytest.raises(GivenUp, match="the worker of rank 3 was lost"):
        group.send({n: torch.zeros(300_000 + n) for n in range(10)})


LARGE = 1 << 20  # elements of four bytes


def test_large_tensors_that_only_step_writes_are_copied_later_by_whoever_comes_first() -> None:
    state = {n: torch.full((LARGE,), float(n)) for n in range(8)}
    copies = StateCopies()
    copy = copies.take(state, ("optimizer",), until_step=True)
    writer = threading.Thread(target=copies.finish)
    writer.start()
    assert copies.finish()
    for tensor in state.values():  # STEP
        tensor.add_(100)
    writer.join()
    assert copies.finish()
    assert all(torch.equal(copy[n], torch.full((LARGE,), float(n))) for n in state)


def test_it_is_noticed_when_one_was_written_before_it_was_copied() -> None:
    state, small = torch.zeros(LARGE), torch.zeros(3)
    copies = StateCopies()
    copy = copies.take({"large": state, "small": small}, until_step=True)
    small.add_(1)  # was copied at once
    assert copies.finish()
    assert copy["small"].tolist() == [0.0] * 3
    copies = StateCopies()
    copies.take({"large": state}, until_step=True)
    state.add_(1)
    assert not copies.finish()


def test_where_copies_do_not_fit_they_are_the_tensors_themselves() -> None:
    weight, earlier = torch.ones(4), StateCopies()
    earlier.take({"weight": weight})
    earlier.forget_originals()
    copies = StateCopies(earlier)
    assert copies.limit(16, free=0)  # into the memory of the earlier ones
    assert copies.take({"weight": weight})["weight"].data_ptr() != weight.data_ptr()
    assert copies.limit(16, free=0)  # it is there
    assert not copies.limit(32, free=15)
    assert copies.take({"other": weight})["other"].data_ptr() == weight.data_ptr()


class Followed:
    """A worker's :class:`BackgroundSaves` with a batch that is pending, and what followed from it."""

    def __init__(self) -> None:
        options = Options(checkpoints=CheckpointOptions(signal_timeout=1.0))
        context: Any = SimpleNamespace(options=options, collectives=SimpleNamespace())
        self.saves = BackgroundSaves(context, lambda: 1)
        self.saves.is_pending = True
        self.failures: list[Any] = []
        self.saves.actions["record"] = lambda failure: self.failures.append(failure and failure.text)

    def hear(self, *reports: BatchReport | None) -> None:
        self.saves._hear({rank: (1, report) for rank, report in enumerate(reports)})


def report(holders: tuple[int, ...], writes: bool = False, is_written: bool = True) -> BatchReport:
    return BatchReport(writes, holders, is_written, 4, ("a.ckpt",), (None,), (Action("record", ("a.ckpt",), ()),))


def test_what_follows_is_known_to_a_worker_that_joined_meanwhile() -> None:
    worker = Followed()
    worker.hear(report((0, 1, 1)), report((0, 1, 1), writes=True, is_written=False), None)
    assert worker.saves.is_pending
    worker.hear(report((0, 1, 1)), report((0, 1, 1), writes=True), None)
    assert not worker.saves.is_pending
    assert worker.failures == [None]


def test_a_worker_that_joined_chooses_the_same_holders() -> None:
    """Also if no batch is pending, so that nobody is asked how busy it is."""
    old, new, grid = Followed(), Followed(), Grid(2, 2, 2)
    old.saves._hear({0: (5, None), 1: (1, None), 2: (1, None), 3: (1, None)})
    new.saves.enter(old.saves.state())
    client = SimpleNamespace(rank=0, returns=0, generation=1, member=SimpleNamespace(next_collective=9))
    chosen = []
    for worker in (old, new):
        collectives: Any = worker.saves._collectives
        vars(collectives).update(client=client, grid=grid, positions=Positions(grid), leader=1, settle=lambda: None)
        collectives.live_workers = (0, 1, 2, 3)
        batch = worker.saves.begin(6)
        assert batch is not None
        chosen.append(batch.group.ranks)
    assert chosen == [(2, 1), (2, 1)]


def test_a_batch_whose_holders_were_chosen_before_and_after_a_loss_is_given_up() -> None:
    worker = Followed()
    worker.hear(report((0, 1, 1)), report((0, 3, 3)), report((0, 3, 3), writes=True, is_written=False))
    assert not worker.saves.is_pending
    assert ["given up" in text for text in worker.failures] == [True]


def test_what_was_written_counts_whoever_else_chose_other_holders() -> None:
    worker = Followed()
    worker.hear(report((0, 1, 1)), report((0, 3, 3)), report((0, 3, 3), writes=True))
    assert worker.failures == [None]


def test_a_batch_whose_writer_was_lost_is_given_up() -> None:
    worker = Followed()
    worker.hear(report((0, 1, 1)), None)
    assert ["the worker that wrote it was lost" in text for text in worker.failures] == [True]


def test_a_holder_does_not_wait_at_the_end_for_a_part_of_one_that_chose_others() -> None:
    worker = Followed()
    parts = SimpleNamespace(is_written=False, raise_error=lambda: None, writing_seconds=0.0)
    parts.group = SimpleNamespace(end=lambda: None)
    parts.report = lambda: report((0, 3, 3), writes=True, is_written=False)
    worker.saves.batch = parts  # type: ignore[assignment]
    worker.saves._collectives.gather_all = lambda name, known: {0: (1, report((0, 1, 1))), 3: known}  # type: ignore
    worker.saves.complete()
    assert len(worker.failures) == 1
    assert not worker.saves.is_pending
