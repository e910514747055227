"""Data read forwards, such as an IterableDataset without indices.

Every worker reads all of it, even in middle stages, which must know when it ends. The reader only moves forward; redone
steps need the samples of at most three steps, which are kept.

**A stream of samples** (:class:`StreamLoader`) is read as by one device with ``batch_size`` times the number of
pipelines, so the grid has no influence on the order, by this process or by DataLoader processes that each read a part
in turns. Randomness depends only on (seed, epoch, part, number of the sample). A joining worker or resumed run rewinds
the dataset to the newest step with a saved state, and reads on from there; without state, from the start of the epoch.
Digests show whether all workers read the same, and the same again.

Streams of Hugging Face's ``datasets`` (version 5.2) return to a loaded state also at later passes with its epoch
number, ignore it otherwise, and leave a shuffle buffer's samples out of it. So a state is reset before the next pass
(``load_state_dict(None)``), the epoch number is part of the place in the data, and a dataset with a shuffle buffer is
read again up to its place. ``datasets`` must not be imported here.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from typing_extensions import override

from lightning_recycle.data.dataloaders import add_sample, drops_last, is_stateful
from lightning_recycle.data.map_style import identity_collate, process_settings
from lightning_recycle.data.step_sources import SampleLoader, StepHandle, StepLoader
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError, counted
from lightning_recycle.planning.grid import Grid, Microbatch
from lightning_recycle.randomness import derive_seed, seeded_everything

END = object()
_KEPT_STEPS = 3  # the current one, the previous one, which others may have to redo, and the next one


class ForwardLoader(StepLoader):
    """Steps found only by reading earlier ones; the newest are kept."""

    only_forward = True

    def __init__(self, dataloader: Any, grid: Grid, seed: int, **options: Any) -> None:
        super().__init__(dataloader, grid, seed, **options)
        self._knows_epoch = self.evaluation
        self._pass_epoch: int | None = None  # the epoch whose pass is being read
        self._next_step = 0  # its next step to read
        self._kept_steps: dict[tuple[int, int], Any] = {}
        self._newest_begun: tuple[int, int] | None = None

    @override
    def enter_epoch(self, first_step: int, end_step: float) -> None:
        super().enter_epoch(first_step, end_step)
        self._knows_epoch = True

    @override
    def __iter__(self) -> Iterator[StepHandle]:
        if not self._is_entering:
            return self._another_pass()
        if not self._knows_epoch:
            # Without a length, Lightning asks for one batch before it knows where training begins, and then iterates
            # again.
            return iter([StepHandle(self, self._epoch, 0)])
        return self._steps_from(self._epoch, self.first_step)

    def _another_pass(self) -> Iterator[StepHandle]:
        """A pass of a hook's own iteration, which leaves that of the training alone."""
        pipelines = self.batch_pipelines
        other = type(self)(self.dataloader, self.grid, self._seed, batch_pipelines=pipelines, evaluation=True)
        other.prepare = self.prepare
        return other._steps_from(self._epoch, 0)

    def _steps_from(self, epoch: int, index: int) -> Iterator[StepHandle]:
        if self.evaluation:
            self._begin_pass(epoch)
        while self._read_up_to(epoch, index):
            yield StepHandle(self, epoch, index)
            index += 1

    @override
    def begin_step(self, handle: StepHandle) -> None:
        self._newest_begun = handle.epoch, handle.index

    @override
    def read_ahead(self, handle: StepHandle) -> None:
        if handle.epoch == self._pass_epoch and handle.index + 1 < self.end_step:
            self._read_up_to(handle.epoch, handle.index + 1)

    def _step(self, handle: StepHandle) -> Any:
        """The data of the step, read or kept; UnsupportedFeatureError if it is gone."""
        key = handle.epoch, handle.index
        if key not in self._kept_steps and (handle.epoch != self._pass_epoch or not self._read_up_to(*key)):
            name = type(getattr(self.dataloader, "dataset", self.dataloader)).__name__
            raise UnsupportedFeatureError(
                f"The batch of step {handle.index} of epoch {handle.epoch} of {name}, which can only be read forwards,"
                f" is gone: the newest {_KEPT_STEPS} steps are kept. Look into a batch in the hooks of its own step."
            )
        return self._kept_steps[key]

    def _read_up_to(self, epoch: int, index: int) -> bool:
        """Reads as far as a step; returns False if the pass ends before it."""
        if epoch != self._pass_epoch:
            self._begin_pass(epoch)
        while self._next_step <= index:
            if not self._keep_next():
                return False
        return (epoch, index) in self._kept_steps

    def _begin_pass(self, epoch: int) -> None:
        # The last step begun may still have to be redone; data read but not requested must not displace it.
        self._kept_steps = {key: step for key, step in self._kept_steps.items() if key == self._newest_begun}
        self._pass_epoch, self._next_step = epoch, 0

    def _keep_next(self) -> bool:
        """Reads the next step of the pass; False if there is none."""
        assert self._pass_epoch is not None
        step, key = self._read_step(), (self._pass_epoch, self._next_step)
        if step is END:
            return False
        self._kept_steps.pop(key, None)  # of an earlier evaluation
        self._kept_steps[key] = step
        self._next_step += 1
        if len(self._kept_steps) > _KEPT_STEPS:
            del self._kept_steps[next(iter(self._kept_steps))]
        return True

    @abstractmethod
    def _read_step(self) -> Any:
        """The data of the next step; ``END`` at the end of the pass."""


# ---------------------------------------------------------------------- streams of samples


def is_huggingface(dataset: Any) -> bool:
    """Whether ``dataset`` is an ``IterableDataset`` of ``datasets``."""
    return any(kind.__module__ == "datasets.iterable_dataset" for kind in type(dataset).__mro__)


def has_shuffle_buffer(dataset: Any) -> bool:
    """Whether samples wait in a buffer of ``dataset``, which its state leaves out."""
    return _holds_buffer(dataset._ex_iterable)


def _holds_buffer(examples: Any) -> bool:
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        return True
    sources = [*getattr(examples, "ex_iterables", ()), getattr(examples, "ex_iterable", None)]
    return any(_holds_buffer(source) for source in sources if source is not None)


# (part, samples, state of the part after them).
_Batch: TypeAlias = tuple[int, list[Any], dict[str, Any]]


class StreamReader:
    """Reads the batches of a stream, pass after pass, and can resume from a state.

    If ``independent``, every pass begins with the dataset as given, as in DataLoader processes; otherwise as the
    previous pass left it. ``digest``: checksum of the samples read so far in this pass by the process that made the
    newest batch.
    """

    def __init__(self, dataloader: DataLoader[Any], batch_size: int, seed: int, independent: bool = False) -> None:
        self.has_ended, self.digest = False, 0
        self._dataloader = dataloader
        self._batch_size = batch_size
        self.seed = seed
        self._copies_dataset = independent and dataloader.num_workers == 0
        self._batches: Iterator[_Batch] = iter(())
        # Parts are read in turns. A restarted reader starts with the first part, so at the beginning of a round.
        self._parts: list[dict[str, Any] | None] = []  # states after what was read
        self._round_start: list[dict[str, Any] | None] = []  # states at the beginning of the current round
        self._last_part = -1  # the part that was read last in this round
        self._num_read_in_round = 0  # batches of this round

    def begin(self, epoch: int, state: dict[str, Any] | None = None) -> None:
        """Begins the pass of ``epoch``, or resumes it from a state."""
        self.close()
        self.has_ended, self.digest = False, 0
        self._parts = list(state["parts"]) if state else [None] * max(1, self._dataloader.num_workers)
        self._round_start, self._last_part, self._num_read_in_round = list(self._parts), -1, 0
        self._batches = self._start(epoch)
        for _ in range(state["skip"] if state else 0):
            self.read()

    def read(self) -> list[Any] | None:
        """The next batch, incomplete where a part ends; None at the end of the pass."""
        batch = next(self._batches, None)
        if batch is None:
            self.has_ended = True
            return None
        part, samples, state = batch
        self.digest = state["digest"]
        if part <= self._last_part:
            self._round_start, self._num_read_in_round = list(self._parts), 0
        self._parts[part] = state
        self._last_part, self._num_read_in_round = part, self._num_read_in_round + 1
        if part == len(self._parts) - 1:
            self._round_start, self._last_part, self._num_read_in_round = list(self._parts), -1, 0
        return samples

    def state(self) -> dict[str, Any]:
        """The state from which :meth:`begin` resumes with the next batch."""
        return {"parts": list(self._round_start), "skip": self._num_read_in_round}

    def close(self) -> None:
        self._batches = iter(())

    def _start(self, epoch: int) -> Iterator[_Batch]:
        user = self._dataloader
        dataset = copy.deepcopy(user.dataset) if self._copies_dataset else user.dataset
        parts = _PartsDataset(dataset, self._batch_size, self.seed, epoch, list(self._parts))
        if user.num_workers == 0:
            return iter(parts)
        loader = DataLoader(
            parts,
            batch_size=None,  # it yields batches already
            collate_fn=identity_collate,
            num_workers=user.num_workers,
            **process_settings(user, dataset),
        )
        with seeded_everything() as reseed:
            reseed(derive_seed(self.seed, epoch))  # the processes' own seeds come from these generators
            return iter(loader)


class _PartsDataset(IterableDataset[_Batch]):
    """The batches of a pass, a part by each reading process; ``states``: by process."""

    def __init__(
        self, dataset: Any, batch_size: int, seed: int, epoch: int, states: list[dict[str, Any] | None]
    ) -> None:
        self.dataset, self.batch_size, self.seed, self.epoch, self.states = dataset, batch_size, seed, epoch, states

    def __iter__(self) -> Iterator[_Batch]:
        info = get_worker_info()
        number = info.id if info is not None else 0
        reader = _PartReader(self.dataset, self.seed, self.epoch, number, self.states[number])
        while not reader.has_ended:
            samples = reader.take(self.batch_size)
            yield number, samples, reader.state()


class _PartReader:
    """One process's part of a pass, resumed from ``state``."""

    def __init__(self, dataset: Any, seed: int, epoch: int, number: int, state: dict[str, Any] | None) -> None:
        self.has_ended = False
        self._dataset = dataset
        self._seeds = seed, epoch, number
        self._read = self._digest = 0
        state = copy.deepcopy(state) or {"read": 0, "ended": False, "digest": 0, "dataset": None, "iterator": None}
        with seeded_everything() as reseed:
            reseed(derive_seed(*self._seeds, -1))
            if is_huggingface(dataset) or state["dataset"] is not None:  # the order that torchdata keeps, too
                dataset.load_state_dict(state["dataset"])
            self._samples: Any = iter(dataset)
            if state["iterator"] is not None:
                self._samples.load_state_dict(state["iterator"])
        self.has_ended = state["ended"]
        if state["dataset"] is not None or state["iterator"] is not None:
            self._read, self._digest = state["read"], state["digest"]
        while self._read < state["read"] and not self.has_ended:
            self.take(min(state["read"] - self._read, 1000))
        if self._digest != state["digest"]:
            raise ConfigurationError(
                f"{type(dataset).__name__} gave other samples when the first {state['read']} of epoch {epoch} were read"
                " again, for a worker that joins or a run that resumes. A stream without state must give the same"
                " samples in each epoch whenever it is read, by any process: not depend on the time, the process, the"
                " order of a set, or on earlier epochs (with num_workers=1 each epoch begins with the dataset as it was"
                " given). Otherwise give it state_dict() and load_state_dict()."
            )

    def take(self, count: int) -> list[Any]:
        """The next ``count`` samples; fewer at the end."""
        samples: list[Any] = []
        with seeded_everything() as reseed:
            while len(samples) < count and not self.has_ended:
                reseed(derive_seed(*self._seeds, self._read))
                try:
                    samples.append(next(self._samples))
                    self._read += 1
                    self._digest = add_sample(self._digest, samples[-1])
                except StopIteration:
                    self.has_ended = True
        return samples

    def state(self) -> dict[str, Any]:
        return {
            "read": self._read,
            "ended": self.has_ended,
            "digest": self._digest,
            "dataset": _state_of(self._dataset) if self._samples is not self._dataset else None,
            "iterator": _state_of(self._samples),
        }


def _state_of(thing: Any) -> Any:
    """A copy: the next sample may change the very dict of the state."""
    if not is_stateful(thing) or (is_huggingface(thing) and has_shuffle_buffer(thing)):
        return None
    return copy.deepcopy(thing.state_dict())


@dataclass(frozen=True)
class _StreamStep:
    """The samples of a step, the reader's state before it, and the digest after it."""

    samples: list[Any]
    start: dict[str, Any]
    digest: int


class StreamLoader(ForwardLoader, SampleLoader):
    """The steps of an epoch of a stream.

    Its state is a place in the stream, the same on every worker and for every grid: ``reader``, the reader's state at
    the start of step ``step`` of ``epoch`` (None: the start of the dataset as given); ``passes``, for each epoch from
    ``epoch`` on: [steps read, whether the stream ended]; and ``digest``, of step ``step``. No state is saved at the
    very start of a pass, when a generator has not yet run any of its code.

    Raises UnsupportedFeatureError for a stream that cannot be read again; ConfigurationError if a training batch cannot
    be split into M micro-batches or, later, a training stream yields no global batch.
    """

    def __init__(self, dataloader: Any, grid: Grid, seed: int, **options: Any) -> None:
        super().__init__(dataloader, grid, seed, **options)
        self._drops_last = not self.evaluation or drops_last(dataloader)
        self._reader = StreamReader(dataloader, self.global_batch_size, seed, independent=self.evaluation)
        # Whether a pass depends on earlier ones.
        self._depends_on_earlier_passes = (
            not self.evaluation
            and dataloader.num_workers == 0
            and is_stateful(self.dataset)
            and not is_huggingface(self.dataset)
        )
        self._place: dict[str, Any] = {"epoch": 0, "step": 0, "reader": None, "passes": [], "digest": None}
        self._place_to_find: dict[str, Any] | None = None

    @override
    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        self._reader.seed = seed

    # ------------------------------------------------------------------ what Lightning sees

    def __len__(self) -> int:
        """Steps per epoch; TypeError if unknown, as Lightning expects."""
        samples = len(self.dataset)
        steps = samples // self.global_batch_size
        if not self._drops_last:
            return -(-samples // self.global_batch_size)
        if steps == 0 and not self.evaluation:
            self._refuse(f"has {counted(samples, 'sample')}")
        return steps

    def _another_pass(self) -> Iterator[StepHandle]:
        if self._depends_on_earlier_passes:
            raise UnsupportedFeatureError(
                f"{type(self.dataset).__name__}, the training data, has state_dict(), so another iteration over"
                " trainer.train_dataloader, by a hook, would move the place of the training. Iterate over a DataLoader"
                " of another object of that class."
            )
        return super()._another_pass()

    def _steps_from(self, epoch: int, index: int) -> Iterator[StepHandle]:
        yield from super()._steps_from(epoch, index)
        if self._next_step == 0 and self._newest_begun is None and not self.evaluation:
            self._refuse("ended")

    def _refuse(self, what: str) -> None:
        raise ConfigurationError(
            f"{type(self.dataset).__name__}, the training data, {what}: that is less than one global batch of"
            f" {counted(self.global_batch_size, 'sample')} (batch_size={self.dataloader.batch_size} of each pipeline)."
            " Use a smaller batch_size or fewer pipelines."
        )

    def state_dict(self) -> dict[str, Any]:
        """A place from which any worker can reach the next step, or the one after it."""
        if self._place_to_find is None:
            self._record_progress()
        place = copy.deepcopy(self._place_to_find or self._place)
        if self._has_user_epoch:
            place["dataset_epoch"] = self.dataset.epoch
        return place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adopts a place for the next iteration; ConfigurationError for another's state."""
        if not self._place.keys() <= state.keys():
            raise ConfigurationError(
                "The checkpoint's state of the training data was not written by strategy='recycle', so the place in"
                f" {type(self.dataset).__name__} is unknown. Resume it on one device, or from a checkpoint of a grid"
                " (devices=1 with strategy='recycle' is also one)."
            )
        parts = len(state["reader"]["parts"]) if state["reader"] else None
        if parts not in (None, max(1, self.dataloader.num_workers)):
            raise ConfigurationError(
                f"The checkpoint was written with {parts} reading processes, and now num_workers="
                f"{self.dataloader.num_workers}: the order of {type(self.dataset).__name__}'s samples depends on that."
                f" Resume with num_workers={parts}" + (" or 0." if parts == 1 else ".")
            )
        if self._has_user_epoch:  # a joining worker has not called what sets it
            self.dataset.set_epoch(state.get("dataset_epoch", 0))
        self._place_to_find = copy.deepcopy(state)
        self._kept_steps.clear()

    @property
    def _has_user_epoch(self) -> bool:
        """Whether the user sets the dataset's epoch, on which its order depends."""
        return is_huggingface(self.dataset) or (
            not is_stateful(self.dataset) and hasattr(self.dataset, "epoch") and hasattr(self.dataset, "set_epoch")
        )

    # ------------------------------------------------------------------ what the executor sees

    def begin_step(self, handle: StepHandle) -> None:
        step = self._step(handle)
        super().begin_step(handle)
        if handle.index > 0:
            newest = {"epoch": handle.epoch, "step": handle.index, "reader": step.start}
            self._place = {**newest, "passes": [[]], "digest": step.digest}

    def read_ahead(self, handle: StepHandle) -> None:
        if self.dataloader.num_workers == 0:
            super().read_ahead(handle)

    def collate_microbatch(self, handle: StepHandle, microbatch: Microbatch) -> Any:
        return self._collate_samples(handle, self._share(microbatch, self.samples_in(handle)))

    def collate_batch(self, handle: StepHandle) -> Any:
        return self._collate_samples(handle, range(self.samples_in(handle)))

    def samples_in(self, handle: StepHandle) -> int:
        return len(self._step(handle).samples) if self.evaluation else self.global_batch_size

    def digest(self, handle: StepHandle) -> int:
        return int(self._step(handle).digest)

    def close(self) -> None:
        self._reader.close()

    # ------------------------------------------------------------------ inside

    def _collate_samples(self, handle: StepHandle, share: range) -> Any:
        samples = self._step(handle).samples
        samples_of_share = [samples[i] for i in share]
        if self.dataloader.collate_fn is not default_collate:
            # It may return the samples themselves, which layers may change in place; a redo needs them as
            # they were.
            samples_of_share = copy.deepcopy(samples_of_share)
        first = handle.index * self.global_batch_size
        addressed = [((handle.epoch, first + i), sample) for i, sample in zip(share, samples_of_share, strict=True)]
        with seeded_everything() as reseed:
            return self._collate.collect(addressed, reseed)

    def _read_up_to(self, epoch: int, index: int) -> bool:
        if self._place_to_find is not None:
            self._find_place(epoch)
        return super()._read_up_to(epoch, index)

    def _begin_pass(self, epoch: int) -> None:
        if self._depends_on_earlier_passes and self._pass_epoch is not None:
            self._record_progress()
            self._place["passes"].append([])
        else:
            self._place = {"epoch": epoch, "step": 0, "reader": None, "passes": [[]], "digest": None}
        self._reader.begin(epoch)
        super()._begin_pass(epoch)

    def _record_progress(self) -> None:
        """Records in the place how far the current pass was read."""
        if self._place["passes"]:
            self._place["passes"][-1] = [self._next_step, self._reader.has_ended]

    def _find_place(self, epoch: int) -> None:
        """Brings the reader to the restored place, if that is in ``epoch``.

        Reads again what came between. Raises ConfigurationError if the stream ends earlier than it did.
        """
        place, self._place_to_find = self._place_to_find, None
        assert place is not None
        self._pass_epoch = None
        if not place["passes"] or (not self._depends_on_earlier_passes and place["epoch"] != epoch):
            return
        passes, place["passes"] = place["passes"], [[]]
        self._place = place
        for number, (steps, ended) in enumerate(passes):
            if number == 0:
                self._reader.begin(place["epoch"], place["reader"])
                self._pass_epoch, self._next_step = place["epoch"], place["step"]
            else:
                self._begin_pass(place["epoch"] + number)
            while self._next_step < steps:
                if not self._keep_next():
                    raise ConfigurationError(
                        f"{type(self.dataset).__name__} ended before step {self._next_step} of epoch"
                        f" {self._pass_epoch}, where it did not end before. After load_state_dict() a stream must"
                        " continue with the same samples."
                    )
                if number == 0 and self._next_step == place["step"] + 1:
                    self._check_place()
            if self._pass_epoch == epoch:
                return
            if ended:
                self._keep_next()

    def _check_place(self) -> None:
        if self._place["digest"] not in (None, self._reader.digest):
            raise ConfigurationError(
                f"{type(self.dataset).__name__} gave other samples for step {self._place['step']} of epoch"
                f" {self._place['epoch']} when they were read again. A stream must continue with the same samples, from"
                " its state or from the start of the epoch, in any process."
            )

    @override
    def _read_step(self) -> Any:
        start = self._reader.state()
        while (batch := self._reader.read()) is not None:
            if len(batch) == self.global_batch_size or (batch and not self._drops_last):
                return _StreamStep(batch, start, self._reader.digest)
        return END
