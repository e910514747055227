"""Values by slot, for places of a module in which the micro-batches of a step leave different values.

Concept: a place is a parameter or buffer anywhere in the module, or an attribute of the module itself. A slot is the
global index of a micro-batch (pipeline d, micro-batch m). A training step may update a momentum encoder (BYOL, MoCo,
DINO) or a queue that is a buffer. Under DDP each process does that once per step, from its own state. Here a worker may
run several micro-batches of a step, so each of them begins with the tensors of the step's beginning. When the step is
over,

- a tensor that all micro-batches leave alike, to the bit, counts once: an average of the weights;
- otherwise each slot has a value of its own from then on, in place whenever a step runs on that slot. It travels to all
  workers with the record of the micro-batch if it is small.

Watched are buffers and parameters that are not trained, except statistics (of BatchNorm, of quantization), which every
worker keeps for itself. Steps write them in place, assign them, or use ``.data``, which autograd does not count: so
each step gets copies, which are compared afterwards. Where that would cost too much, as with a large frozen backbone, a
write that autograd counts is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.runtime.checks.checksums import checksum
from lightning_recycle.tensor_memory import memory_address, on_device, to_cpu
from lightning_recycle.torch_internals import NormBase, buffers_of, parameters_of, tree_leaves, version_of

__all__ = [
    "MISSING",
    "Missing",
    "ModuleSlot",
    "Same",
    "SlotValues",
    "Write",
    "WrittenState",
    "WrittenTensors",
    "mark_of",
    "untrained_marks",
]

_KEEPING_OWN = ("torch.ao.", "torchmetrics.")  # packages whose modules have statistics or states as buffers
_TYPES = (Tensor, nn.Parameter, nn.Buffer)
_SMALL_BYTES = 64 * 1024  # of a value that always travels
_MOST_BYTES = 4 * 1024 * 1024  # of the values of one micro-batch that travel
_WATCHED_BYTES = 256 * 1024 * 1024  # that are compared in each step, besides twice the trained parameters
_REMEDY = (
    " Use num_microbatches=1 without failures, keep it below 4 MB, or optimize by hand (automatic_optimization ="
    " False), where micro-batches run in turns and each has tensors of its own."
)

ByName: TypeAlias = dict[str, dict[int, tuple[bool, Any]]]
"""By the name of a place and the slot: whether this worker has the value, and the value."""

WrittenState: TypeAlias = tuple[set[str], ByName]
"""The names of tensors that micro-batches leave alike; values by slot."""


class Missing(Enum):
    """The value of an attribute that does not exist; the same object in all processes."""

    MISSING = "missing"


MISSING = Missing.MISSING


@dataclass(frozen=True)
class ModuleSlot:
    """A parameter, a buffer or an attribute of a module."""

    module: nn.Module
    name: str

    @property
    def parameter(self) -> nn.Parameter | None:
        return parameters_of(self.module).get(self.name)

    def get(self) -> Any:
        """The parameter's data, the buffer or the attribute itself, or MISSING."""
        return self._space.get(self.name, MISSING) if self.parameter is None else self.parameter.data

    def put(self, value: Any) -> None:
        """Sets it past the module's own ``__setattr__``."""
        if self.parameter is not None:
            self.parameter.data = value
        elif value is MISSING:
            self._space.pop(self.name, None)
        else:
            self._space[self.name] = value

    @property
    def _space(self) -> dict[str, Any]:
        buffers: dict[str, Any] = buffers_of(self.module)
        return buffers if self.name in buffers else vars(self.module)

    def mark(self) -> list[Any]:
        """Differs when other code has assigned or written the value, by a way that autograd counts."""
        return mark_of(self.get() if self.parameter is None else self.parameter)


def mark_of(value: Any) -> list[Any]:
    """Differs when ``value`` holds other objects or its tensors were written to; holds them, so their ids stay."""
    leaves = tree_leaves(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
    return [*map(Same, leaves), *((memory_address(tensor), version_of(tensor)) for tensor in tensors)]


class Same:
    """Equal to another if both hold the same object, or equal numbers or texts."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        mine, theirs = self._value, other._value
        return mine is theirs or (type(mine) is type(theirs) and isinstance(mine, (int, float, str)) and mine == theirs)


class SlotValues:
    """Values of places by slot, for those in which the micro-batches of a step leave different values.

    Other code sees the value of the last slot. When it assigns or writes a place, its value holds for all slots.

    Args:
        find: returns the place of a name, if there is any.
        copy: copies a value.
    """

    def __init__(self, find: Callable[[str], ModuleSlot | None], copy: Callable[[Any], Any]) -> None:
        self._find, self._copy = find, copy
        self._values: ByName = {}
        self._marks: dict[str, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        """The places that have a value for each slot."""
        return frozenset(self._values)

    def check(self) -> None:
        """Forgets the values of places that other code has changed; called before a step."""
        for name in list(self._values):
            place = self._find(name)
            if place is None or place.mark() != self._marks[name]:
                del self._values[name], self._marks[name]

    def get(self, name: str, slot: int) -> tuple[bool, Any]:
        """Whether this worker has the value of ``slot``, and the value, not copied."""
        return self._values[name].get(slot, (False, None))

    def take(self, name: str, place: ModuleSlot, found: Mapping[int, tuple[bool, Any]], slots: Iterable[int]) -> None:
        """Takes new values of a place; slots without any keep theirs, at first the value of the step's beginning."""
        if name not in self._values:
            self._values[name] = dict.fromkeys(slots, (True, place.get()))
        self._values[name].update(found)
        here = [slot for slot, (is_here, _) in found.items() if is_here]
        if here:
            place.put(self._copy(found[max(here)][1]))
        self._marks[name] = place.mark()

    def state(self) -> ByName:
        """The values, for a worker that joins; it has the module, with the value that other code sees, already."""
        self.check()
        return {name: dict(values) for name, values in self._values.items()}

    def load_state(self, state: ByName, device: torch.device) -> None:
        """Restores the values that :meth:`state` returned."""
        self._values, self._marks = {}, {}
        for name, values in state.items():
            if (place := self._find(name)) is not None:
                self._values[name] = {slot: (is_here, on_device(v, device)) for slot, (is_here, v) in values.items()}
                self._marks[name] = place.mark()


# ---------------------------------------------------------------------- tensors that steps write


def untrained_marks(module: nn.Module) -> dict[str, list[Any]]:
    """Marks of the parameters that are not trained and of the buffers, by name."""
    return {name: place.mark() for name, place in _untrained_places(module)}


def _untrained_places(module: nn.Module) -> Iterator[tuple[str, ModuleSlot]]:
    """The parameters that are not trained and the buffers, by name, each once."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        keeps_own = isinstance(part, NormBase) or type(part).__module__.startswith(_KEEPING_OWN)
        parameters = [(name, p) for name, p in parameters_of(part).items() if p is not None and not p.requires_grad]
        for name, tensor in (*parameters, *(() if keeps_own else buffers_of(part).items())):
            if id(tensor) in seen or is_lazy(tensor) or (tensor is not None and type(tensor) not in _TYPES):
                continue  # not in this stage, or of a library that looks after it
            if tensor is not None:
                seen.add(id(tensor))
            yield f"{prefix}.{name}" if prefix else name, ModuleSlot(part, name)


@dataclass(frozen=True)
class Write:
    """The tensor ``name`` as a micro-batch left it: the checksum, and the value if ``travels``."""

    name: str
    digest: bytes
    travels: bool
    value: Any


class WrittenTensors:
    """The tensors of ``module`` that training steps write, by name, and by slot where slots differ."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._found: dict[str, ModuleSlot] | None = None
        self._alike: set[str] = set()  # those that all micro-batches left alike so far
        self._slots = SlotValues(lambda name: self._places().get(name), _clone)
        self._mine: dict[int, dict[str, Any]] = {}  # what this worker's micro-batches of the step left
        self._begun: list[tuple[ModuleSlot, Any]] = []  # parameters that a micro-batch wrote, and what they were

    def _places(self) -> dict[str, ModuleSlot]:
        if self._found is None:
            self._found = dict(_untrained_places(self._module))
        return self._found

    def _are_watched(self) -> bool:
        trained = sum(parameter.nbytes for parameter in self._module.parameters() if parameter.requires_grad)
        return sum(_bytes(place.get()) for place in self._places().values()) <= 2 * trained + _WATCHED_BYTES

    # ------------------------------------------------------------------ on the worker that runs the step

    @contextmanager
    def in_place(self, slot: int, effects: list[Any]) -> Iterator[None]:
        """Runs the training step of ``slot`` from its own values; lists what it wrote, and takes that back."""
        self.rewind()
        places = self._places()
        self._slots.check()
        if not self._are_watched():
            marks = {name: place.mark() for name, place in places.items()}
            yield
            self._refuse_writes(marks)
            return
        common = {name: place.get() for name, place in places.items()}
        before = {name: self._value(name, slot) if name in self._slots.names else v for name, v in common.items()}
        for name, place in places.items():
            place.put(_clone(before[name]))
        wrote: dict[str, Any] = {}
        try:
            yield
            after = {name: place.get() for name, place in places.items()}
            wrote = {n: v for n, v in after.items() if n in self._slots.names or not _equal(v, before[n])}
            self._mine[slot] = wrote
            effects += self._writes(wrote)
        finally:
            for name, place in places.items():
                if place.parameter is not None and name in wrote:  # the backward pass may need what it is now
                    self._begun.append((place, common[name]))
                else:
                    place.put(common[name])

    def _refuse_writes(self, marks: Mapping[str, list[Any]]) -> None:
        for name, mark in marks.items():
            if self._places()[name].mark() != mark:
                raise UnsupportedFeatureError(
                    f"{name} was written in training_step(), among too many tensors that are not trained to compare"
                    " all: micro-batches would write on top of each other. Write it in on_train_batch_end(), which runs"
                    " once per step."
                )

    def rewind(self) -> None:
        """Makes parameters as they were when the step began."""
        for place, value in reversed(self._begun):
            place.put(value)
        self._begun.clear()

    def _writes(self, wrote: Mapping[str, Any]) -> list[Write]:
        found, left = [], _MOST_BYTES
        for name, value in sorted(wrote.items(), key=lambda item: (_bytes(item[1]), item[0])):
            size = _bytes(value)
            travels = size <= left and (size <= _SMALL_BYTES or name not in self._alike)
            left -= size if travels else 0
            kind = str((value.dtype, tuple(value.shape))).encode() if isinstance(value, Tensor) else b""
            digest = (checksum([value]) if isinstance(value, Tensor) else repr(value).encode()) + kind
            found.append(Write(name, digest, travels, to_cpu(value) if travels else None))
        return found

    def _value(self, name: str, slot: int) -> Any:
        is_here, value = self._slots.get(name, slot)
        if not is_here:
            raise UnsupportedFeatureError(
                f"{name} is written in training_step(), differently for each micro-batch, and its value for micro-batch"
                f" {slot} was on a worker that does not run that any more: it is too large to be kept on all." + _REMEDY
            )
        return value

    # ------------------------------------------------------------------ on every worker

    @torch.no_grad()
    def take(self, records: Mapping[int, Sequence[Write]]) -> None:
        """Takes over what the micro-batches of a step wrote, by slot."""
        self.rewind()
        places, mine, self._mine, self._found = self._places(), self._mine, {}, None
        by_name: dict[str, dict[int, Write]] = {}
        for slot, writes in records.items():
            for write in writes:
                by_name.setdefault(write.name, {})[slot] = write
        for name, by_slot in by_name.items():
            if name not in places:
                continue
            found: dict[int, tuple[bool, Any]] = {}
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
                places[name].put(found[here[0]][1])
                continue
            self._alike.discard(name)
            if name not in self._slots.names and len(here) < len(found):
                rank_zero_warn(
                    f"{name} ({_bytes(found[here[0]][1]) if here else 0:,} bytes) is written in training_step(),"
                    " differently for each micro-batch, and too large to be kept on all workers: when one dies, the run"
                    " ends with an error." + _REMEDY
                )
            self._slots.take(name, places[name], found, records)

    # ------------------------------------------------------------------ a worker that joins

    def state(self) -> WrittenState:
        """For a worker that joins, once the module's tensors are those of the donor."""
        self.rewind()
        return self._alike, self._slots.state()

    def load_state(self, state: WrittenState) -> None:
        """Restores what :meth:`state` returned."""
        self._begun, self._mine, self._found = [], {}, None
        self._alike = set(state[0])
        self._slots.load_state(state[1], self._module.device)


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
