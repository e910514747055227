"""Copies for checkpoints that are written in the background, and how the outcome of batches is agreed on."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_recycle.control.client import Interrupted
from lightning_recycle.control.protocol.messages import SaveFailure, SaveStatus
from lightning_recycle.planning.grid import Grid, Positions
from lightning_recycle.session import concurrent_checkpoints
from lightning_recycle.session.configuration import CheckpointOptions, Options


def test_a_copy_keeps_the_values_and_what_is_tied():
    weight = torch.nn.Parameter(torch.ones(3))
    groups = [{"lr": 0.1, "betas": (0.9, 0.999)}]
    copy = concurrent_checkpoints.StateCopies().take({"weight": weight, "tied": weight.detach(), "groups": groups})
    with torch.no_grad():
        weight.zero_()
    assert copy["weight"].tolist() == [1.0, 1.0, 1.0]
    assert copy["tied"] is copy["weight"]
    assert not copy["weight"].requires_grad
    assert copy["groups"] == [{"lr": 0.1, "betas": (0.9, 0.999)}]


def test_a_tensor_is_copied_once_until_it_is_written():
    weight, copies = torch.ones(3), concurrent_checkpoints.StateCopies()
    first = copies.take({"weight": weight})["weight"]
    assert copies.take({"weight": weight})["weight"] is first
    weight.mul_(2)
    second = copies.take({"weight": weight})["weight"]
    assert first.tolist() == [1.0, 1.0, 1.0]
    assert second.tolist() == [2.0, 2.0, 2.0]


def test_memory_of_an_earlier_boundary_is_used_again_where_it_fits():
    earlier = concurrent_checkpoints.StateCopies()
    old = earlier.take({"weight": torch.ones(3), "bias": torch.ones(2)})
    earlier.forget_originals()
    new = concurrent_checkpoints.StateCopies(earlier).take({"weight": torch.full((3,), 5.0), "bias": torch.ones(4)})
    assert new["weight"].data_ptr() == old["weight"].data_ptr()
    assert new["weight"].tolist() == [5.0, 5.0, 5.0]
    assert new["bias"].tolist() == [1.0] * 4


def test_tensors_without_a_version_or_plain_memory_are_copied():
    with torch.inference_mode():
        frozen = torch.ones(2)
    sparse = torch.eye(2).to_sparse()
    copy = concurrent_checkpoints.StateCopies().take({"frozen": frozen, "sparse": sparse})
    assert copy["frozen"].tolist() == [1.0, 1.0]
    assert copy["sparse"].to_dense().tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("pieces", range(5))
def test_a_part_whose_receiver_is_lost_is_given_up_wherever_torch_is_in_its_archive(pieces):
    taken = iter(range(pieces))

    def take(*_: Any) -> None:
        if next(taken, None) is None:
            raise Interrupted

    client: Any = SimpleNamespace(
        rank=0,
        generation=0,
        coordinator_changes=0,
        send_parcel=lambda *_: None,
        receive_parcel=take,
        has_parcel=lambda *_: False,
    )
    group = concurrent_checkpoints.HolderGroup(client, Positions(Grid(2, 2, 1)), 1, 4, (0, 3), 0)
    with pytest.raises(concurrent_checkpoints.GivenUp, match="the worker of rank 3 was lost"):
        group.send({n: torch.zeros(300_000 + n) for n in range(10)})


LARGE = 1 << 20  # elements of four bytes


def test_large_tensors_that_only_step_writes_are_copied_later_by_whoever_comes_first():
    state = {n: torch.full((LARGE,), float(n)) for n in range(8)}
    copies = concurrent_checkpoints.StateCopies()
    copy = copies.take(state, ("optimizer",), until_step=True)
    writer = threading.Thread(target=copies.finish)
    writer.start()
    assert copies.finish()
    for tensor in state.values():  # STEP
        tensor.add_(100)
    writer.join()
    assert copies.finish()
    assert all(torch.equal(copy[n], torch.full((LARGE,), float(n))) for n in state)


def test_it_is_noticed_when_one_was_written_before_it_was_copied():
    state, small = torch.zeros(LARGE), torch.zeros(3)
    copies = concurrent_checkpoints.StateCopies()
    copy = copies.take({"large": state, "small": small}, until_step=True)
    small.add_(1)  # was copied at once
    assert copies.finish()
    assert copy["small"].tolist() == [0.0] * 3
    copies = concurrent_checkpoints.StateCopies()
    copies.take({"large": state}, until_step=True)
    state.add_(1)
    assert not copies.finish()


def test_where_copies_do_not_fit_they_are_the_tensors_themselves():
    weight, earlier = torch.ones(4), concurrent_checkpoints.StateCopies()
    earlier.take({"weight": weight})
    earlier.forget_originals()
    copies = concurrent_checkpoints.StateCopies(earlier)
    assert copies.limit(16, free=0)  # into the memory of the earlier ones
    assert copies.take({"weight": weight})["weight"].data_ptr() != weight.data_ptr()
    assert copies.limit(16, free=0)  # it is there
    assert not copies.limit(32, free=15)
    assert copies.take({"other": weight})["other"].data_ptr() == weight.data_ptr()


class Worker:
    """A worker's :class:`CheckpointBatches`, and what followed from its batches."""

    def __init__(self, rank: int = 0, holders: tuple[int, ...] = (2, 1)) -> None:
        self.sent: list[Any] = []
        self.failed: list[Any] = []
        self.client: Any = SimpleNamespace(
            rank=rank, coordinator_changes=0, member=SimpleNamespace(saves=SaveStatus(holders, 7))
        )
        self.client.send, self.client.forget_parcels = self.sent.append, lambda number: None
        self.collectives: Any = SimpleNamespace(
            positions=Positions(Grid(2, 2, 2)), confirm_step=lambda: None, is_leader=rank == 1
        )
        options = Options(checkpoints=CheckpointOptions(signal_timeout=1.0))
        self.followed: list[Any] = []
        self.discarded: list[str] = []
        context: Any = SimpleNamespace(options=options, collectives=self.collectives, client=self.client)
        actions = {"record": lambda failure, what: self.followed.append((what, failure and failure.text))}
        self.saves = concurrent_checkpoints.CheckpointBatches(
            context, actions, {}, lambda: 0.0, self.failed.append, self.discarded.append
        )

    def ask(self, version: int, *paths: str, waits: bool = False) -> None:
        with self.saves.deferring():
            batch = self.saves.begin(version, waits)
            for path in paths:
                self.saves.asked(path)
                batch.requests.append(concurrent_checkpoints.SaveRequest(path, lambda: None, is_new=True))
            self.saves.call_when_known("record", paths)
        self.saves.seal(mid_step=False)

    def hear(self, failures: tuple[SaveFailure | None, ...], unnamed: dict[int, str] | None = None) -> None:
        status = SaveStatus((2, 1), 7, self.saves.pending.number, failures, unnamed or {})
        self.client.member.saves = status
        self.saves.apply_outcome()


def test_what_is_asked_for_at_a_boundary_begins_there_on_all_workers():
    workers = [Worker(rank) for rank in (0, 3)]  # neither holds a copy
    for worker in workers:
        worker.ask(4, "a.ckpt", "b.ckpt")
    (begun,), (other,) = (worker.sent for worker in workers)
    assert (begun.version, begun.writer, begun.paths) == (4, 1, ("a.ckpt", "b.ckpt"))
    assert (other.batch, other.writer) == (begun.batch, 1)
    assert workers[0].followed == []
    for worker in workers:
        worker.hear((None, None))
        assert worker.followed == [(("a.ckpt", "b.ckpt"), None)]
        assert worker.saves.pending is None


def test_an_outcome_of_another_batch_changes_nothing():
    worker = Worker()
    worker.ask(4, "a.ckpt")
    worker.client.member.saves = SaveStatus((2, 1), 7, 1 << 40, (None,))
    worker.saves.apply_outcome()
    assert worker.saves.pending is not None
    assert worker.followed == []


def test_what_only_follows_from_older_checkpoints_follows_at_once():
    worker = Worker()
    with worker.saves.deferring():
        worker.saves.begin(4, waits=False)
        worker.saves.asked("older.ckpt")
        worker.saves.call_when_known("record", "link")
    worker.saves.seal(mid_step=False)
    assert worker.followed == [("link", None)]
    assert worker.saves.pending is None
    assert worker.sent == []


def test_the_end_of_a_run_waits_for_no_batch_that_has_not_begun(monkeypatch):
    worker = Worker(rank=1)
    worker.saves.begin(4, waits=False)
    monkeypatch.delattr("time.sleep")
    worker.saves.await_thread()


def test_what_all_wait_for_is_begun_again_without_what_was_refused():
    worker = Worker()
    outcomes = [(SaveFailure("its writer was lost"), SaveFailure("the disk is full", is_refusal=True)), (None,)]

    def barrier(name: str) -> None:
        number = worker.sent[-1].batch
        worker.client.member.saves = SaveStatus((2, 1), 8, number, outcomes.pop(0))

    worker.collectives.barrier = barrier
    worker.client.await_background_work = lambda *_: True
    worker.ask(4, "a.ckpt", "b.ckpt", waits=True)
    first, second = worker.sent
    assert not first.in_background
    assert (first.paths, second.paths) == (("a.ckpt", "b.ckpt"), ("a.ckpt",))
    assert first.batch < second.batch
    assert worker.followed == [(("a.ckpt", "b.ckpt"), "the disk is full")]
    assert [failure.text for failure in worker.failed] == ["the disk is full"]
    assert worker.saves.pending is None


def test_a_worker_that_joined_takes_up_what_follows_and_what_is_to_be_repeated():
    old, new = Worker(), Worker()
    old.saves.given_up = ("once more",)
    old.ask(4, "a.ckpt")
    new.saves.enter(old.saves.state())
    assert new.saves.given_up == ("once more",)
    new.hear((SaveFailure("given up"),))
    assert new.followed == [(("a.ckpt",), "given up")]
    for worker in (old, new):
        worker.saves.pending = None
        worker.ask(6, "b.ckpt")
    assert old.sent[-1].batch == new.sent[-1].batch


@pytest.fixture
def not_written(monkeypatch) -> None:
    """No batch is written."""
    batches = concurrent_checkpoints.CheckpointBatch
    monkeypatch.setattr(batches, "start", lambda batch: setattr(batch, "is_sealed", True))


@pytest.mark.usefixtures("not_written")
def test_the_leader_names_a_whole_file_whose_writer_was_lost(tmp_path):
    whole, path = tmp_path / ".a.writing", tmp_path / "a.ckpt"
    for rank in (0, 1):  # the second one leads
        whole.write_text("whole")
        worker = Worker(rank)
        worker.ask(4, str(path))
        worker.hear((None,), {0: str(whole)})
        assert path.exists() == (rank == 1)
    assert path.read_text() == "whole"
    assert not whole.exists()


@pytest.mark.usefixtures("not_written")
def test_the_leader_discards_a_new_file_of_a_batch_that_was_given_up():
    for rank, discarded in ((0, []), (1, ["a.ckpt"])):
        worker = Worker(rank)
        worker.ask(4, "a.ckpt")
        worker.hear((SaveFailure("its writer was lost"),))
        assert worker.discarded == discarded


def test_a_part_of_another_step_is_refused():
    parts = {0: (5, "of step 5"), 3: None}
    client: Any = SimpleNamespace(
        rank=3, coordinator_changes=0, send_parcel=lambda *_: None, receive_parcel=lambda rank, *_: parts[rank]
    )
    group = concurrent_checkpoints.HolderGroup(client, Positions(Grid(2, 2, 1)), 1, 4, (0, 3), 0)
    with pytest.raises(concurrent_checkpoints.GivenUp, match="after 5 steps, and it is to hold 4"):
        group.gather_all("names", None)
