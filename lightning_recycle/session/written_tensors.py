"""Tensors of the module that training steps write: averages of weights, banks of features, and their like.

Concept: a training step may update a momentum encoder (BYOL, MoCo, DINO) or a queue that is a buffer. Under DDP each
process does that once per step, from its own state. Here a worker may run several micro-batches of a step, so each of
them begins with the tensors of the step's beginning, and when the step is over:

- a tensor that all micro-batches leave alike, to the bit, counts once: an average of the weights;
- otherwise each *slot* of the global batch (pipeline d, micro-batch m) has a value of its own from then on, in place
  whenever a step runs on that slot. It travels to all workers with the record of the micro-batch if it is small.

Watched are buffers and parameters that are not trained, except statistics (of BatchNorm, of quantization), which every
worker keeps for itself. Steps write them in place, assign them, or use ``.data``, which autograd does not count:
so in the first steps each step gets copies, which are compared afterwards. Later only the tensors that were written
are copied; a first write to another one is seen by its version and address, and refused by name.

An average of a weight that has not moved yet has the bits that it had: a bias before a normalization, a learning rate
that begins at zero. So in the first steps a new version or address counts as a write, too, and later the parameters of
a part of the module are copied together if most of them are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.runtime.checks.checksums import checksum
from lightning_recycle.session.slot_values import SlotValues, TensorPlace, Value, untrained_places
from lightning_recycle.session.tensor_codec import on_device, to_cpu

__all__ = ["Write", "WrittenState", "WrittenTensors"]

_SMALL_BYTES = 64 * 1024  # of a value that always travels
_MOST_BYTES = 4 * 1024 * 1024  # of the values of one micro-batch that travel
_FIRST_STEPS = 3  # in which all tensors are compared
_WATCHED_BYTES = 16 * 1024 * 1024  # of all tensors that are compared in every step on a CPU
_COPIED_BYTES = 256 * 1024 * 1024  # that are copied in the first steps, besides twice the trained parameters
_REMEDY = (
    " Use num_microbatches=1 without failures, keep it below 4 MB, or optimize by hand (automatic_optimization ="
    " False), where micro-batches run in turns and each has tensors of its own."
)


WrittenState: TypeAlias = tuple[int, set[str], set[str], dict[str, dict[int, Any]]]
"""Steps that were compared, names of written tensors, those that micro-batches leave alike, values by slot."""


@dataclass(frozen=True)
class Write:
    """The tensor ``name`` as a micro-batch left it: the checksum, and the value if ``travels``."""

    name: str
    digest: bytes
    travels: bool
    value: Value


class WrittenTensors:
    """The tensors of ``module`` that training steps write, by name, and by slot where slots differ."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._steps = 0  # that were compared
        self._found: dict[str, TensorPlace] | None = None
        self._written: set[str] = set()
        self._alike: set[str] = set()  # those that all micro-batches left alike so far
        self._slots = SlotValues(lambda name: self._places().get(name), _clone)
        self._mine: dict[int, dict[str, Value]] = {}  # what this worker's micro-batches of the step left
        self._begun: list[tuple[TensorPlace, Value]] = []  # parameters that a micro-batch wrote, and what they were

    # ------------------------------------------------------------------ on the worker that runs the step

    @contextmanager
    def in_place(self, slot: int, effects: list[Any]) -> Iterator[None]:
        """Runs the training step of ``slot`` from its own values; lists what it wrote, and takes that back."""
        self.rewind()
        places = self._places()
        self._slots.check()
        watched = self._watched(places)
        common = {name: place.get() for name, place in watched.items()}
        before = {
            name: self._value(name, slot) if name in self._slots.names else value for name, value in common.items()
        }
        for name, place in watched.items():
            place.put(_clone(before[name]))
        begun = {name: place.mark() for name, place in watched.items()} if self._learns(places) else {}
        marks = {name: place.mark() for name, place in places.items() if name not in watched}
        wrote: dict[str, Value] = {}
        try:
            yield
            for name, place in watched.items():
                value = place.get()
                is_touched = name in begun and place.mark() != begun[name]
                if name in self._slots.names or is_touched or not _equal(value, before[name]):
                    wrote[name] = value
            for name, mark in marks.items():
                if places[name].mark() != mark:
                    raise UnsupportedFeatureError(
                        f"{name} was written in training_step(), for the first time after {self._steps} steps, or among"
                        " too many tensors that are not trained to compare all. Micro-batches would write on top of"
                        " each other. Write it from the first step on, or in on_train_batch_end(), which runs once"
                        " per step."
                    )
            self._mine[slot] = wrote
            effects += self._writes(wrote)
        finally:
            for name, place in watched.items():
                if place.is_parameter and name in wrote:  # the backward pass may need what it is now
                    self._begun.append((place, common[name]))
                else:
                    place.put(common[name])

    def rewind(self) -> None:
        """Makes parameters as they were when the step began."""
        for place, value in reversed(self._begun):
            place.put(value)
        self._begun.clear()

    def _writes(self, wrote: Mapping[str, Value]) -> list[Write]:
        found, left = [], _MOST_BYTES
        for name, value in sorted(wrote.items(), key=lambda item: (_bytes(item[1]), item[0])):
            size = _bytes(value)
            travels = size <= left and (size <= _SMALL_BYTES or name not in self._alike)
            left -= size if travels else 0
            kind = b"" if value is None else str((value.dtype, tuple(value.shape))).encode()
            found.append(Write(name, checksum([value]) + kind, travels, to_cpu(value) if travels else None))
        return found

    def _value(self, name: str, slot: int) -> Value:
        is_here, value = self._slots.get(name, slot)
        if not is_here:
            raise UnsupportedFeatureError(
                f"{name} is written in training_step(), differently for each micro-batch, and its value for micro-batch"
                f" {slot} was on a worker that does not run that any more: it is too large to be kept on all." + _REMEDY
            )
        return value  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ on every worker

    @torch.no_grad()
    def take(self, records: Mapping[int, Sequence[Write]]) -> None:
        """Takes over what the micro-batches of a step wrote, by slot."""
        self.rewind()
        places, mine, self._mine, self._found = self._places(), self._mine, {}, None
        self._steps += 1
        by_name: dict[str, dict[int, Write]] = {}
        for slot, writes in records.items():
            for write in writes:
                by_name.setdefault(write.name, {})[slot] = write
        for name, by_slot in by_name.items():
            if name not in places:
                continue
            place = places[name]
            self._written.add(name)
            found: dict[int, tuple[bool, Value]] = {}
            for slot, write in by_slot.items():
                if name in mine.get(slot, {}):
                    found[slot] = True, mine[slot][name]
                else:
                    found[slot] = write.travels, on_device(write.value, self._module.device)
            here = [slot for slot, (is_here, _) in found.items() if is_here]
            alike = len(by_slot) == len(records) and len({write.digest for write in by_slot.values()}) == 1
            if name not in self._slots.names and alike:
                if not here:
                    raise UnsupportedFeatureError(
                        f"{name} is written in training_step(), and this worker ran no micro-batch of the step: the new"
                        " value is too large to be sent." + _REMEDY
                    )
                self._alike.add(name)
                place.put(found[here[0]][1])
                continue
            self._alike.discard(name)
            if name not in self._slots.names and len(here) < len(found):
                rank_zero_warn(
                    f"{name} ({_bytes(found[here[0]][1]) if here else 0:,} bytes) is written in training_step(),"
                    " differently for each micro-batch, and too large to be kept on all workers: when one dies, the run"
                    " ends with an error." + _REMEDY
                )
            self._slots.take(name, place, found, records)

    # ------------------------------------------------------------------ which tensors

    def _places(self) -> dict[str, TensorPlace]:
        if self._found is None:
            self._found = dict(untrained_places(self._module))
        return self._found

    def _watched(self, places: Mapping[str, TensorPlace]) -> Mapping[str, TensorPlace]:
        if self._is_cheap(places) or self._learns(places):
            return places
        sizes: dict[str, list[int]] = {}  # of parameters, and of those that are written, by part of the module
        for name, place in places.items():
            if place.is_parameter:
                part = sizes.setdefault(_part(name), [0, 0])
                part[0] += _bytes(place.get())
                part[1] += _bytes(place.get()) if name in self._written else 0
        whole = {name for name, (size, written) in sizes.items() if 2 * written > size}
        return {
            name: place
            for name, place in places.items()
            if name in self._written or (place.is_parameter and _part(name) in whole)
        }

    def _is_cheap(self, places: Mapping[str, TensorPlace]) -> bool:
        """Whether all are compared in every step; a GPU would be waited for."""
        return self._module.device.type == "cpu" and _size(places) <= _WATCHED_BYTES

    def _learns(self, places: Mapping[str, TensorPlace]) -> bool:
        """Whether all are compared in this step, to learn which ones to compare later."""
        if self._steps >= _FIRST_STEPS or self._is_cheap(places):
            return False
        trained = sum(parameter.nbytes for parameter in self._module.parameters() if parameter.requires_grad)
        return _size(places) <= 2 * trained + _COPIED_BYTES

    # ------------------------------------------------------------------ a worker that joins

    def state(self) -> WrittenState:
        """For a worker that joins, once the module's tensors are those of the donor."""
        self.rewind()
        return self._steps, self._written, self._alike, self._slots.state()

    def load_state(self, state: WrittenState) -> None:
        """Restores what :meth:`state` returned."""
        self._begun, self._mine, self._found = [], {}, None
        self._steps, written, alike, values = state
        self._written, self._alike = set(written), set(alike)
        self._slots.load_state(values, self._module.device)


def _part(name: str) -> str:
    """The child of the LightningModule that the tensor ``name`` belongs to."""
    return name.partition(".")[0]


def _size(places: Mapping[str, TensorPlace]) -> int:
    return sum(_bytes(place.get()) for place in places.values())


def _bytes(value: Value) -> int:
    return 0 if value is None else value.nbytes


def _clone(value: Value) -> Value:
    return None if value is None else value.detach().clone()


def _equal(one: Value, other: Value) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
