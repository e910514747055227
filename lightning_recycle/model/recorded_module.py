"""A LightningModule in a worker: recorded logging, and calls outside of its steps.

``PipelineModule`` is a :class:`RecordedModule`. Any other module's class is replaced in a worker by one of the same
name that also derives from it (:func:`make_recorded`). ``batch_idx`` and ``dataloader_idx`` are optional parameters of
the hooks of a ``PipelineModule``; a hook that another one calls, such as ``loss``, is given the same.

The user's module, and each submodule that contains all layers of the chain (``self.model(x)``), can be evaluated
outside of steps by all stages together, so their ``forward`` requests that (:func:`redirect_forward`). Pickles and
copies of these are of the user's class, without redirection.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from numbers import Number
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_recycle.data.step_sources import StepHandle, as_one_step
from lightning_recycle.errors import ConfigurationError, UnsupportedFeatureError
from lightning_recycle.model.chains import is_cache, is_tracing
from lightning_recycle.randomness import step_randomness
from lightning_recycle.torch_internals import tree_leaves


class BatchIndices(NamedTuple):
    """Index of the batch (or step) in the epoch, and of an evaluation's DataLoader."""

    batch_idx: int
    dataloader_idx: int = 0


_current_indices: ContextVar[BatchIndices | None] = ContextVar("indices of the batch", default=None)


def call_at(indices: BatchIndices, hook: Callable[..., Any], *args: Any) -> Any:
    """Calls ``hook(*args)`` with the fields of ``indices`` that its signature names."""
    token = _current_indices.set(indices)
    try:
        return call_here(hook, *args)
    finally:
        _current_indices.reset(token)


def call_here(hook: Callable[..., Any], *args: Any) -> Any:
    """As :func:`call_at`, for the batch of the hook that calls this, if any."""
    indices = _current_indices.get()
    named = _named_parameters(getattr(hook, "__func__", hook)) if indices is not None else ()
    return hook(*args, **{name: getattr(indices, name) for name in named})


@lru_cache(maxsize=256)
def _named_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters
    given_by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(name for name in BatchIndices._fields if name in parameters and parameters[name].kind in given_by_name)


_LOG_SIGNATURE = inspect.signature(pl.LightningModule.log)
_LOG_DEFAULTS = {name: p.default for name, p in list(_LOG_SIGNATURE.parameters.items())[3:]}


class RecordedModule(pl.LightningModule):
    """A module whose ``self.log`` can be recorded, and whose hooks see no addresses."""

    recorded_logs: list[tuple[str, Any, dict[str, Any]]] | None = None
    """While logging is recorded instead of done: (name, value, further arguments)."""
    _may_log = True

    @override
    def log(self, *args: Any, **kwargs: Any) -> None:
        """As in Lightning; recorded in code that sees one micro-batch."""
        if self.recorded_logs is None:
            if not self._may_log:
                raise UnsupportedFeatureError(
                    f"self.log({args[0] if args else kwargs.get('name')!r}, ...) was called while micro-batches are"
                    " computed, in loss(), split_batch() or a layer: this worker has seen only a part of the batch."
                    " Log it in on_training_output(), on_validation_output() or on_test_output()."
                )
            if kwargs.get("sync_dist") and str(self._current_fx_name).endswith("epoch_end"):
                bound = _LOG_SIGNATURE.bind(self, *args, **kwargs)
                bound.apply_defaults()
                kwargs = dict(bound.arguments)
                del kwargs["self"]
                args, kwargs["value"] = (), self._reduce_over_workers(**kwargs)
            super().log(*args, **kwargs)
            return
        if len(args) == 2 and kwargs.keys() <= _LOG_DEFAULTS.keys():  # the usual way; binding takes its time
            name, value, arguments = *args, {**_LOG_DEFAULTS, **kwargs}
        else:
            bound = _LOG_SIGNATURE.bind(self, *args, **kwargs)
            bound.apply_defaults()
            _, name, value, *_ = bound.arguments.values()
            arguments = {key: bound.arguments[key] for key in _LOG_DEFAULTS}
        if not isinstance(value, (Number, Metric, Tensor)):
            raise ConfigurationError(
                f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged: log a"
                " number, a tensor with a single element or a torchmetrics object."
            )
        self.recorded_logs.append((name, value, arguments))

    def _reduce_over_workers(self, value: Any, reduce_fx: Any, rank_zero_only: bool, **_: Any) -> Any:
        """``value`` reduced over workers, which Lightning leaves to known strategies."""
        if rank_zero_only or not isinstance(value, (Number, Tensor)):
            return value
        number = torch.as_tensor(value, device=self.device)
        number = number if number.is_floating_point() else number.to(torch.get_default_dtype())
        name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
        return self.trainer.strategy.reduce(number, reduce_op=name)

    @property
    def sees_one_microbatch(self) -> bool:
        """Whether code runs that sees one micro-batch, on this worker alone."""
        return self.recorded_logs is not None or not self._may_log

    @contextmanager
    def logging_allowed(self, allowed: bool) -> Iterator[None]:
        """Whether ``self.log`` works within the block, where it is not recorded."""
        before = self._may_log
        object.__setattr__(self, "_may_log", allowed)  # nn.Module's own looks for parameters and buffers
        try:
            yield
        finally:
            object.__setattr__(self, "_may_log", before)

    @override
    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Leaves addresses alone; those of several loaders become one."""
        batch = as_one_step(batch)
        return batch if isinstance(batch, StepHandle) else super()._on_before_batch_transfer(batch, dataloader_idx)


def make_recorded(module: pl.LightningModule) -> RecordedModule:
    """Makes ``module`` itself a :class:`RecordedModule`, and returns it."""
    if not isinstance(module, RecordedModule):
        module.__class__ = disguised(type(module), RecordedModule)  # type: ignore[arg-type]
    assert isinstance(module, RecordedModule)
    return module


def restore_class(module: nn.Module) -> None:
    """Restores the class of ``module`` from before :func:`disguised`."""
    original = getattr(type(module), "_disguised_from", None)
    if original is not None:
        module.__class__ = original


@cache
def disguised(cls: type[Any], also: type[Any]) -> type[Any]:
    """A class that passes for ``cls``, with the methods of ``also`` before its own.

    Pickles and copies of its objects are of ``cls``.
    """
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    original = getattr(cls, "_disguised_from", cls)
    return type(cls.__name__, (also, cls), {**names, "_disguised_from": original, "__reduce_ex__": _reduce_undisguised})


def _reduce_undisguised(module: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickles and copies a module with its earlier class."""
    double = object.__new__(type(module)._disguised_from)
    double.__dict__.update(module.__dict__)
    _, (cls, *arguments), *state = double.__reduce_ex__(protocol)
    return (_new, (cls, *arguments), *state)


def _new(cls: type[Any], *arguments: Any) -> Any:
    return cls.__new__(cls, *arguments)


class StepRecorder(Protocol):
    """Records the effects of the user's code on one micro-batch."""

    def record(self, hook: Callable[..., Any], *args: Any, samples: int) -> bytes:
        """Calls ``hook(*args)`` without gradients; returns its recorded effects."""

    def recording(self) -> AbstractContextManager[Any]:
        """Records the block in the object that the context yields."""

    def dump(self, recording: Any, samples: int) -> bytes:
        """Recording of a block."""


CallArguments: TypeAlias = tuple[str, tuple[Any, ...], Mapping[str, Any]]
"""Path of the called module in the user's ("" for itself), and its arguments."""

_redirected: WeakKeyDictionary[nn.Module, tuple[str, Callable[[CallArguments], Any]]] = WeakKeyDictionary()


class _Redirected(nn.Module):
    pass


def redirect_forward(module: nn.Module, layers: Sequence[str], ask: Callable[[CallArguments], Any]) -> None:
    """From now on ``ask`` answers calls of ``module`` outside of steps.

    Also calls of its submodules that contain all of ``layers``.
    """
    for path, holder in list(_modules_around(module, layers)):
        if holder not in _redirected:
            made = disguised(type(holder), _Redirected)  # type: ignore[arg-type]
            if "forward" not in vars(made):
                made.forward = _redirecting_forward(made.forward)
            holder.__class__ = made
        _redirected[holder] = path, ask


def restore_forward(module: nn.Module) -> None:
    """Ends :func:`redirect_forward`."""
    for submodule in module.modules():
        if _redirected.pop(submodule, None) is not None and isinstance(
            submodule, _Redirected
        ):  # its class may be the user's again already
            submodule.__class__ = type(submodule).__bases__[1]  # which was disguised


def _modules_around(module: nn.Module, layers: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules with a ``forward`` that hold all of ``layers``, by path."""
    for path, submodule in module.named_modules():
        has_forward = type(submodule).forward not in (nn.Module.forward, pl.LightningModule.forward)
        if has_forward and all(layer.startswith(f"{path}." if path else "") for layer in layers):
            yield path, submodule


def _redirecting_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)  # with its signature, which models of transformers look at
    def asking(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path, ask = _redirected.get(self, ("", None))
        if ask is None or is_tracing():
            return forward(self, *args, **kwargs)
        if any(is_cache(leaf) or isinstance(leaf, _AbsentCache) for leaf in _leaves((args, kwargs))):
            raise UnsupportedFeatureError(
                f"{_label(self, path)} was called with a cache of keys and values, of which each stage has its layers'"
                " part only. Call it without one, with all tokens: use_cache=False in calls and in generate()."
            )
        return ask((path, args, kwargs))

    return asking


def _label(module: nn.Module, path: str) -> str:
    return f"self.{path}" if path else f"{type(module).__name__}"


# ---------------------------------------------------------------------- what the stages run


@dataclass(frozen=True)
class CallResult:
    """Result of a call, with its tensors on the CPU."""

    value: Any


class RecordedStep(nn.Module):
    """A step of ``module``; ``take`` gets the recording of each run."""

    def __init__(self, module: pl.LightningModule, recorder: StepRecorder, take: Callable[[Any], None]) -> None:
        super().__init__()
        self.module = module
        self._recorder, self._take = recorder, take

    @contextmanager
    def recorded(self) -> Iterator[Any]:
        """Records the block, a run of the step, in the object that the context yields."""
        with self._recorder.recording() as recording, step_randomness():
            yield recording
        self._take(recording)


class WholeStep(RecordedStep):
    """A call of the module, as the step of an evaluation."""

    name = "forward"

    @override
    def forward(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.name = f"{path}.forward" if path else "forward"
        called = self.module.get_submodule(path)
        with self.recorded() as recording:
            output = called.forward(*args, **kwargs)  # its hooks run where it was called
            recording.result = CallResult(_portable(output))
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
