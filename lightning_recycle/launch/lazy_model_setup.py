"""The layers of a module whose ``configure_pipeline()`` needs what ``setup()`` makes, before there are workers.

Concept: how a model is cut is decided in the launching process, which otherwise runs no hooks. Only if the layers
cannot be described yet, it prepares the data and calls the ``setup()`` hooks as one device does, describes the layers,
and then forgets what the hooks left: the workers call them again, each for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.trainer import call

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.launch.trainer_results import attach_data
from lightning_recycle.launch.worker_results import Call
from lightning_recycle.model.parts import ModelParts

__all__ = ["describe"]

log = logging.getLogger(__name__)

_OF_THE_MODEL = ("_tied", "_trainer")  # what describing the layers and attaching the Trainer leave in the module


def describe(parts: ModelParts, function_call: Call, is_outside: bool) -> None:
    """Finds out what parts the model has; ``is_outside``: in a worker that somebody else started.

    Raises:
        ConfigurationError: if they cannot be parts; in a worker that is started by hand, if they need ``setup()``.
        Exception: the user's own, also after ``setup()``.
    """
    try:
        parts.describe()
        return
    except ConfigurationError:
        raise  # what was described is wrong
    except Exception as error:  # raised again below, unless setup() makes what it lacks
        if is_outside:
            raise ConfigurationError(
                f"{type(parts.module).__name__}.configure_pipeline() raised {type(error).__name__}: {error}. In workers"
                " that are started by hand it cannot wait for setup(), as all would prepare the data at once: give the"
                " module what it needs as arguments."
            ) from error
        log.info("configure_pipeline() is called again after setup(): %s: %s", type(error).__name__, error)
    trainer, module = function_call[0], parts.module
    attach_data(function_call)
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    with _as_before(module), _as_before(datamodule):
        if datamodule is not None:
            call._call_lightning_datamodule_hook(trainer, "prepare_data")
        call._call_lightning_module_hook(trainer, "prepare_data")
        if datamodule is not None:
            call._call_lightning_datamodule_hook(trainer, "setup", stage=trainer.state.fn)
        call._call_lightning_module_hook(trainer, "setup", stage=trainer.state.fn)
        parts.describe()


@contextmanager
def _as_before(owner: Any) -> Iterator[None]:
    """Afterwards ``owner`` has the attributes that it had, and its layers: what setup() made may be large, or open."""
    before = {} if owner is None else dict(vars(owner))
    try:
        yield
    finally:
        if owner is not None:
            kept = {name: value for name, value in vars(owner).items() if name in _OF_THE_MODEL}
            vars(owner).clear()
            vars(owner).update({**before, **kept})
