"""Exceptions that a fault of the machine may explain: a peer runs the same again, and only then are they the user's."""

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.growth import causes, happened
from support.models import GLOBAL_BATCH, STEPS, Regression, dataset
from support.sampling import sampled
from support.streams import Stream
from support.training import TOLERANCE, difference, exact_fit, failures, fit, plain_loop
from torch import Tensor
from torch.utils.data import Dataset

pytestmark = pytest.mark.long

DeviceLost = getattr(torch, "AcceleratorError", RuntimeError)  # torch before 2.8 has no class of its own

SAMPLE = 4 * GLOBAL_BATCH + 5  # belongs to step 4


class Trouble:
    """Raises an exception, once in the run or always, and notes the process."""

    def __init__(self, folder: Path, error: Exception, once: bool = True) -> None:
        self.folder, self.error, self.once = folder, error, once

    def __call__(self) -> None:
        if self.once:
            try:
                (self.folder / "once").touch(exist_ok=False)
            except FileExistsError:
                return
        (self.folder / f"raised-{os.getpid()}-{time.monotonic_ns()}").touch()
        raise self.error

    @property
    def processes(self) -> list[str]:
        """Who raised it, in order."""
        times = sorted((int(path.name.split("-")[2]), path.name.split("-")[1]) for path in self.folder.glob("raised-*"))
        return [pid for _, pid in times]


class Files(Dataset[tuple[Tensor, Tensor]]):
    """The samples of :func:`dataset`; reading :data:`SAMPLE` is trouble, and each opens a file."""

    def __init__(self, trouble: Trouble | None = None) -> None:
        self.samples, self.trouble = dataset(), trouble

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):  # the plain loop, on no machine in particular
            return self.samples[index]
        if index == SAMPLE and self.trouble is not None:
            self.trouble()
        with open(os.devnull):
            return self.samples[index]


class Troubled(Regression):
    """Meets trouble in one of its methods, in step 4."""

    def __init__(self, trouble: Trouble, place: str) -> None:
        super().__init__()
        self.trouble, self.place, self.is_worker = trouble, place, False

    def setup(self, stage: str) -> None:
        self.is_worker = True  # unlike what the plain loop trains

    def _at(self, place: str) -> None:
        if self.place == place and self.is_worker and self.trainer.global_step == 4:
            self.trouble()

    def split_batch(self, batch: Any) -> Any:
        self._at("split")
        return super().split_batch(batch)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self._at("loss")
        loss = super().loss(output, target)
        if self.place == "backward":
            loss.register_hook(lambda _: self._at("backward"))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._at("optimizer")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._at("hook")


def eio() -> OSError:
    return OSError(errno.EIO, "Input/output error", "/data/shard")


# ---------------------------------------------------------------------- once: the machine's


@pytest.mark.parametrize("processes", [0, 2])
def test_a_sample_that_one_worker_cannot_read_is_read_by_another(tmp_path, processes):
    data = Files(Trouble(tmp_path, eio()))
    run = exact_fit(Regression().double(), 2, 2, data=data, loader={"num_workers": processes})
    assert len(failures(run)) == 1
    assert "OSError" in causes(run)[0]
    assert "reading data of step 4" in causes(run)[0]


# ---------------------------------------------------------------------- by the last holder of a stage


@pytest.mark.parametrize("place", sampled(["split", "loss", "backward", "data", "data of a process"], 1))
def test_the_only_replica_does_the_work_again_itself(tmp_path, place):
    trouble = Trouble(tmp_path, eio())
    if place.startswith("data"):
        loader = {"num_workers": int(place != "data")}
        run = exact_fit(Regression().double(), 1, 2, data=Files(trouble), loader=loader)
    else:
        run = exact_fit(Troubled(trouble, place).double(), 1, 2)
    assert failures(run) == []
    (event,) = happened(run, "retried")
    assert "OSError" in event.details["cause"]


@pytest.mark.parametrize(
    ("error", "place"),
    [(OSError(errno.EIO, "no"), "optimizer"), (DeviceLost("CUDA error: gone"), "loss")],
    ids=["half-applied", "lost device"],
)
def test_what_the_only_replica_cannot_do_again_ends_the_run(tmp_path, error, place):
    with pytest.raises(type(error), match=str(error.args[-1])):
        fit(Troubled(Trouble(tmp_path, error), place).double(), 1, 2)


# ---------------------------------------------------------------------- again: the user's


@pytest.mark.parametrize(("processes", "pipelines", "most"), sampled([(0, 1, 4), (0, 3, 4), (1, 1, 4), (1, 3, 4)], 1))
def test_a_file_that_nobody_finds_ends_the_run_as_itself(tmp_path, pipelines, most, processes):
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/5.png")
    trouble = Trouble(tmp_path, missing, once=False)
    with pytest.raises(FileNotFoundError, match=r"5\.png") as caught:
        fit(Regression().double(), pipelines, 2, data=Files(trouble), loader={"num_workers": processes})
    if not processes:  # torch makes another one of what its processes raise
        assert caught.value.filename == "/data/5.png"
    assert "In worker" in str(caught.value.__cause__)
    assert 2 <= len(trouble.processes) <= most  # of each stage that reads one worker, and then a peer or the same


@pytest.mark.parametrize("place", sampled(["loss", "optimizer", "hook"], 1))
def test_an_error_that_a_peer_meets_too_ends_the_run_as_itself(tmp_path, place):
    trouble = Trouble(tmp_path, eio(), once=False)
    with pytest.raises(OSError, match="Input/output error") as caught:
        fit(Troubled(trouble, place).double(), 3, 2)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, "/data/shard")


def test_the_log_of_a_full_disk_does_not_cost_one_leader_after_the_other(tmp_path):
    trouble = Trouble(tmp_path, OSError(errno.ENOSPC, "No space left on device"), once=False)
    with pytest.raises(OSError, match="No space left"):
        fit(Regression().double(), 4, 1, callbacks=[OnlyTheLeader(trouble)])
    assert len(set(trouble.processes)) == 2


class OnlyTheLeader(L.Callback):
    """Writes something every third step, as loggers do."""

    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step % 3 == 0:
            self.trouble()


# ---------------------------------------------------------------------- options


class StorageError(Exception):
    """A client's own error, which derives from none of Python's."""


def test_the_user_says_which_errors_are_a_machines(tmp_path):
    """More of this option in tests/runtime/test_machine_error_classes.py."""
    model = Troubled(Trouble(tmp_path, StorageError("503 Slow Down")), "loss").double()
    assert len(failures(exact_fit(model, 2, 2, strategy={"machine_errors": (StorageError,)}))) == 1


def test_without_retries_the_first_exception_ends_the_run(tmp_path):
    trouble = Trouble(tmp_path, eio())
    with pytest.raises(OSError, match="shard"):
        fit(Troubled(trouble, "loss").double(), 2, 2, strategy={"machine_error_retries": 0})


class FailingStream(Stream):
    """Its reading is trouble, once on the way."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(STEPS * GLOBAL_BATCH)
        self.trouble = trouble

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, sample in enumerate(super().__iter__()):
            if number == SAMPLE:
                self.trouble()
            yield sample


def test_a_worker_that_cannot_read_on_in_a_stream_is_evicted_and_the_only_replica_ends_the_run(tmp_path):
    model = Regression().double()
    expected = plain_loop(model, dataset())
    assert len(failures(fit(model, 3, 2, data=FailingStream(Trouble(tmp_path, eio()))))) == 1
    assert difference(model.state_dict(), expected) < TOLERANCE
    (tmp_path / "once").unlink()
    with pytest.raises(OSError, match="shard"):
        fit(Regression().double(), 1, 2, data=FailingStream(Trouble(tmp_path, eio())))
