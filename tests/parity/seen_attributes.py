"""All attributes of what a user finds in a Trainer after a run, and where two runs differ in them."""

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import same_script as same
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from simulated_device.choice import ON_DEVICES
from support.comparison import differences as differences_of_values
from torch import Tensor

DIFFERS = {
    "trainer.strategy": "it is what is compared",
    **({"trainer.accelerator": "tests that run on devices have another one"} if ON_DEVICES else {}),
    "trainer.device_ids": "the grid has more devices",
    "trainer.num_devices": "the grid has more devices",
    "trainer.world_size": "the grid has more devices",
    "trainer.distributed_sampler_kwargs": "the grid has more devices",
    "callback Keeps.file": "an open file cannot leave the worker: the launching process keeps what it has",
    "callback ModelCheckpoint._last_time_checked": "a time of day",
    "callback Timer._start_time": "a time of day",
    "callback Timer._end_time": "a time of day",
    "trainer._last_val_time": "a time of day, which every fit sets",
    "fit_loop._combined_loader": "the loaders in it are compared as trainer.train_dataloader",
    "fit_loop.epoch_loop.val_loop._combined_loader": "the loaders in it are compared as trainer.val_dataloaders",
    "test_loop._combined_loader": "the loaders in it are compared as trainer.test_dataloaders",
    "fit_loop.epoch_loop._results": "what was logged is in the metrics; every run begins it anew",
    "fit_loop.epoch_loop.val_loop._results": "what was logged is in the metrics; every run begins it anew",
    "test_loop._results": "what was logged is in the metrics; every run begins it anew",
    "fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader": "every evaluation begins it anew",
    "test_loop._seen_batches_per_dataloader": "every evaluation begins it anew",
}
"""Attributes of the launching process that may differ from those of one device, and why.

Besides, there are callbacks of this package, and ``recycle/`` metrics.
"""


class Stays:
    """Stands for an object that is compared by its class only."""

    def __init__(self, kind: type) -> None:
        self.name = kind.__name__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stays) and self.name == other.name

    def __repr__(self) -> str:
        return f"a {self.name}"


def is_own(value: Any) -> bool:
    """Whether it is a callback that only the grid has."""
    return isinstance(value, L.Callback) and type(value).__module__.startswith("lightning_recycle.")


def view(value: Any, root: Path) -> Any:
    """What of a value can be compared between two runs."""
    if value is None or isinstance(value, (bool, int, float, Tensor)):
        return value
    if isinstance(value, (str, Path)):
        return str(value).replace(str(root), "ROOT")
    if isinstance(value, _BaseProgress):
        return view(value.state_dict(), root)
    if isinstance(value, Mapping):
        items = [(str(view(key, root)), item) for key, item in value.items()]
        return {key: view(item, root) for key, item in items if not key.startswith("recycle/")}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [view(item, root) for item in items if not is_own(item)]
    return Stays(type(value))


def attributes_of(trainer: L.Trainer, module: L.LightningModule, root: Path) -> dict[str, Any]:
    """All attributes of what a user finds in a Trainer, by path."""
    found: dict[str, Any] = {}

    def look(path: str, owner: Any, names: Any) -> None:
        for name in names:
            try:
                found[f"{path}.{name}"] = view(getattr(owner, name), root)
            except Exception as error:  # the attribute cannot be read now, which must be so in both
                found[f"{path}.{name}"] = type(error).__name__

    properties = [name for name, kind in inspect.getmembers(type(trainer)) if isinstance(kind, property)]
    look("trainer", trainer, sorted({*vars(trainer), *properties}))
    for callback in trainer.callbacks:
        if not is_own(callback):
            look(f"callback {type(callback).__name__}", callback, vars(callback))

    def look_at_loop(path: str, loop: _Loop) -> None:
        look(path, loop, vars(loop))
        for name, child in vars(loop).items():
            if isinstance(child, _Loop):
                look_at_loop(f"{path}.{name}", child)

    for name in ("fit_loop", "validate_loop", "test_loop", "predict_loop"):
        look_at_loop(name, getattr(trainer, name))
    for name, submodule in module.named_modules():
        look(f"module {name}".strip(), submodule, vars(submodule))
    for index, optimizer in enumerate(trainer.optimizers):
        found[f"optimizer {index}"] = view(optimizer.state_dict(), root)
    for index, config in enumerate(trainer.lr_scheduler_configs):
        look(f"schedule {index}", config, vars(config))
        found[f"schedule {index} state"] = view(config.scheduler.state_dict(), root)
    return found


def differences(
    one: same.Run, grid: same.Run, tolerance: float = 1e-6, differs: Collection[str] = DIFFERS
) -> list[str]:
    """The attributes that differ, and how, without those that may, which are in ``differs`` with what they contain."""
    mine, its = (attributes_of(run.trainer, run.module, run.root) for run in (one, grid))
    assert len(mine) > 300  # an attribute that nobody looked at would not differ
    found = []
    for path in sorted(mine.keys() | its.keys()):
        if any(path == allowed or path.startswith(f"{allowed}.") for allowed in differs):
            continue
        if path not in its or path not in mine:
            found.append(f"{path}: only {'on one device' if path in mine else 'on the grid'}")
            continue
        found += differences_of_values(mine[path], its[path], tolerance, path)
    return found
