"""Micro-batch data of a stream: an IterableDataset without indices.

Every worker reads the whole stream, even in middle stages, which must know when it ends. One batch of the reader is
what one device would read with ``batch_size`` times the number of pipelines, so the grid has no influence on the order.

The reader only moves forward; redone steps need the samples of at most three steps, which are kept. A worker that
joins, or a run that resumes, rewinds its dataset to the newest step whose state could be saved, and reads again what
has been read since; a dataset without state is read again from the start of the epoch. Digests show whether all workers
read the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate
from typing_extensions import override

from lightning_recycle.data.batching import drops_last, is_stateful
from lightning_recycle.data.steps import SampleLoader, StepHandle
from lightning_recycle.data.stream_reader import StreamReader, is_huggingface
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.planning.grid import Grid, Microbatch
from lightning_recycle.randomness import seeded_everything

_KEPT_STEPS = 3  # the current one, the previous one, which others may have to redo, and the next one


@dataclass(frozen=True)
class _StreamStep:
    """The samples of a step, the reader's state before it, and the digest after it."""

    samples: list[Any]
    start: dict[str, Any]
    digest: int


class StreamLoader(SampleLoader):
    """The steps of an epoch of a stream.

    Its state is a place in the stream, the same on every worker and for every grid: ``reader`` is the reader's state at
    the start of step ``step`` of ``epoch`` (None: the start of the dataset as it was given), ``passes`` says for that
    epoch and later ones how many steps were read and whether the stream ended, and ``digest`` is that of step ``step``.
    No state is saved at the very start of a pass, when a generator has not yet run any of its code.

    Raises:
        UnsupportedFeatureError: for a stream that cannot be read a second time.
        ConfigurationError: if a training batch cannot be split into M micro-batches; later, if the training stream does
            not yield a single global batch.
    """

    only_forward = True

    def __init__(self, dataloader: Any, grid: Grid, seed: int, **options: Any) -> None:
        super().__init__(dataloader, grid, seed, **options)
        self.batch_sampler = None
        self._drops_last = not self.evaluation or drops_last(dataloader)
        self._reader = StreamReader(dataloader, self.global_batch_size, seed, independent=self.evaluation)
        # Whether a pass depends on earlier ones.
        self._goes_on = (
            not self.evaluation
            and dataloader.num_workers == 0
            and is_stateful(self.dataset)
            and not is_huggingface(self.dataset)
        )
        self._knows_epoch = self.evaluation
        self._pass: int | None = None  # the epoch whose pass is being read
        self._next = 0  # its next step to read
        self._steps: dict[tuple[int, int], _StreamStep] = {}
        self._begun: tuple[int, int] | None = None
        self._place: dict[str, Any] = {"epoch": 0, "step": 0, "reader": None, "passes": []}
        self._place_to_find: dict[str, Any] | None = None

    @override
    def reseed(self, seed: int) -> None:
        super().reseed(seed)
        self._reader.seed = seed

    # ------------------------------------------------------------------ what Lightning sees

    def __len__(self) -> int:
        """Steps per epoch.

        Raises:
            TypeError: if the stream does not know its length, as Lightning expects.
        """
        samples = len(self.dataset)
        steps = samples // self.global_batch_size
        if not self._drops_last:
            return -(-samples // self.global_batch_size)
        if steps == 0 and not self.evaluation:
            self._refuse(f"has {samples} samples")
        return steps

    def enter_epoch(self, first_step: int, end_step: float) -> None:
        super().enter_epoch(first_step, end_step)
        self._knows_epoch = True

    def __iter__(self) -> Iterator[StepHandle]:
        if not self._is_entering:
            return self._another_pass()
        if not self._knows_epoch:
            # Without a length, Lightning asks for one batch before it knows where training begins, and then iterates
            # again.
            return iter([StepHandle(self, self._epoch, 0)])
        return self._steps_from(self._epoch, self.first_step)

    def _another_pass(self) -> Iterator[StepHandle]:
        if self._goes_on:
            raise UnsupportedFeatureError(
                f"{type(self.dataset).__name__}, the training data, has state_dict(), so another iteration over"
                " trainer.train_dataloader, by a hook, would move the place of the training. Iterate over a DataLoader"
                " of another object of that class."
            )
        pipelines = self.global_batch_size // self.batch_size
        other = type(self)(self.dataloader, self.grid, self._seed, batch_pipelines=pipelines, evaluation=True)
        other.prepare = self.prepare
        return other._steps_from(self._epoch, 0)

    def _steps_from(self, epoch: int, index: int) -> Iterator[StepHandle]:
        if self.evaluation:
            self._begin_pass(epoch)
        while self._reaches(epoch, index):
            yield StepHandle(self, epoch, index)
            index += 1
        if index == 0 and self._begun is None and not self.evaluation:
            self._refuse("ended")

    def _refuse(self, what: str) -> None:
        raise ConfigurationError(
            f"{type(self.dataset).__name__}, the training data, {what}: that is less than one global batch of"
            f" {self.global_batch_size} samples (batch_size={self.batch_size} of each pipeline). Use a smaller"
            " batch_size or fewer pipelines."
        )

    def state_dict(self) -> dict[str, Any]:
        """A place from which any worker can reach the next step, or the one after it."""
        if self._place_to_find is None:
            self._keep_account()
        place = copy.deepcopy(self._place_to_find or self._place)
        if self._is_told_epoch:
            place["dataset_epoch"] = self.dataset.epoch
        return place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adopts a place; the next iteration goes there.

        Raises:
            ConfigurationError: if the state belongs to something else.
        """
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
        if self._is_told_epoch:  # a joining worker has not called what sets it
            self.dataset.set_epoch(state.get("dataset_epoch", 0))
        self._place_to_find = copy.deepcopy(state)
        self._steps.clear()

    @property
    def _is_told_epoch(self) -> bool:
        """Whether the user sets the dataset's epoch, on which its order depends."""
        return is_huggingface(self.dataset) or (
            not is_stateful(self.dataset) and hasattr(self.dataset, "epoch") and hasattr(self.dataset, "set_epoch")
        )

    # ------------------------------------------------------------------ what the executor sees

    def begin_step(self, handle: StepHandle) -> None:
        step = self._step(handle)
        self._begun = handle.epoch, handle.index
        if handle.index > 0:
            self._place = {
                "epoch": handle.epoch,
                "step": handle.index,
                "reader": step.start,
                "passes": [[]],
                "digest": step.digest,
            }

    def read_ahead(self, handle: StepHandle) -> None:
        if self.dataloader.num_workers == 0 and handle.epoch == self._pass and handle.index + 1 < self.end_step:
            self._reaches(handle.epoch, handle.index + 1)

    def collated(self, handle: StepHandle, microbatch: Microbatch) -> Any:
        return self._collated(handle, self._share(microbatch, self.samples_in(handle)))

    def collated_whole(self, handle: StepHandle) -> Any:
        return self._collated(handle, range(self.samples_in(handle)))

    def samples_in(self, handle: StepHandle) -> int:
        return len(self._step(handle).samples) if self.evaluation else self.global_batch_size

    def digest(self, handle: StepHandle) -> int:
        return self._step(handle).digest

    def close(self) -> None:
        self._reader.close()

    # ------------------------------------------------------------------ inside

    def _collated(self, handle: StepHandle, share: range) -> Any:
        samples = self._step(handle).samples
        wanted = [samples[i] for i in share]
        if self.dataloader.collate_fn is not default_collate:
            # It may return the samples themselves, which layers may change in place; a redo needs them as
            # they were.
            wanted = copy.deepcopy(wanted)
        first = handle.index * self.global_batch_size
        addressed = [((handle.epoch, first + i), sample) for i, sample in zip(share, wanted, strict=True)]
        with seeded_everything() as reseed:
            return self._collate.collect(addressed, reseed)

    def _step(self, handle: StepHandle) -> _StreamStep:
        key = handle.epoch, handle.index
        if key not in self._steps and (handle.epoch != self._pass or not self._reaches(*key)):
            raise UnsupportedFeatureError(
                f"The batch of step {handle.index} of epoch {handle.epoch} belongs to a stream, of which the newest"
                f" {_KEPT_STEPS} steps are kept. Look into a batch in the hooks of its own step."
            )
        return self._steps[key]

    def _reaches(self, epoch: int, index: int) -> bool:
        """Reads as far as a step; False if the pass ends before it."""
        if (epoch, index) in self._steps:
            return True
        if self._place_to_find is not None:
            self._find_place(epoch)
        if epoch != self._pass:
            self._begin_pass(epoch)
        while self._next <= index:
            if not self._read_step():
                return False
        return (epoch, index) in self._steps

    def _begin_pass(self, epoch: int) -> None:
        if self._goes_on and self._pass is not None:
            self._keep_account()
            self._place["passes"].append([])
        else:
            self._place = {"epoch": epoch, "step": 0, "reader": None, "passes": [[]]}
        # The last step begun may still have to be redone; data read but not requested must not displace it.
        self._steps = {key: step for key, step in self._steps.items() if key == self._begun}
        self._reader.begin(epoch)
        self._pass, self._next = epoch, 0

    def _keep_account(self) -> None:
        if self._place["passes"]:
            self._place["passes"][-1] = [self._next, self._reader.ended]

    def _find_place(self, epoch: int) -> None:
        place, self._place_to_find = self._place_to_find, None
        assert place is not None
        self._pass = None
        if not place["passes"] or (not self._goes_on and place["epoch"] != epoch):
            return
        passes, place["passes"] = place["passes"], [[]]
        self._place = place
        for number, (steps, ended) in enumerate(passes):
            if number == 0:
                self._reader.begin(place["epoch"], place["reader"])
                self._pass, self._next = place["epoch"], place["step"]
            else:
                self._begin_pass(place["epoch"] + number)
            while self._next < steps:
                if not self._read_step():
                    raise ConfigurationError(
                        f"{type(self.dataset).__name__} ended before step {self._next} of epoch {self._pass}, where it"
                        " did not end before. After load_state_dict() a stream must continue with the same samples."
                    )
                if number == 0 and self._next == place["step"] + 1:
                    self._check_place()
            if self._pass == epoch:
                return
            if ended:
                self._read_step()

    def _check_place(self) -> None:
        if self._place.get("digest", self._reader.digest) != self._reader.digest:  # older checkpoints have none
            raise ConfigurationError(
                f"{type(self.dataset).__name__} gave other samples for step {self._place['step']} of epoch"
                f" {self._place['epoch']} when they were read again. A stream must continue with the same samples, from"
                " its state or from the start of the epoch, in any process."
            )

    def _read_step(self) -> bool:
        assert self._pass is not None
        start, samples = self._reader.state(), self._read_batch()
        if samples is None:
            return False
        self._steps[self._pass, self._next] = _StreamStep(samples, start, self._reader.digest)
        self._next += 1
        if len(self._steps) > _KEPT_STEPS:
            del self._steps[next(iter(self._steps))]
        return True

    def _read_batch(self) -> list[Any] | None:
        """The next batch; an incomplete one only in an evaluation that keeps them."""
        while (batch := self._reader.read()) is not None:
            if len(batch) == self.global_batch_size or (batch and not self._drops_last):
                return batch
        return None
