"""Global settings of the launching process that its workers share.

Concept: a script that workers import makes its settings there too, but what is set under its main guard, or in a
notebook, reaches this process alone. So the settings that decide what is computed (dtype, precision, determinism, the
state of generators, resolvers of OmegaConf) and what is shown (filters of warnings, levels of loggers) travel with
every worker, whenever it starts. Environment variables are the subject of another module.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot
from omegaconf.basecontainer import BaseContainer

from lightning_recycle.lightning_names import name_here

__all__ = ["Settings", "ignore_untrue_warnings"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """Settings of a process: :meth:`capture` takes them there, :meth:`restore` makes them those of another one."""

    lightning: Any
    dtype: torch.dtype
    matmul_precision: str
    filters: tuple[Any, ...]
    levels: dict[str, int]
    disabled: int
    resolvers: dict[str, Any]

    @classmethod
    def capture(cls) -> Settings:
        known = {name: logging.getLogger(name) for name in ["", *logging.root.manager.loggerDict]}
        return cls(
            lightning=_GlobalStateSnapshot.capture(),
            dtype=torch.get_default_dtype(),
            matmul_precision=torch.get_float32_matmul_precision(),
            filters=tuple(warnings.filters),
            levels={name: logger.level for name, logger in known.items() if logger.level != logging.NOTSET},
            disabled=logging.root.manager.disable,
            resolvers={
                name: resolver for name, resolver in BaseContainer._resolvers.items() if _is_own(name, resolver)
            },
        )

    def restore(self) -> None:
        self.lightning.restore()
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        # The script's own logger, where multiprocessing has imported the script under another name.
        logger = logging.root.manager.loggerDict["__main__"] = logging.getLogger("__mp_main__")
        logger.name = "__main__"
        for name, level in self.levels.items():
            logging.getLogger(name_here(name)).setLevel(level)
        logging.disable(self.disabled)
        BaseContainer._resolvers.update(self.resolvers)
        warnings.filters[:] = self.filters  # type: ignore[index]
        with warnings.catch_warnings():
            pass  # lets Python know that the filters have changed: it remembers what it has shown


def _is_own(name: str, resolver: Any) -> bool:
    """Whether a resolver is not one of OmegaConf's, and can be sent; workers may not need one that cannot."""
    if name.startswith("oc."):
        return False
    try:
        cloudpickle.dumps(resolver)
    except Exception as error:
        log.debug("The resolver %r stays in this process: %s", name, error)
        return False
    return True


def ignore_untrue_warnings() -> None:
    """Hides warnings of Lightning in a worker that do not hold there, whatever the user's filters are."""
    warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec.*")  # of Lightning 2.6 itself, on newer torch
    # Data is addressed: any epoch can resume in the middle.
    warnings.filterwarnings("ignore", message=r"(?s).*ended before the epoch ended and your dataloader is not resum.*")
    # Every PipelineModule has a validation_step, whether or not validation is wanted.
    warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
