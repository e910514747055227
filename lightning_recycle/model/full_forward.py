"""Calls of an ordinary module outside of its steps, evaluated by all stages.

The user's module, and each submodule in which all layers of the chain are (``self.model(x)``), can be evaluated by all
stages together, so their ``forward`` becomes one that asks for that. Within a step or such an evaluation it is the
user's own. Their copies and pickles are of the class that the user wrote, and do not ask: a copy is one stage with
placeholders for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn, TypeAlias
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from typing_extensions import override

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.model.call_trace import is_cache, is_tracing
from lightning_recycle.model.parts import StepRecorder
from lightning_recycle.model.recording import disguised
from lightning_recycle.randomness import step_randomness
from lightning_recycle.torch_internals import tree_leaves

CallArguments: TypeAlias = tuple[str, tuple[Any, ...], Mapping[str, Any]]
"""Which module is called, by its path in the user's ("" is that itself), and its arguments."""

_asking: WeakKeyDictionary[nn.Module, tuple[str, Callable[[CallArguments], Any]]] = WeakKeyDictionary()


class _Asking(nn.Module):
    pass


def ask_instead(module: nn.Module, layers: Sequence[str], ask: Callable[[CallArguments], Any]) -> None:
    """From now on ``ask`` answers calls of ``module`` outside of steps.

    Also those of its submodules that contain all of ``layers``.
    """
    for path, holder in list(_holders(module, layers)):
        if holder not in _asking:
            made = disguised(type(holder), _Asking)  # type: ignore[arg-type]
            if "forward" not in vars(made):
                made.forward = _asking_forward(made.forward)
            holder.__class__ = made
        _asking[holder] = path, ask


def ask_no_more(module: nn.Module) -> None:
    """Ends :func:`ask_instead`."""
    for part in module.modules():
        if _asking.pop(part, None) is not None and isinstance(
            part, _Asking
        ):  # its class may be the user's again already
            part.__class__ = type(part).__bases__[1]  # which was disguised


def _holders(module: nn.Module, layers: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    for path, part in module.named_modules():
        has_forward = type(part).forward not in (nn.Module.forward, pl.LightningModule.forward)
        if has_forward and all(layer.startswith(f"{path}." if path else "") for layer in layers):
            yield path, part


def _asking_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)  # with its signature, which models of transformers look at
    def asking(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path, ask = _asking.get(self, ("", None))
        if ask is None or is_tracing():
            return forward(self, *args, **kwargs)
        if any(is_cache(leaf) or isinstance(leaf, _AbsentCache) for leaf in _leaves((args, kwargs))):
            raise UnsupportedFeatureError(
                f"{_named(self, path)} was called with a cache of keys and values, of which each stage has its layers'"
                " part only. Call it without one, with all tokens: use_cache=False in calls and in generate()."
            )
        return ask((path, args, kwargs))

    return asking


def _named(module: nn.Module, path: str) -> str:
    return f"self.{path}" if path else f"{type(module).__name__}"


# ---------------------------------------------------------------------- what the stages run


@dataclass(frozen=True)
class CallResult:
    """Result of a call, with its tensors on the CPU."""

    value: Any


class WholeStep(nn.Module):
    """A call, recorded as the step of an evaluation; ``take`` gets the recording."""

    name = "forward"

    def __init__(self, module: pl.LightningModule, recorder: StepRecorder, take: Callable[[Any], None]) -> None:
        super().__init__()
        self.module = module
        self._recorder, self._take = recorder, take

    @override
    def forward(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.name = f"{path}.forward" if path else "forward"
        called = self.module.get_submodule(path)
        with self._recorder.recording() as recording, step_randomness():
            output = called.forward(*args, **kwargs)  # its hooks run where it was called
            recording.result = CallResult(_portable(output))
        self._take(recording)
        return output


def _portable(output: Any) -> Any:
    """``output`` for other workers, without caches, which hold one stage's values."""
    caches = {type(leaf) for leaf in _leaves(output) if is_cache(leaf)}

    def sent(part: Any) -> Any:
        return part.detach().cpu().clone() if isinstance(part, Tensor) else _AbsentCache()

    return apply_to_collection(output, (Tensor, *caches), sent)


def _leaves(value: Any) -> list[Any]:
    return tree_leaves(value, is_leaf=is_cache)


class _AbsentCache:
    """Stands for a cache of keys and values; any use is an error."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnsupportedFeatureError(
            "The model was called outside of its steps, and each stage has its layers' part of the cache of keys and"
            " values that it returned: use_cache=False, and all tokens in each call."
        )

    __getitem__ = __iter__ = __len__ = __bool__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy and pickle look for
            raise AttributeError(name)
        self._refuse()
