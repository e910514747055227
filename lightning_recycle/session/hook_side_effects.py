"""Values that steps and output hooks change in the module, one for each slot, and which of them reach all workers.

Concept: a *slot* is the global index of a micro-batch (pipeline d, micro-batch m). What a training step or a layer's
forward changes in the tree of the module (:mod:`~lightning_recycle.session.slot_values`) begins for each micro-batch as
it was at the beginning of the step, and is taken back after it, so a step that runs again, anywhere, begins as it did.
The changes travel with the record of the micro-batch. When the step is over, on every worker,

- items *appended* to a list or deque reach it in the order of the micro-batches: Lightning's idiom
  ``self.outputs.append(...)``, ``torch.cat(self.outputs)``, ``self.outputs.clear()``;
- what all micro-batches leave alike, to the bit, counts once: ``self.count += 1``, a momentum encoder;
- a running statistic, as of BatchNorm, becomes the mean of what they leave;
- what else they leave different has a value for each slot from then on, in place whenever a step runs on that slot: a hidden
  state, a running mean of the loss. Other code sees that of the last slot; what it assigns holds for all slots.

Values that are too large to travel stay where they were made; if one is needed elsewhere, the run ends with an error
that names it. The stages of a pipeline change values on their own; of the same place the last stage's counts.

Hooks of an evaluation see outputs where they were computed, as under DDP: appended items reach all workers, the rest
is the share of that worker. The last stage has it; the others take it over.

Contract: the objects that the module refers to stay the same, only what they hold is written.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.model.recording import RecordedModule
from lightning_recycle.runtime.checks.checksums import checksum
from lightning_recycle.session.slot_values import ABSENT, WHOLE, Found, Path, Place, ValueTree, name_of
from lightning_recycle.tensor_memory import has_plain_memory, is_sharded, memory_address, memory_of, on_device
from lightning_recycle.torch_internals import tree_leaves

__all__ = [
    "Append",
    "Change",
    "Effect",
    "HookSideEffects",
    "MicrobatchEffects",
    "SideEffectState",
    "put_together",
    "taken_apart",
]

_SHARED_BYTES = 1024 * 1024  # of an attribute that is copied to the other stages
_SMALL_BYTES = 64 * 1024  # of a value that always travels
_MOST_BYTES = 4 * 1024 * 1024  # of the values of one micro-batch that travel
_REMEDY = (
    " Keep it below 4 MB, write it in on_train_batch_end(), which runs once per step, or use num_microbatches=1 without"
    " failures."
)


@dataclass(frozen=True)
class Append:
    """New items of the list at ``path``, packed; ``kind``: its class, should a worker have none."""

    path: Path
    kind: type[Any]
    items: bytes


@dataclass(frozen=True)
class Change:
    """The value that a micro-batch has left in a place: a digest, and the value, packed, if it travels. Of a statistic
    the mean over all micro-batches counts.
    """

    place: Place
    digest: bytes
    size: int
    packed: bytes | None
    is_statistic: bool = False


Effect: TypeAlias = Append | Change


@dataclass(frozen=True)
class _SlotValue:
    """A value of a slot: packed, or a tensor of this worker; None if it is elsewhere."""

    digest: bytes
    packed: bytes | None = None
    tensor: Tensor | None = None

    @property
    def is_here(self) -> bool:
        return self.packed is not None or self.tensor is not None


BySlot: TypeAlias = dict[Place, dict[int, _SlotValue]]

SideEffectState: TypeAlias = tuple[list[str], list[str], BySlot, set[Place]]
"""Names of attributes with lists that steps extended, and of those that hooks of evaluations changed; values by slot;
the places that micro-batches left alike.
"""


@dataclass
class MicrobatchEffects:
    """What one micro-batch has changed, when its forward is over, and the record of the hooks that saw its output."""

    effects: list[Effect] = field(default_factory=list)
    record: bytes = b""

    def note(self, earlier: bytes) -> bytes:
        """The changes for the next stage, with those of the stages before."""
        if not self.effects:
            return earlier
        mine = {_target(effect): effect for effect in self.effects}
        before = pickle.loads(earlier) if earlier else []
        return pickle.dumps([*(effect for effect in before if _target(effect) not in mine), *self.effects])

    def output(self, earlier: bytes) -> bytes:
        """The record and all changes, for :func:`taken_apart`."""
        return put_together(taken_apart(self.record)[0], self.note(earlier))


def put_together(record: bytes, note: bytes) -> bytes:
    """A record of hooks and a note of changes; empty if both are."""
    return len(record).to_bytes(8, "little") + record + note if record or note else b""


def taken_apart(data: bytes) -> tuple[bytes, list[Effect]]:
    """The record, and the changes, that :func:`put_together` was given."""
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], pickle.loads(data[end:]) if data[end:] else []


def _target(effect: Effect) -> Any:
    return effect.path if isinstance(effect, Append) else effect.place


class HookSideEffects:
    """The side effects on ``module``.

    Args:
        module: the user's module.
        alone: whether a step has one micro-batch in all; then there is nothing to put together.
        microbatches: the number of micro-batches of a step.

    Attributes:
        names: the attributes whose lists steps have extended.
        keeps_shares: whether hooks of evaluations have changed a number or tensor that stays on the worker.
        changed: the attributes that they have changed.
        slot: the micro-batch whose training step is about to run, where that runs as a whole; None for other code.
    """

    def __init__(self, module: pl.LightningModule, alone: bool = False, microbatches: int | None = None) -> None:
        self._module, self._alone, self._microbatches = module, alone, microbatches
        self._internal = frozenset(dir(RecordedModule))
        self._tree, self._shallow = ValueTree(module, self._internal), ValueTree(module, self._internal, whole=False)
        self.slots: BySlot = {}
        self.slot: int | None = None
        self.names: set[str] = set()
        self.keeps_shares = False
        self.changed: set[str] = set()
        self._alike: set[Place] = set()  # those that all micro-batches left alike so far
        self._mine: dict[int, dict[Place, Tensor]] = {}  # large values that this worker's micro-batches have left
        self._is_inside = False
        self._told: set[str] = set()
        self._at_batch: list[tuple[Any, Any]] | None = None  # what the cells held when the batch began
        self._runs_again = False
        self._step = self._ended = -1
        self._undo: tuple[dict[Place, Any], BySlot, list[tuple[Any, int]]] = ({}, {}, [])

    # ------------------------------------------------------------------ a micro-batch in training

    def begin_step(self, step: int | None = None) -> None:
        """A batch of training, with the number ``step``, or of an evaluation begins."""
        self._at_batch, self._runs_again = None, False
        if step is not None:
            self._step, self._mine = step, {}
            self._tree.begin_step()
            self._forget(self._tree.absorb())

    @contextmanager
    def microbatch(self, slot: int) -> Iterator[MicrobatchEffects]:
        """Runs a forward of ``slot``, with its values in place; lists what it has changed, and takes that back."""
        made = MicrobatchEffects()
        if self._alone:
            yield made
            return
        with self._watching(self._tree, slot, made.effects), self._inside():
            yield made

    @contextmanager
    def again(self, slot: int) -> Iterator[None]:
        """As :meth:`microbatch`, for a forward that is computed once more: it leaves nothing."""
        if self._alone:
            yield
            return
        tree = self._tree
        self._begin(tree, slot)
        try:
            with self._inside():
                yield
        finally:
            tree.abandon()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Within the block hooks that see outputs are watched already."""
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _begin(self, tree: ValueTree, slot: int) -> None:
        self._forget(tree.absorb())
        tree.begin({place: self._slot_value(tree, place, slot) for place in self.slots if self._has(tree, place)})

    @contextmanager
    def _watching(self, tree: ValueTree, slot: int, effects: list[Effect]) -> Iterator[None]:
        self._begin(tree, slot)
        try:
            yield
        except BaseException:
            tree.abandon()
            raise
        effects += self._effects(tree, tree.end(), slot)

    @staticmethod
    def _has(tree: ValueTree, place: Place) -> bool:
        """Whether this stage, or the tree of this step, has a place."""
        try:
            tree.get(place)
        except (KeyError, IndexError):
            return False
        return True

    def _forget(self, changed: Iterable[Place]) -> None:
        """Other code has changed these places: what they hold now holds for all slots."""
        for place in changed:
            self.slots.pop(place, None)

    def _slot_value(self, tree: ValueTree, place: Place, slot: int) -> Any:
        value = self.slots[place].get(slot)
        if value is None or not value.is_here:
            raise UnsupportedFeatureError(
                f"{name_of(place)} is written in a training step, differently for each micro-batch, and its value for"
                f" micro-batch {slot} was on a worker that does not run that any more: it is too large to be kept on all."
                + _REMEDY
            )
        return self._unpacked(value, tree)

    def _unpacked(self, value: _SlotValue, tree: ValueTree) -> Any:
        if value.tensor is not None:
            return value.tensor.clone()
        assert value.packed is not None
        return _load(value.packed, tree, self._module.device)

    def _effects(self, tree: ValueTree, found: Sequence[Found], slot: int) -> list[Effect]:
        """What must reach other workers."""
        appends: list[Effect] = []
        values: list[tuple[int, Change, Any]] = []
        for one in found:
            if one.items is not None and one.place not in self.slots and self._is_append(one):
                path = one.place[0] if one.place[1] == WHOLE else (*one.place[0], one.place[1])
                kind = deque if isinstance(one.now, deque) or _is_deque(tree, one) else list
                appends.append(Append(path, kind, self._packed(one.place, one.items, tree)))
                continue
            value = one.now.detach() if isinstance(one.now, Tensor) else one.now
            if isinstance(value, Tensor) and value.nbytes > _SMALL_BYTES and not is_sharded(value):
                form = str((value.dtype, tuple(value.shape), value.device.type)).encode()
                change = Change(one.place, checksum([value]) + form, value.nbytes, None)
            else:
                packed = self._packed(one.place, value, tree)
                change = Change(one.place, hashlib.blake2b(packed, digest_size=16).digest(), len(packed), packed)
            values.append((change.size, change, value))
        left, changes = _MOST_BYTES, []
        for size, change, value in sorted(values, key=lambda item: (item[0], repr(item[1].place))):
            is_mean = isinstance(value, Tensor) and tree.is_statistic(change.place)
            travels = is_mean or (size <= left and (size <= _SMALL_BYTES or change.place not in self._alike))
            left -= size if travels else 0
            if isinstance(value, Tensor):
                self._mine.setdefault(slot, {})[change.place] = value
            packed = change.packed
            if travels and packed is None:
                packed = self._packed(change.place, value, tree)
            changes.append(Change(change.place, change.digest, size, packed if travels else None, is_mean))
        return [*appends, *changes]

    @staticmethod
    def _is_append(one: Found) -> bool:
        """Another list than before is meant for the next step of the slot, unless it begins with the old items."""
        return not one.was_made or one.before is ABSENT or len(one.before) > 0

    def _packed(self, place: Place, value: Any, tree: ValueTree) -> bytes:
        try:
            return _dump(value, tree)
        except Exception as error:
            raise UnsupportedFeatureError(
                f"{name_of(place)} got a {type(value).__name__} in a step that cannot be pickled"
                f" ({type(error).__name__}: {error}): other workers would not have it when they run that micro-batch. Keep"
                " what can be pickled (tensors, numbers, lists and dicts of them), or assign it in a hook such as"
                " on_train_batch_end()."
            ) from error

    # ------------------------------------------------------------------ other code that sees one micro-batch

    @contextmanager
    def noticed(self) -> Iterator[list[Effect]]:
        """Runs a hook, or a step that runs as a whole; lists what must reach all workers, and takes that back."""
        slot, self.slot = self.slot, None
        effects: list[Effect] = []
        if self._alone or self._is_inside:
            yield effects
        elif slot is not None:  # micro-batches run in turns, each with attributes of its own
            with self._watching(ValueTree(self._module, self._internal, whole=False), slot, effects):
                yield effects
        else:
            with self._looking(effects):
                yield effects

    @contextmanager
    def _looking(self, effects: list[Effect]) -> Iterator[None]:
        tree = self._shallow
        if self._runs_again and self._at_batch is not None:
            tree.restore(self._at_batch)
        tree.absorb()
        if self._at_batch is None:
            self._at_batch = tree.contents()
        self._runs_again = False
        tree.begin({}, looks_only=True)
        try:
            yield
        except BaseException:
            tree.end_looking(lambda one: one.items is None)
            raise
        for one in tree.end_looking(lambda one: not self._travels(one, effects)):
            if one.items is None:
                (_, _, *names), key = one.place
                self.changed.add(str(names[0] if names else key))
                self.keeps_shares |= any(isinstance(leaf, (int, float, Tensor)) for leaf in tree_leaves(one.now))

    def _travels(self, one: Found, effects: list[Effect]) -> bool:
        """Whether these are new items of a list, which then are among ``effects``."""
        if one.items is None:
            return False
        path = one.place[0] if one.place[1] == WHOLE else (*one.place[0], one.place[1])
        kind = deque if isinstance(one.now, deque) or _is_deque(self._shallow, one) else list
        try:
            effects.append(Append(path, kind, _dump(one.items, self._shallow)))
        except Exception as error:
            name = f"self.{name_of(one.place)}"
            if name not in self._told:
                self._told.add(name)
                rank_zero_warn(
                    f"{name} got a value in a step or hook that sees one micro-batch which cannot be pickled"
                    f" ({type(error).__name__}: {error}). It stays on the worker that made it."
                )
            return False
        return True

    def run_again(self) -> None:
        """The batch may run again: what its micro-batches have counted here would count twice."""
        self._runs_again = True

    # ------------------------------------------------------------------ on every worker

    def ends_step(self) -> None:
        """The step is over; what its micro-batches have changed, if anything, is repeated next."""
        self._ended, self._undo = self._step, ({}, self.slots, [])

    @torch.no_grad()
    def repeat(self, records: Mapping[int, Sequence[Effect]], on_step: bool) -> None:
        """Repeats the effects of the micro-batches of a batch; ``on_step``: of training."""
        tree = self._tree
        if any(records.values()):
            self._forget(tree.absorb())
        before: tuple[dict[Place, Any], BySlot, list[tuple[Any, int]]] = ({}, dict(self.slots), [])
        changes: dict[Place, dict[int, Change]] = defaultdict(dict)
        for slot, effects in sorted(records.items()):
            for effect in effects:
                if isinstance(effect, Append):
                    self._extend(effect, before[2])
                else:
                    changes[effect.place][slot] = effect
        if on_step and not self._alone:
            for place, by_slot in changes.items():
                self._take(place, by_slot, before[0])
            self._undo, self._mine = before, {}

    def _extend(self, effect: Append, undo: list[tuple[Any, int]]) -> None:
        tree, parent = self._tree, (effect.path[:-1], effect.path[-1])
        self.names.add(str(effect.path[2]))
        if not self._has(tree, parent):
            return
        target = tree.get(parent)
        if not isinstance(target, effect.kind):
            tree.put(parent, effect.kind())
            target = tree.get(parent)
        undo.append((target, len(target)))
        target.extend(_load(effect.items, tree, self._module.device))

    def _take(self, place: Place, by_slot: Mapping[int, Change], undo: dict[Place, Any]) -> None:
        """Takes over what the micro-batches have left in ``place``."""
        tree, slots = self._tree, range(self._microbatches or len(by_slot))
        found = {}
        for slot, change in by_slot.items():
            tensor = self._mine.get(slot, {}).get(place) if change.packed is None else None
            found[slot] = _SlotValue(change.digest, change.packed, tensor)
        here = [slot for slot, value in found.items() if value.is_here]
        is_place = self._has(tree, place)
        if any(change.is_statistic for change in by_slot.values()):
            if is_place:
                old = undo[place] = _own(tree.get(place))
                values = [self._unpacked(found[slot], tree) if slot in found else old for slot in slots]
                tree.put(place, torch.stack(values).double().mean(0).to(old.dtype))
            return
        if len(found) == len(slots) and len({value.digest for value in found.values()}) == 1:
            if is_place and not here:
                raise UnsupportedFeatureError(
                    f"{name_of(place)} is written in a training step, and this worker ran no micro-batch of it: the new"
                    " value is too large to be sent." + _REMEDY
                )
            self.slots.pop(place, None)
            self._alike.add(place)
        else:
            self._alike.discard(place)
            if place not in self.slots:
                self.slots[place] = dict.fromkeys(slots, self._begun(place, is_place))
                if len(here) < len(found):
                    size = max(change.size for change in by_slot.values())
                    rank_zero_warn(
                        f"{name_of(place)} ({size:,} bytes) is written in a training step, differently for each"
                        " micro-batch, and too large to be kept on all workers: when one dies, the run ends with an"
                        " error." + _REMEDY
                    )
            self.slots[place] = {**self.slots[place], **found}
        if is_place and here:
            undo[place] = _own(tree.get(place))
            tree.put(place, self._unpacked(found[max(here)], tree))

    def _begun(self, place: Place, is_place: bool) -> _SlotValue:
        """The value with which all slots have begun the step."""
        if not is_place:
            return _SlotValue(b"")
        value = self._tree.get(place)
        if isinstance(value, Tensor):
            return _SlotValue(b"", tensor=value.detach().clone())
        return _SlotValue(b"", self._packed(place, value, self._tree))

    @contextmanager
    def as_in_step(self, step: int) -> Iterator[None]:
        """Within the block values are those with which ``step``, the one before the current one, has begun."""
        if self._ended != step:
            yield
            return
        (values, slots, lengths), now = self._undo, self.slots
        new = {place: _own(self._tree.get(place)) for place in values}
        items = [(target, list(target)[length:]) for target, length in lengths]
        for target, length in lengths:
            while len(target) > length:
                target.pop()
        self._set(values)
        self.slots = dict(slots)
        try:
            yield
        finally:
            self._set(new)
            for target, more in items:
                target.extend(more)
            self._tree.absorb()
            self.slots = now

    def _set(self, values: Mapping[Place, Any]) -> None:
        for place, value in values.items():
            self._tree.put(place, value)
        self._tree.absorb()

    # ------------------------------------------------------------------ what stages and pipelines have in common

    def shares(self) -> dict[str, bytes]:
        """What hooks of evaluations have changed, packed, by the name of the attribute, if it is not large."""
        found = {}
        for name in self.changed - self.names - self._views():
            value = self._shallow.get((("", ""), name))
            try:
                packed = b"" if value is ABSENT else _dump(value, self._shallow)
            except Exception:  # it stays on the worker that made it, as told
                continue
            if 0 < len(packed) <= _SHARED_BYTES:
                found[name] = packed
        return found

    def _views(self) -> set[str]:
        """The attributes that lie in the memory of parameters of this stage."""
        weights = {memory_address(parameter) for parameter in self._module.parameters()} - {0}
        tensors = {name: value for name, value in vars(self._module).items() if isinstance(value, Tensor)}
        return {name for name, value in tensors.items() if memory_address(value) in weights}

    def load_shares(self, shares: Mapping[str, bytes]) -> None:
        """Takes over what :meth:`shares` returned on the last stage of the pipeline."""
        views = self._views()
        for name, packed in shares.items():
            if name not in views:
                self.changed.add(name)
                value = _load(packed, self._shallow, self._module.device)
                table = "buffers" if name in self._module._buffers else ""
                self._shallow.put((("", table), name), value)

    # ------------------------------------------------------------------ a worker that joins

    def state(self) -> SideEffectState:
        """For a worker that joins, which has the module's attributes from elsewhere."""
        self._forget(self._tree.absorb())
        return sorted(self.names), sorted(self.changed), dict(self.slots), set(self._alike)

    def load_state(self, state: SideEffectState) -> None:
        """Restores what :meth:`state` returned."""
        names, changed, slots, alike = state
        self.names.update(names)
        self.changed.update(changed)
        self._tree.absorb()
        self._alike, device = set(alike), self._module.device
        self.slots = {
            place: {slot: _SlotValue(v.digest, v.packed, on_device(v.tensor, device)) for slot, v in values.items()}
            for place, values in slots.items()
        }


def _is_deque(tree: ValueTree, one: Found) -> bool:
    return one.place[1] == WHOLE and isinstance(tree.referent(one.place[0]), deque)


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


# ---------------------------------------------------------------------- values as bytes


class _Pickler(pickle.Pickler):
    """Modules and cells of the tree are references, tensors their bytes."""

    def __init__(self, file: io.BytesIO, tree: ValueTree) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tree = tree

    @override
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, (str, int, float, bytes, type(None))):
            return None
        if isinstance(obj, Tensor):
            return self._of_tensor(obj)
        path = self._tree.reference(obj)
        if path is not None:
            return "at", path
        if isinstance(obj, nn.Module):
            raise TypeError(f"a {type(obj).__name__} is a layer that the module did not have before")
        return None

    @staticmethod
    def _of_tensor(tensor: Tensor) -> Any:
        if is_sharded(tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
            return None
        is_host = tensor.device.type == "cpu"
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        assert has_plain_memory(flat)
        form = (flat.dtype, tuple(flat.shape), is_host, isinstance(tensor, nn.Parameter))
        return "tensor", memory_of(flat).numpy().tobytes() if flat.numel() else b"", *form


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tree: ValueTree, device: torch.device) -> None:
        super().__init__(file)
        self._tree, self._device = tree, device

    @override
    def persistent_load(self, pid: Any) -> Any:
        kind, *rest = pid
        if kind == "at":
            return self._tree.referent(rest[0])
        data, dtype, shape, is_host, is_parameter = rest
        made = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
        made = made if is_host else made.to(self._device)
        return nn.Parameter(made, requires_grad=False) if is_parameter else made


def _dump(value: Any, tree: ValueTree) -> bytes:
    file = io.BytesIO()
    _Pickler(file, tree).dump(value)
    return file.getvalue()


def _load(data: bytes, tree: ValueTree, device: torch.device) -> Any:
    return _Unpickler(io.BytesIO(data), tree, device).load()
