"""Values that steps and hooks change in the module, per micro-batch.

Concept: a micro-batch is its global index in a step. What a training step or forward changes in the module's tree
(:mod:`~lightning_recycle.session.change_tracker`) begins for each micro-batch as at the beginning of the step, and is
taken back after it: a step that runs again, anywhere, begins as it did. Changes travel with the record of the
micro-batch. After the step, on every worker,

- items *appended* to a list or deque arrive in micro-batch order: Lightning's idiom ``self.outputs.append(...)``;
- a value that all micro-batches leave alike, to the bit, counts once: ``self.count += 1``, a momentum encoder;
- a running statistic, as of BatchNorm, becomes the mean of those that they leave;
- any other value has one version per micro-batch from then on, in place whenever a step runs on that index: a hidden
  state. Other code sees the last micro-batch's; its assignments hold for all.

Values too large to travel stay where they were made; if one is needed elsewhere, the run ends with an error that names
it. Large tensors of a step's graph cannot be meant for the next step: they stay on their worker. Of a place that
several stages change, the last stage's value counts. In evaluations appended items reach all workers; the rest is the
worker's share, as under DDP, which the last stage has and the others take over.

Contract: the objects that the module refers to stay the same, only their contents are written.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.model.recorded_module import RecordedModule
from lightning_recycle.session.change_tracker import ABSENT, WHOLE, CellChange, CellKey, CellPath, ValueTree, name_of
from lightning_recycle.tensor_memory import (
    checksum,
    is_sharded,
    memory_address,
    on_device,
    pack_tensors,
    to_cpu,
    unpack_tensors,
)
from lightning_recycle.torch_internals import tree_leaves, tree_map_only

_SHARED_BYTES = 1024 * 1024  # of an attribute that is copied to the other stages
_SMALL_BYTES = 64 * 1024  # of a value that always travels
_MOST_BYTES = 4 * 1024 * 1024  # of the values of one micro-batch that travel
_INTEGERS = (torch.int32, torch.int64)
_REMEDY = (
    " Keep it below 4 MB, write it in on_train_batch_end(), which runs once per step, or use num_microbatches=1 without"
    " failures."
)


@dataclass(frozen=True)
class Append:
    """New items of the list at ``path``, packed; ``kind``: its class."""

    path: CellPath
    kind: type[Any]
    items: bytes


@dataclass(frozen=True)
class MicrobatchChange:
    """A value left by a micro-batch: its digest and, if it travels, the packed value."""

    cell_key: CellKey
    digest: bytes
    size: int
    packed: bytes | None
    is_statistic: bool = False


Effect: TypeAlias = Append | MicrobatchChange


@dataclass(frozen=True)
class _MicrobatchValue:
    """A value of one micro-batch: packed, a tensor of this worker, or elsewhere."""

    digest: bytes = b""
    packed: bytes | None = None
    tensor: Tensor | None = None

    @property
    def is_here(self) -> bool:
        return self.packed is not None or self.tensor is not None


ByMicrobatch: TypeAlias = dict[CellKey, dict[int, _MicrobatchValue]]

MicrobatchChangesState: TypeAlias = tuple[list[str], list[str], ByMicrobatch, set[CellKey]]
"""Names of attributes with lists that steps extended, and of those that hooks of evaluations changed; values by
micro-batch; the places that micro-batches left alike.
"""


@dataclass
class MicrobatchEffects:
    """Changes by one micro-batch's forward, and the record of hooks on its output."""

    effects: list[Effect] = field(default_factory=list)
    record: bytes = b""

    def note(self, earlier: bytes) -> bytes:
        """The changes for the next stage, with those of the stages before."""
        if not self.effects:
            return earlier
        own_targets = {_target(effect) for effect in self.effects}
        before = pickle.loads(earlier) if earlier else []
        return pickle.dumps([*(effect for effect in before if _target(effect) not in own_targets), *self.effects])

    def output(self, earlier: bytes) -> bytes:
        return put_together(taken_apart(self.record)[0], self.note(earlier))


def put_together(record: bytes, note: bytes) -> bytes:
    """A record of hooks and a note of changes; empty if both are."""
    return len(record).to_bytes(8, "little") + record + note if record or note else b""


def taken_apart(data: bytes) -> tuple[bytes, list[Effect]]:
    """The record, and the changes, that :func:`put_together` was given."""
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], pickle.loads(data[end:]) if data[end:] else []


def _belongs_to_graph(value: Any) -> bool:
    """Whether ``value`` has large tensors of a graph, which only its step can use."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    return sum(tensor.nbytes for tensor in tensors) > _SMALL_BYTES


def _is_count(value: Any) -> bool:
    """Whether ``value`` may be a count: a number, or a tensor of one or of integers."""
    if isinstance(value, Tensor):
        return value.numel() == 1 or value.dtype in _INTEGERS
    return type(value) in (int, float)


def _is_integer(value: Any) -> bool:
    return value.numel() == 1 and value.dtype in _INTEGERS if isinstance(value, Tensor) else type(value) is int


def _path_to(cell_key: CellKey) -> CellPath:
    return cell_key[0] if cell_key[1] == WHOLE else (*cell_key[0], cell_key[1])


def _are_nested(first: CellPath, second: CellPath) -> bool:
    """Whether one path leads to a part of the other's object."""
    return all(a is b or a == b for a, b in zip(first, second, strict=False))


def _target(effect: Effect) -> Any:
    return effect.path if isinstance(effect, Append) else effect.cell_key


class MicrobatchChanges:
    """Changes of the values of ``module``, the user's, by micro-batch.

    ``alone``: whether a step has a single micro-batch; then there is nothing to combine. ``microbatches``: of a step;
    ``of_worker``: of them, those that one worker runs without failures.

    Attributes:
        names: the attributes whose lists steps have extended.
        keeps_shares: whether hooks of evaluations have changed a number or tensor that stays on the worker.
        next_microbatch: index of the micro-batch whose training step is about to run as a whole; None for other code.
    """

    def __init__(
        self, module: pl.LightningModule, alone: bool = False, microbatches: int = 1, of_worker: int = 1
    ) -> None:
        self._module, self._alone, self._microbatches, self._of_worker = module, alone, microbatches, of_worker
        self._internal = frozenset(dir(RecordedModule))
        self.forget_values()
        self.by_microbatch: ByMicrobatch = {}
        self.next_microbatch: int | None = None
        self.names: set[str] = set()
        self.changed: set[str] = set()
        self.keeps_shares = self._is_inside = self._runs_again = False
        self._equal_keys: set[CellKey] = set()  # those that all micro-batches left alike so far
        self._own_tensors: dict[int, dict[CellKey, Tensor]] = {}  # what this worker's micro-batches of the step left
        self._warned_names: set[str] = set()
        self._at_batch: list[tuple[Any, Any]] | None = None  # what the cells held when the batch began
        self._step = self._ended_step = -1
        self._replaced: tuple[dict[CellKey, Any], ByMicrobatch] = {}, {}  # what the newest step has replaced

    def forget_values(self) -> None:
        """Keeps nothing of the module, nor weak references to weights, until looked at."""
        self._tree = ValueTree(self._module, self._internal)
        self._shallow = ValueTree(self._module, self._internal, with_submodules=False)

    # ------------------------------------------------------------------ a micro-batch in training

    def begin_step(self, step: int | None = None) -> None:
        """A batch of training, number ``step``, or of an evaluation begins."""
        self._at_batch, self._runs_again = None, False
        if step is not None:
            self._step, self._own_tensors = step, {}
            self._tree.begin_step()
            self._forget(self._tree.absorb())

    def microbatch(self, index: int, sums: Sequence[Tensor] = ()) -> AbstractContextManager[MicrobatchEffects]:
        """Runs a forward of micro-batch ``index``; lists its changes and undoes them.

        Changes of running statistics are added to ``sums``, its part of the mean, if these have room for them.
        """
        effects = MicrobatchEffects()
        return nullcontext(effects) if self._alone else self._watching(self._tree, index, effects, sums)

    def statistics(self) -> list[Tensor]:
        if self._alone:
            return []
        self._forget(self._tree.absorb())
        return list(self._tree.statistics.values())

    def again(self, index: int) -> AbstractContextManager[Any]:
        """As :meth:`microbatch`, for a recomputed forward, which leaves nothing."""
        return nullcontext() if self._alone else self._watching(self._tree, index, MicrobatchEffects(), leaves=False)

    def outside(self) -> AbstractContextManager[MicrobatchEffects]:
        """As :meth:`microbatch`, for a forward in a hook; :meth:`repeat_outside` follows."""
        effects = MicrobatchEffects()
        return nullcontext(effects) if self._alone else self._watching(self._tree, None, effects)

    @contextmanager
    def _watching(
        self,
        tree: ValueTree,
        index: int | None,
        effects: MicrobatchEffects,
        sums: Sequence[Tensor] = (),
        leaves: bool = True,
    ) -> Iterator[MicrobatchEffects]:
        """Adds a block's changes to ``effects``, if it ``leaves`` any, and undoes them."""
        self._forget(tree.absorb())
        own = {} if index is None else {k: self._value_of(tree, k, index) for k in self.by_microbatch if tree.has(k)}
        tree.begin(own)
        self._is_inside = tree is self._tree
        try:
            yield effects
        except BaseException:
            tree.abandon()
            raise
        finally:
            self._is_inside = False
        if not leaves:
            tree.abandon()
            return
        if not (changes := tree.end()):
            return
        places = list(tree.statistics) if sums else []
        for change in changes:
            if change.cell_key in places:
                sums[places.index(change.cell_key)].add_((change.now.detach() - change.before) / self._microbatches)
        effects.effects += self._effects(tree, [change for change in changes if change.cell_key not in places], index)

    def _forget(self, changed: Iterable[CellKey]) -> None:
        """Other code has changed these places: the values now hold for all micro-batches."""
        for cell_key in changed if self.by_microbatch else ():
            path = _path_to(cell_key)
            for other in [other for other in self.by_microbatch if _are_nested(path, _path_to(other))]:
                del self.by_microbatch[other]

    def _value_of(self, tree: ValueTree, cell_key: CellKey, index: int) -> Any:
        value = self.by_microbatch[cell_key][index]
        if not value.is_here:
            raise UnsupportedFeatureError(
                f"{name_of(cell_key)} is written in a training step, differently for each micro-batch, and its value"
                f" for micro-batch {index} was on a worker that does not run that any more: it is too large to be kept"
                " on all." + _REMEDY
            )
        return self._unpack(value, tree)

    def _unpack(self, value: _MicrobatchValue, tree: ValueTree) -> Any:
        return self._load(value.packed, tree) if value.tensor is None else value.tensor.clone()

    def _effects(self, tree: ValueTree, changes: Sequence[CellChange], index: int | None) -> list[Effect]:
        """The ``changes`` by micro-batch ``index``, as effects for all workers.

        Items that were appended travel as such. Of other values those travel that are small, or differed between
        micro-batches before, within a limit for all of them; of the rest only the digest does. Values of the step's
        graph stay here.
        """
        effects: list[Effect] = []
        changed_values: list[tuple[MicrobatchChange, Any]] = []
        for change in changes:
            cell_key, before = change.cell_key, change.before
            # Another list than before is meant for the micro-batch's next step, unless it begins with the old items.
            is_append = change.items is not None and (cell_key[1] == WHOLE or before is ABSENT or len(before) > 0)
            if is_append and cell_key not in self.by_microbatch:
                effects.append(self._append_effect(change, tree))
                continue
            if _belongs_to_graph(change.now):
                tree.put(cell_key, change.now)
                continue
            value = change.now.detach() if isinstance(change.now, Tensor) else change.now
            if isinstance(value, Tensor) and value.nbytes > _SMALL_BYTES and not is_sharded(value):
                digest = checksum([value]) + str((value.dtype, tuple(value.shape))).encode()
                effect = MicrobatchChange(cell_key, digest, value.nbytes, None, cell_key in tree.statistics)
            else:
                packed = self._pack(cell_key, value, tree)
                digest = hashlib.blake2b(packed, digest_size=16).digest()
                effect = MicrobatchChange(cell_key, digest, len(packed), packed, cell_key in tree.statistics)
            changed_values.append((effect, value))
        room = _MOST_BYTES
        for effect, value in sorted(changed_values, key=lambda item: (item[0].size, repr(item[0].cell_key))):
            size, is_mean = effect.size, effect.is_statistic
            travels = (
                index is None
                or is_mean
                or (size <= room and (size <= _SMALL_BYTES or effect.cell_key not in self._equal_keys))
            )
            room -= size if travels else 0
            if isinstance(value, Tensor) and index is not None:
                self._own_tensors.setdefault(index, {})[effect.cell_key] = value
            sent = (effect.packed or self._pack(effect.cell_key, value, tree)) if travels else None
            effects.append(MicrobatchChange(effect.cell_key, effect.digest, size, sent, is_mean))
        return effects

    def _append_effect(self, change: CellChange, tree: ValueTree) -> Append:
        path, key = change.cell_key
        is_deque = isinstance(tree.referent(path) if key == WHOLE else change.now, deque)
        packed = self._pack(change.cell_key, change.items, tree)
        return Append(path if key == WHOLE else (*path, key), deque if is_deque else list, packed)

    def _pack(self, cell_key: CellKey, value: Any, tree: ValueTree) -> bytes:
        try:
            return pack_tensors(tree_map_only(Tensor, to_cpu, value), tree.reference)
        except Exception as error:
            raise UnsupportedFeatureError(
                f"{name_of(cell_key)} got a value in a step or hook that sees one micro-batch which cannot be pickled"
                f" ({type(error).__name__}: {error}): other workers would not have it. Keep tensors, numbers, and lists"
                " and dicts of them, or assign it in a hook such as on_train_batch_end()."
            ) from error

    def _load(self, packed: Any, tree: ValueTree) -> Any:
        return on_device(unpack_tensors(packed, tree.referent), self._module.device)

    # ------------------------------------------------------------------ other code that sees one micro-batch

    @contextmanager
    def noticed(self) -> Iterator[list[Effect]]:
        """Runs a hook or whole step; lists changes for all workers, and takes them back."""
        index, self.next_microbatch = self.next_microbatch, None
        effects: list[Effect] = []
        if self._alone or self._is_inside:
            yield effects
        elif index is not None:  # micro-batches run in turns, each with attributes of its own
            tree = ValueTree(self._module, self._internal, with_submodules=False)
            with self._watching(tree, index, MicrobatchEffects(effects)):
                yield effects
        else:
            with self._watching_hook(self._shallow, effects):
                yield effects

    @contextmanager
    def _watching_hook(self, tree: ValueTree, effects: list[Effect]) -> Iterator[None]:
        if self._runs_again and self._at_batch is not None:
            tree.restore(self._at_batch)
        contents = tree.contents()
        self._at_batch = self._at_batch or contents
        self._runs_again = False
        try:
            yield
        except BaseException:
            tree.changes_outside(lambda change: change.items is None)
            raise
        for change in tree.changes_outside(lambda change: not self._add_append(change, tree, effects)):
            if change.items is None:
                (_, _, *names), key = change.cell_key
                self.changed.add(str(names[0] if names else key))
                self.keeps_shares |= any(isinstance(leaf, (int, float, Tensor)) for leaf in tree_leaves(change.now))

    def _add_append(self, change: CellChange, tree: ValueTree, effects: list[Effect]) -> bool:
        """Whether these are new items of a list, which then are among ``effects``."""
        if change.items is None:
            return False
        try:
            effects.append(self._append_effect(change, tree))
        except UnsupportedFeatureError as error:
            if (name := name_of(change.cell_key)) not in self._warned_names:
                self._warned_names.add(name)
                rank_zero_warn(f"self.{error} It stays on the worker that made it.")
            return False
        return True

    def run_again(self) -> None:
        """The batch may run again: its micro-batches must not count twice here."""
        self._runs_again = True

    # ------------------------------------------------------------------ on every worker

    @torch.no_grad()
    def ends_step(self, sums: Sequence[Tensor] = ()) -> None:
        """The step is over; :meth:`repeat` follows if micro-batches changed anything.

        ``sums``: of their contributions to statistics.
        """
        self._ended_step, self._replaced = self._step, ({}, dict(self.by_microbatch))
        for cell_key, added in zip(list(self._tree.statistics), sums, strict=False):
            self._remember(cell_key)
            self._tree.put(cell_key, self._tree.get(cell_key) + added)

    @torch.no_grad()
    def repeat(self, records: Mapping[int, Sequence[Effect]], on_step: bool) -> None:
        """Repeats the effects of the micro-batches of a batch; ``on_step``: of training."""
        if any(records.values()):
            self._forget(self._tree.absorb())
        changes: dict[CellKey, dict[int, MicrobatchChange]] = defaultdict(dict)
        for index, effects in sorted(records.items()):
            for effect in effects:
                if isinstance(effect, Append):
                    self._extend(effect, on_step)
                else:
                    changes[effect.cell_key][index] = effect
        if on_step and not self._alone:
            for cell_key, changed in changes.items():
                self._take_values(cell_key, changed)
            self._own_tensors = {}

    @torch.no_grad()
    def repeat_outside(self, note: bytes) -> None:
        """Repeats effects of an :meth:`outside` block, which hold for all micro-batches."""
        for effect in pickle.loads(note) if note else ():
            if isinstance(effect, Append):
                self._extend(effect, on_step=True)
            elif self._tree.has(effect.cell_key):
                self._remember(effect.cell_key)
                self._tree.put(effect.cell_key, self._load(effect.packed, self._tree))
                self._forget([effect.cell_key])

    def _extend(self, effect: Append, on_step: bool) -> None:
        tree, cell_key = self._tree, (effect.path[:-1], effect.path[-1])
        self.names.add(str(effect.path[2]))
        if not tree.has(cell_key):
            return
        target = tree.get(cell_key)
        if not isinstance(target, effect.kind):
            self._remember(cell_key, on_step)
            target = effect.kind()
            tree.put(cell_key, target)
        elif tree.has((effect.path, WHOLE)):
            self._remember((effect.path, WHOLE), on_step)
        target.extend(self._load(effect.items, tree))

    def _remember(self, cell_key: CellKey, on_step: bool = True) -> None:
        if on_step and cell_key not in self._replaced[0]:
            self._replaced[0][cell_key] = self._copy_of(cell_key)

    def _copy_of(self, cell_key: CellKey) -> Any:
        value = self._tree.get(cell_key)
        return value.detach().clone() if isinstance(value, Tensor) else value

    def _take_values(self, cell_key: CellKey, changes: Mapping[int, MicrobatchChange]) -> None:
        """Puts the value that the micro-batches left in ``cell_key`` there.

        ``changes``: by micro-batch. Statistics are averaged, and equal values become the one of all; otherwise each
        micro-batch keeps its own for the next step, and the place holds that of the last one known here. Raises
        UnsupportedFeatureError if the value is needed here and was too large to be sent.
        """
        tree, indices, has_cell = self._tree, range(self._microbatches), self._tree.has(cell_key)
        by_index = {}
        for index, change in changes.items():
            tensor = self._own_tensors.get(index, {}).get(cell_key) if change.packed is None else None
            by_index[index] = _MicrobatchValue(change.digest, change.packed, tensor)
        local_indices = [index for index, value in by_index.items() if value.is_here]
        if has_cell:
            self._remember(cell_key)
        if any(change.is_statistic for change in changes.values()):
            if has_cell:
                old = tree.get(cell_key)
                values = [self._unpack(by_index[index], tree) if index in by_index else old for index in indices]
                tree.put(cell_key, torch.stack(values).double().mean(0).to(old.dtype))
            return
        if len(by_index) == len(indices) and len({value.digest for value in by_index.values()}) == 1:
            if has_cell and not local_indices:
                raise UnsupportedFeatureError(
                    f"{name_of(cell_key)} is written in a training step, and this worker ran no micro-batch of it: the"
                    " new value is too large to be sent." + _REMEDY
                )
            self.by_microbatch.pop(cell_key, None)
            may_be_sum = cell_key not in self._equal_keys
            self._equal_keys.add(cell_key)
        else:
            may_be_sum = True
            self._equal_keys.discard(cell_key)
            if cell_key not in self.by_microbatch:
                initial = (
                    _MicrobatchValue(packed=self._pack(cell_key, tree.get(cell_key), tree))
                    if has_cell
                    else _MicrobatchValue()
                )
                self.by_microbatch[cell_key] = dict.fromkeys(indices, initial)
                if len(local_indices) < len(by_index):
                    size = max(change.size for change in changes.values())
                    rank_zero_warn(
                        f"{name_of(cell_key)} ({size:,} bytes) is written in a training step, differently for each"
                        " micro-batch, and too large to be kept on all workers: when one dies, the run ends with an"
                        " error." + _REMEDY
                    )
            self.by_microbatch[cell_key] = {**self.by_microbatch[cell_key], **by_index}
        if has_cell and local_indices:
            value = self._unpack(by_index[max(local_indices)], tree)
            if may_be_sum and self._of_worker > 1:
                self._warn_of_sum(cell_key, tree.get(cell_key), value)
            tree.put(cell_key, value)

    def _warn_of_sum(self, cell_key: CellKey, before: Any, value: Any) -> None:
        """Warns once of what may be a sum, under DDP that of a worker's whole batch.

        What all micro-batches increase by one counts steps.
        """
        name = name_of(cell_key)
        if name in self._warned_names or not _is_count(value):
            return
        if cell_key in self._equal_keys and (not _is_integer(before) or not _is_integer(value) or value - before <= 1):
            return
        self._warned_names.add(name)
        rank_zero_warn(
            f"{name} is changed in a training step by each of the {self._of_worker} micro-batches of a worker"
            " (num_microbatches). Hooks and checkpoints see what the last micro-batch of each step left, not the sum of"
            " all. To have that use self.log(..., reduce_fx='sum') in the step, or append to a list in an attribute,"
            " which is whole on every worker."
        )

    @contextmanager
    def as_in_step(self, step: int) -> Iterator[None]:
        """In the block values are those at the start of ``step``, the one before this."""
        if self._ended_step != step:
            yield
            return
        (before, by_microbatch), now = self._replaced, self.by_microbatch
        after = {cell_key: self._copy_of(cell_key) for cell_key in before}
        self._set(before, by_microbatch)
        try:
            yield
        finally:
            self._set(after, now)

    def _set(self, values: Mapping[CellKey, Any], by_microbatch: ByMicrobatch) -> None:
        for cell_key, value in values.items():
            self._tree.put(cell_key, value)
        self._tree.absorb()
        self.by_microbatch = by_microbatch

    def kept_numbers(self, if_alike: bool) -> list[str]:
        """Names of the numbers that micro-batches have changed differently.

        With ``if_alike`` also those that all have changed alike, but not in buffers (BatchNorm's counter).
        """
        alike = (key for key in self._equal_keys if if_alike and key[0][1] != "buffers")
        values = {name_of(key): self._tree.get(key) for key in {*self.by_microbatch, *alike} if self._tree.has(key)}
        return sorted(name for name, value in values.items() if _is_count(value))

    # ------------------------------------------------------------------ what stages and pipelines have in common

    def shares(self) -> dict[str, bytes]:
        """Packed small changes by hooks of evaluations, by attribute."""
        packed_values = {}
        for name in self.changed - self.names - self._views():
            if not self._shallow.has(self._root_key(name)):
                continue
            try:
                packed = self._pack(self._root_key(name), self._shallow.get(self._root_key(name)), self._shallow)
            except UnsupportedFeatureError:  # it stays on the worker that made it
                continue
            if len(packed) <= _SHARED_BYTES:
                packed_values[name] = packed
        return packed_values

    def _root_key(self, name: str) -> CellKey:
        return ("", "buffers" if name in dict(self._module.named_buffers(recurse=False)) else ""), name

    def _views(self) -> set[str]:
        """Attributes in the memory of parameters of this stage."""
        weights = {memory_address(parameter) for parameter in self._module.parameters()} - {0}
        tensors = {name: value for name, value in vars(self._module).items() if isinstance(value, Tensor)}
        return {name for name, value in tensors.items() if memory_address(value) in weights}

    def load_shares(self, shares: Mapping[str, bytes]) -> None:
        """Takes over what :meth:`shares` returned on the last stage of the pipeline."""
        views = self._views()
        for name, packed in shares.items():
            if name not in views and self._shallow.has(self._root_key(name)):
                self.changed.add(name)
                self._shallow.put(self._root_key(name), self._load(packed, self._shallow))

    # ------------------------------------------------------------------ a worker that joins

    def state(self) -> MicrobatchChangesState:
        """The changes for a joining worker, which gets the module's attributes otherwise."""
        self._forget(self._tree.absorb())
        return sorted(self.names), sorted(self.changed), dict(self.by_microbatch), set(self._equal_keys)

    def load_state(self, state: MicrobatchChangesState) -> None:
        names, changed, by_microbatch, equal_places = state
        self.names.update(names)
        self.changed.update(changed)
        self._tree.absorb()
        self._equal_keys, device = set(equal_places), self._module.device
        self.by_microbatch = {
            cell_key: {
                index: _MicrobatchValue(v.digest, v.packed, on_device(v.tensor, device)) for index, v in values.items()
            }
            for cell_key, values in by_microbatch.items()
        }
