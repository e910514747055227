"""The DataLoaders that the Trainer of the launching process shows after a run, whose data was read in the workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from typing_extensions import override

__all__ = ["ShownLoaders", "show_loaders"]


class ShownLoaders(CombinedLoader):
    """What a loop holds: the user's loaders, with their states in the workers."""

    def __init__(self, iterables: Any, mode: Any, states: Sequence[dict[str, Any]]) -> None:
        super().__init__(iterables, mode)
        self._states = list(states)

    @override
    def _state_dicts(self) -> list[dict[str, Any]]:
        return self._states


class _Requested:
    """The loaders of a hook, which is called when they are used: what it needs may exist in the workers only.

    It is called without Lightning's ``_request_dataloader``, which patches DataLoader meanwhile, and for good if the
    hook raises.
    """

    def __init__(self, source: _DataLoaderSource) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self._source.dataloader())

    def __len__(self) -> int:
        return len(self._source.dataloader())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_source", "state_dict", "load_state_dict"):
            raise AttributeError(name)  # the states are those of the workers
        return getattr(self._source.dataloader(), name)


def show_loaders(source: _DataLoaderSource, states: Sequence[dict[str, Any]], mode: str) -> CombinedLoader:
    """What a loop holds that has read the loaders of ``source``.

    Args:
        source: the user's loaders or hook.
        states: the states of the loaders.
        mode: how several loaders are combined, unless the user did.
    """
    iterables: Any = _Requested(source) if source.is_module() else source.instance
    if isinstance(iterables, CombinedLoader):
        iterables, mode = iterables.iterables, iterables._mode
    return ShownLoaders(iterables, mode, states)
