"""ReCycle for PyTorch Lightning: training survives failures, with the same result.

Importing this package registers the strategy name ``"recycle"``. The import is cheap: everything that needs torch is
loaded on first use, and ``lightning_recycle.planning`` works without torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_recycle import lightning_names
from lightning_recycle.arguments import __version__ as __version__
from lightning_recycle.errors import (
    OTHER_LIGHTNING,
    CheckpointError,
    ConfigurationError,
    ReCycleError,
    StageLostError,
    UnsupportedFeatureError,
    suggestion,
)

if TYPE_CHECKING:
    from lightning_recycle.control.monitoring.history import Event
    from lightning_recycle.control.options import RecoveryOptions, VerificationOptions
    from lightning_recycle.model.layers import LayerSpec
    from lightning_recycle.model.module import PipelineModule
    from lightning_recycle.planning.planner import PlanningOptions
    from lightning_recycle.runtime.deferred import defer_weight_grad
    from lightning_recycle.runtime.groups_and_transports import CommunicationOptions
    from lightning_recycle.session.configuration import CheckpointOptions, MonitoringOptions, RayEngine
    from lightning_recycle.strategy import ReCycleStrategy

__all__ = [
    "CheckpointError",
    "CheckpointOptions",
    "CommunicationOptions",
    "ConfigurationError",
    "Event",
    "LayerSpec",
    "MonitoringOptions",
    "PipelineModule",
    "PlanningOptions",
    "RayEngine",
    "ReCycleError",
    "ReCycleStrategy",
    "RecoveryOptions",
    "StageLostError",
    "UnsupportedFeatureError",
    "VerificationOptions",
    "defer_weight_grad",
]

_LAZY = {
    "CheckpointOptions": "lightning_recycle.session.configuration",
    "CommunicationOptions": "lightning_recycle.runtime.groups_and_transports",
    "Event": "lightning_recycle.control.monitoring.history",
    "LayerSpec": "lightning_recycle.model.module",
    "MonitoringOptions": "lightning_recycle.session.configuration",
    "PipelineModule": "lightning_recycle.model.module",
    "PlanningOptions": "lightning_recycle.planning.planner",
    "RayEngine": "lightning_recycle.session.configuration",
    "ReCycleStrategy": "lightning_recycle.strategy",
    "RecoveryOptions": "lightning_recycle.control.options",
    "VerificationOptions": "lightning_recycle.control.options",
    "defer_weight_grad": "lightning_recycle.runtime.deferred",
}


_PACKAGES = ("callbacks", "errors", "planning", "simulation", "traces", "visualize")
"""Those with public names."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LAZY:
        try:
            module = importlib.import_module(_LAZY[name])
        except AttributeError as error:  # Python would take it for the answer that there is no such name
            raise ImportError(f"{_LAZY[name]} cannot be imported: {error}", name=_LAZY[name]) from error
        globals()[name] = getattr(module, name)
        return globals()[name]
    answer = f"module {__name__!r} has no attribute {name!r}.{suggestion(name, __dir__())}"
    raise AttributeError(answer, name=name)  # without obj, whose names Python would suggest once more


def __dir__() -> list[str]:
    """The public names, also those that are not loaded yet."""
    return sorted([*__all__, *_PACKAGES, "__version__"])


def _create_strategy(**kwargs: Any) -> ReCycleStrategy:
    from lightning_recycle.strategy import ReCycleStrategy

    return ReCycleStrategy(**kwargs)


def _refuse_strategy(**kwargs: Any) -> ReCycleStrategy:
    raise ConfigurationError(OTHER_LIGHTNING)


def _register_strategy(strategies: Any) -> None:
    strategies.StrategyRegistry.register(
        "recycle", _create_strategy, description="Pipeline and data parallelism that survives failures", override=True
    )


def _register_in_other(strategies: Any) -> None:
    """Registers the name in ``pytorch_lightning``, or its refusal if that is another."""
    if not lightning_names.are_apart():
        _register_strategy(strategies)
        return
    strategies.StrategyRegistry.register(
        "recycle", _refuse_strategy, description="Only for lightning.pytorch", override=True
    )
    if (own := sys.modules.get(_LAZY["ReCycleStrategy"])) is not None:
        strategies.Strategy.register(own.ReCycleStrategy)  # so it is asked, and refuses with the remedy


class _RegisterOnImport(importlib.abc.MetaPathFinder):
    """Registers the strategy name at the moment Lightning itself is imported.

    Importing Lightning here would make ``import lightning_recycle.planning`` pay for torch; not importing it would
    leave ``"recycle"`` unknown to a user who imports Lightning second.
    """

    def __init__(self, module_name: str, register: Callable[[Any], None]) -> None:
        self.module_name, self.register = module_name, register

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module_name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            if fullname in sys.modules:  # a loader may be that of several modules; it may be that of the other name
                self.register(sys.modules[fullname])

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


lightning_names.install()
for _name, _register in {
    "lightning.pytorch.strategies": _register_strategy,
    "pytorch_lightning.strategies": _register_in_other,
}.items():
    if _name in sys.modules:
        _register(sys.modules[_name])
    else:
        sys.meta_path.insert(0, _RegisterOnImport(_name, _register))
