"""Attributes that the user's code keeps outside of state dicts, carried from a worker to the launching process.

Concept: on one device what callbacks and the module keep in ``self`` is there after a run. Each attribute is pickled
by itself. What both processes have (the Trainer, the module with its submodules, parameters and buffers, the data
module, callbacks, loggers) travels as a name and arrives as the receiver's own.

Contract: what cannot be pickled, or belongs to the process that it is in (an optimizer, a DataLoader, a copy of a
LightningModule, of which a worker has one stage), does not travel, and the receiver keeps what it has. It also does if
the value has not changed: other references to the same object stay valid.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_recycle.model.layers import AbsentLayer
from lightning_recycle.model.recorded import RecordedModule

__all__ = ["AttributeCarrier", "CallbackParts", "Pickles"]

log = logging.getLogger(__name__)

Pickles: TypeAlias = Mapping[str, bytes]
"""Attributes by name."""
CallbackParts: TypeAlias = Sequence[tuple[int | None, bytes | None, Pickles]]
"""The callbacks of a Trainer in order: the position that each had when the run began, or None and its class; and its
attributes."""

_OWN = "lightning_recycle."  # modules whose callbacks belong to their process
_OF_ONE_PROCESS = (Optimizer, LRScheduler, DataLoader, pl.LightningModule, pl.LightningDataModule, pl.Trainer)
_MISSING = object()


class AttributeCarrier:
    """Packs attributes in one process and restores them in another.

    Args:
        trainer: the Trainer of this process.
        callbacks: its callbacks when the run began.
    """

    def __init__(self, trainer: pl.Trainer, callbacks: Sequence[Callback]) -> None:
        self._trainer, self._callbacks = trainer, list(callbacks)
        module = trainer.lightning_module
        bare = {*vars(pl.LightningModule()), *vars(RecordedModule)}
        self._bare = {True: bare, False: {*vars(nn.Module())}}
        common: dict[str, Any] = {
            "trainer": trainer,
            "strategy": trainer.strategy,
            "datamodule": getattr(trainer, "datamodule", None),
            "profiler": getattr(trainer, "profiler", None),
            **{f"callback {index}": callback for index, callback in enumerate(callbacks)},
            **{f"logger {index}": logger for index, logger in enumerate(trainer.loggers)},
            **{f"parameter {name}": parameter for name, parameter in module.named_parameters()},
            **{f"buffer {name}": buffer for name, buffer in module.named_buffers()},
            **{f"module {name}": submodule for name, submodule in module.named_modules()},
        }
        self._common = {name: value for name, value in common.items() if value is not None}
        self._names = {id(value): name for name, value in self._common.items()}

    # ------------------------------------------------------------------ the user's objects

    def pack_modules(self, wanted: Callable[[str], bool]) -> dict[str, Pickles]:
        """The attributes of the module ("") and its submodules, by name, of those that are ``wanted`` and here."""
        modules = dict(self._trainer.lightning_module.named_modules())
        packed = {
            name: self.pack(module, self._bare[not name])
            for name, module in modules.items()
            if wanted(name) and not isinstance(module, AbsentLayer)
        }
        return {name: attributes for name, attributes in packed.items() if attributes}

    def restore_modules(self, packed: Mapping[str, Pickles]) -> None:
        modules = dict(self._trainer.lightning_module.named_modules())
        for name, attributes in packed.items():
            if name in modules:
                self.restore(modules[name], attributes)

    def pack_callbacks(self) -> CallbackParts:
        """All callbacks that the Trainer has now, with those that the module has brought."""
        positions = {id(callback): index for index, callback in enumerate(self._callbacks)}
        parts: list[tuple[int | None, bytes | None, Pickles]] = []
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            position, own = positions.get(id(callback)), type(callback).__module__.startswith(_OWN)
            if position is None and own:
                continue  # lives in the workers
            kind = self._dump(type(callback)) if position is None else None
            if position is not None or kind is not None:
                parts.append((position, kind, {} if own else self.pack(callback)))
        return parts

    def restore_callbacks(self, parts: CallbackParts) -> None:
        restored: list[Any] = []
        for position, kind, attributes in parts:
            if position is None:
                assert kind is not None
                cls = self._load(kind)
                callback = cls.__new__(cls)
            else:
                callback = self._callbacks[position]
            self.restore(callback, attributes)
            restored.append(callback)
        self._trainer.callbacks[:] = restored  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ one object

    def pack(self, owner: Any, without: Iterable[str] = ()) -> dict[str, bytes]:
        """The attributes of ``owner`` that can travel, but not methods that were replaced on the object itself."""
        packed = {}
        for name, value in vars(owner).items():
            if name in without or (callable(value) and hasattr(type(owner), name)):
                continue
            data = self._dump(value)
            if data is None:
                log.debug("%s.%s stays in the worker.", type(owner).__name__, name)
            else:
                packed[name] = data
        return packed

    def restore(self, owner: Any, packed: Pickles) -> None:
        """Sets the attributes that differ."""
        attributes = vars(owner)
        for name, data in packed.items():
            before = attributes.get(name, _MISSING)
            if before is not _MISSING and self._dump(before) == data:
                continue
            try:
                attributes[name] = self._load(data)
            except Exception as error:  # a class that this process does not have, or whose own code fails: as if unsent
                log.debug("%s.%s could not be loaded: %s", type(owner).__name__, name, error)

    def _dump(self, value: Any) -> bytes | None:
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self._names).dump(value)
        except Exception:  # whatever the user's classes raise: it cannot travel, which its owner was not asked for
            return None
        return buffer.getvalue()

    def _load(self, data: bytes) -> Any:
        return _Unpickler(io.BytesIO(data), self._common).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names = names

    @override
    def persistent_id(self, obj: Any) -> str | None:
        return self._names.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _OF_ONE_PROCESS):
            raise pickle.PicklingError(f"{type(obj).__name__} belongs to this process.")
        if isinstance(obj, Tensor) and (obj.device.type != "cpu" or obj.numel() < obj.untyped_storage().size()):
            return obj.detach().cpu().clone().requires_grad_(obj.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, common: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._common = common

    @override
    def persistent_load(self, pid: str) -> Any:
        if pid not in self._common:
            raise pickle.UnpicklingError(f"{pid} exists in the worker only.")
        return self._common[pid]
