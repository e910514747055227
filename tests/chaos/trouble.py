"""The callback that makes a scenario's troubles happen, in the workers."""

import contextlib
import ctypes
import errno
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
from lightning.pytorch.callbacks import Callback
from torch import nn
from typing_extensions import override

from chaos.scenario import EPOCH, Trouble
from chaos.training import ChaosModel
from lightning_recycle.model.layers import AbsentLayer

_BALLAST = "ballast"
_CHUNK = 1 << 16  # bytes


class Troubles(pl.Callback):
    """Each trouble happens once in each initial worker that it concerns; that of a sample as often as its loss is
    computed in that epoch.
    """

    def __init__(self, troubles: Sequence[Trouble], disks: dict[str, Path]) -> None:
        self._waiting = list(troubles)
        self._disks = disks
        self._filled: list[tuple[int, Path]] = []  # the step that ends it, the folder
        self._supervisor = os.getpid()
        self._parent = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        position = (strategy.worker.pipeline, strategy.worker.stage)
        self._parent = os.getppid()
        self._waiting = [t for t in self._waiting if t.worker in (None, position) and strategy.incarnation == 0]
        if (mesh := strategy.session.mesh) is not None and mesh.member:  # a second signal would end the run at once
            self._waiting = [t for t in self._waiting if t.kind not in signal.Signals.__members__]

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, ChaosModel)
        slow = {(t.sample, t.step // EPOCH): t.seconds for t in self._waiting if t.where == "loss"}
        if slow:
            pl_module.on_loss = partial(_sleep_for_samples, trainer, slow)
        if any(trouble.where == "forward" for trouble in self._waiting):
            for layer in pl_module.layers:
                if not isinstance(layer, AbsentLayer):
                    layer.register_forward_pre_hook(partial(self._before_layer, trainer))

    def _before_layer(self, trainer: pl.Trainer, layer: nn.Module, arguments: Any) -> None:
        if trainer.training:
            self.reach("forward", trainer)

    def reach(self, where: str, trainer: pl.Trainer) -> None:
        """Lets happen what is due at ``where``."""
        strategy: Any = trainer.strategy
        if strategy.incarnation:  # a replacement gets its peer's troubles with the rest of its state
            self._waiting = []
        for trouble in [t for t in self._waiting if t.where == where and trainer.global_step >= t.step]:
            self._waiting.remove(trouble)
            self._happen(trouble)
        for end, folder in [filled for filled in self._filled if trainer.global_step >= filled[0]]:
            self._filled.remove((end, folder))
            clear(folder)

    def _happen(self, trouble: Trouble) -> None:
        kind = trouble.kind
        if kind == "sleep":
            time.sleep(trouble.seconds)
        elif kind == "hold-gil":
            ctypes.PyDLL(None).usleep(int(trouble.seconds * 1e6))  # unlike CDLL, PyDLL keeps the GIL
        elif kind == "OSError":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        elif kind == "MemoryError":
            raise MemoryError("drawn by chaos")
        elif kind == "descriptors":
            _leave_no_descriptors()
        elif kind == "kill-loader":
            _kill_a_loader()
        elif kind == "kill-forkserver":
            # A worker whose parent is gone has another one.
            if os.getppid() == self._parent:
                os.kill(self._parent, signal.SIGKILL)
        elif kind in self._disks:
            folder = self._disks[kind]
            fill(folder)
            self._filled.append((trouble.step + trouble.steps, folder))
        else:
            os.kill(self._supervisor, signal.Signals[kind])


def _reaching(hook: str) -> Callable[..., None]:
    def method(self: Troubles, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self.reach(hook, trainer)

    return method


for _hook in dir(Callback):
    if _hook.startswith("on_") and _hook not in ("on_fit_start", "on_save_checkpoint", "on_load_checkpoint"):
        setattr(Troubles, _hook, _reaching(_hook))


def _sleep_for_samples(trainer: pl.Trainer, slow: dict[tuple[int, int], float], samples: list[int]) -> None:
    if trainer.training:
        time.sleep(max(slow.get((sample, trainer.current_epoch), 0.0) for sample in samples))


def _leave_no_descriptors() -> None:
    """From now on this process can open nothing."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))


def _kill_a_loader() -> None:
    """SIGKILL to a DataLoader process of this worker, as from the OOM killer."""
    children = psutil.Process().children()
    if children:  # those of an epoch that is over may be gone
        children[0].kill()


def fill(folder: Path) -> None:
    """Takes all that is left of the disk of ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{_BALLAST}-{os.getpid()}", "wb", buffering=0) as file:
        for size in (_CHUNK, 1):
            with contextlib.suppress(OSError):  # the disk is full: that was the purpose
                while True:
                    file.write(bytes(size))


def clear(folder: Path) -> None:
    """Gives back what :func:`fill` took, in whichever process."""
    for path in folder.glob(f"{_BALLAST}-*"):
        path.unlink(missing_ok=True)
