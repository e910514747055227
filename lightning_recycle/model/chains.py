"""Chains of layers in an ordinary module: found, run by stage, checked while run.

A *chain* is a list of submodules that the module's steps call once each, in order, each with the previous one's result.
It is found by structure alone, or named by the user; a :class:`ChainTracer` checks it while steps run.

*Side values* are tensors, such as a loss, that a layer or its hook puts into attributes, lists or dicts of the layer
and the modules around the chain. A :class:`SideRecorder` looks there before and after each layer; new ones are sent
with the layer's output, and the last stage puts them into the same place; in training only those that autograd follows.
Tensors of more than :data:`LARGEST` bytes are not sent, only their places.

The user's step calls all layers, on a worker that has only some of them. Those of other stages are stubs
(:class:`RemoteLayer`), which return a :class:`RemoteTensor`. A :class:`ChainTracer` sees every call and so proves that
the module is a chain: each layer is called once, in order, with the previous layer's result, which nothing else uses in
between. Any other use is an error that names the layers. Without a tracer a stub is an absent layer, and says so.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_recycle.devices import CAPTURING
from lightning_recycle.errors import ConfigurationError, counted
from lightning_recycle.model.layers import AbsentLayer
from lightning_recycle.randomness import draw_for_layer
from lightning_recycle.torch_internals import (
    buffers_of,
    make_subclass,
    modules_of,
    parameters_of,
    tree_leaves,
    tree_map_only,
)

LayerPaths: TypeAlias = str | Sequence[str] | None
"""Paths of the chain's layers; None for a chain that is to be found.

That of an ``nn.Sequential`` or ``nn.ModuleList`` stands for its entries.
"""

_CLEARLY = 2  # the container that holds this many times what all others hold is the chain
_REMEDY = (
    "Name the layers that training_step() calls one after another, as in ReCycleStrategy(layers='model.layers') or"
    " layers=['encoder', 'decoder'] (an nn.Sequential or nn.ModuleList stands for its entries), or use"
    " pipeline_parallel_size=1"
)


@dataclass(frozen=True)
class Chain:
    """The layers of a module, in order, by path.

    ``whole``: for each layer but the first, whether it gets the previous one's whole result, as in an
    ``nn.Sequential``; otherwise the first item of a tuple.
    """

    paths: tuple[str, ...]
    whole: tuple[bool, ...]

    def holds(self, name: str) -> int | None:
        """The index of the layer to which the weight or submodule ``name`` belongs."""
        return next((i for i, path in enumerate(self.paths) if name == path or name.startswith(f"{path}.")), None)


def find_chain(module: nn.Module, num_stages: int, layers: LayerPaths = None) -> Chain:
    """The chain that the user names, or the only one that ``module`` can have.

    Raises ConfigurationError if there is none with at least ``num_stages`` layers, or if several may be meant.
    """
    kind = type(module).__name__
    layers = _largest_container(module, num_stages) if layers is None else layers
    paths = [path for name in ([layers] if isinstance(layers, str) else layers) for path in _entries(module, name)]
    if len(paths) < num_stages:
        raise ConfigurationError(
            f"layers={layers!r} names {counted(len(paths), 'layer')} of {kind}, fewer than"
            f" pipeline_parallel_size={num_stages} stages: {', '.join(paths) or 'none'}. {_REMEDY}."
        )
    modules = [module.get_submodule(path) for path in paths]
    for index, layer in enumerate(modules):
        for other in range(index):
            if layer is modules[other]:
                raise ConfigurationError(
                    f"{paths[other]} and {paths[index]} of {kind} are the same module; a chain calls each once, so that"
                    f" it can be on one stage. {_REMEDY}."
                )
            inner, outer = sorted((paths[index], paths[other]), key=len, reverse=True)
            if inner.startswith(f"{outer}."):
                raise ConfigurationError(
                    f"layers={layers!r} names {outer!r} of {kind}, and {inner!r} within it: name one of them."
                )
    return Chain(tuple(paths), tuple(_is_whole(module, one, next_) for one, next_ in pairwise(paths)))


def _entries(module: nn.Module, path: str) -> list[str]:
    kind = type(module).__name__
    try:
        named = module.get_submodule(path)
    except AttributeError as error:
        known = [name for name, _ in module.named_modules() if name.count(".") <= path.count(".") and name]
        raise ConfigurationError(
            f"layers={path!r}: {kind} has no submodule of that name ({error}). It has"
            f" {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}. Modules that are made in setup() or"
            " configure_model() do not exist yet when the model is cut: make them in __init__()."
        ) from None
    if not path or isinstance(named, nn.ModuleDict):
        raise ConfigurationError(
            f"layers={path!r} is {'the whole module' if not path else 'an nn.ModuleDict'}; name the layers in it, in"
            " the order in which training_step() calls them."
        )
    if not isinstance(named, (nn.Sequential, nn.ModuleList)):
        return [path]
    return [f"{path}.{name}" for name, _ in named.named_children()]


def _is_whole(module: nn.Module, one: str, other: str) -> bool:
    parents = {path.rpartition(".")[0] for path in (one, other)}
    return len(parents) == 1 and isinstance(module.get_submodule(parents.pop()), nn.Sequential)


# ---------------------------------------------------------------------- a chain without names


def _largest_container(module: nn.Module, num_stages: int) -> list[str]:
    """[path of the container with most parameters]; ConfigurationError if unclear."""
    kind = type(module).__name__
    sizes = {path: size for path, size in _containers(module, "", num_stages) if size}
    if not sizes:
        raise ConfigurationError(
            f"{kind} cannot be cut into pipeline_parallel_size={num_stages} stages: it has no nn.Sequential or"
            f" nn.ModuleList of at least {num_stages} layers (those without parameters count, too). {_REMEDY}. A"
            " PipelineModule can be cut anywhere."
        )
    largest = max(sizes, key=lambda path: sizes[path])
    others = [path for path in sizes if path != largest]
    if sizes[largest] < _CLEARLY * sum(sizes[path] for path in others):
        described = ", ".join(f"{path!r} ({size:,} parameters)" for path, size in sizes.items())
        raise ConfigurationError(
            f"{kind} can be cut into pipeline_parallel_size={num_stages} stages in several places: {described}."
            f" {_REMEDY}."
        )
    return [largest]


def _containers(module: nn.Module, path: str, num_stages: int) -> Iterator[tuple[str, int]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and len(list(child.children())) >= num_stages:
            yield inner, sum(1 if is_lazy(p) else p.numel() for p in child.parameters())
        else:
            yield from _containers(child, inner, num_stages)


LARGEST = 1 << 16
_MOST_ITEMS = 256  # a longer list or dict holds data
_OF_MODULES = frozenset(vars(nn.Module()))
_Place: TypeAlias = tuple[str, str, Any]
_recorder: SideRecorder | None = None


@dataclass(frozen=True)
class SideValue:
    """A tensor that a layer leaves in an attribute, on its way to later stages.

    Args:
        path: of the module with the attribute, in the user's module.
        name: of the attribute.
        key: of the item, where the attribute is a list or dict; None for the attribute itself.
        is_appended: whether the item is new in a list.
        fresh: the class of the list or dict, if the layer has made it.
        value: None if it is too large to be sent.
    """

    path: str
    name: str
    key: Any
    is_appended: bool
    fresh: type[Any] | None
    value: Tensor | None

    def __str__(self) -> str:
        attribute = f"{self.path}.{self.name}" if self.path else self.name
        return attribute if self.key is None else f"{attribute}[{self.key!r}]"


class SideRecorder:
    """Side values ``found`` by layer, for one micro-batch on a stage."""

    def __init__(self, around: Mapping[str, nn.Module]) -> None:
        self.found: dict[int, list[SideValue]] = {}
        self._around = around
        self._before: dict[_Place, Tensor] = {}
        self._containers: dict[int, tuple[Any, int]] = {}  # by id, with their lengths
        self._appended: list[tuple[Any, Tensor]] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Within the block layers report to this recorder; lists are restored after it."""
        global _recorder
        previous, _recorder = _recorder, self
        try:
            yield
        finally:
            _recorder = previous
            for items, tensor in self._appended:
                kept = [item for item in items if item is not tensor]
                items.clear()
                items.extend(kept)

    def begin(self, layer: nn.Module, path: str) -> None:
        self._before, self._containers = {}, {}
        for place, container, tensor in self._tensors(layer, path):
            if tensor is not None:
                self._before[place] = tensor
            if container is not None:
                self._containers[id(container)] = container, len(container)

    def end(self, layer: nn.Module, path: str, index: int) -> None:
        seen = set()
        for place, container, tensor in self._tensors(layer, path):
            if tensor is None or self._before.get(place) is tensor or (id(container), place[2]) in seen:
                continue
            # Where autograd does not follow, it cannot be told from others.
            if tensor.grad_fn is None and (torch.is_grad_enabled() or not tensor.is_floating_point()):
                continue
            if container is not None:  # which several modules may share
                seen.add((id(container), place[2]))
            _, length = self._containers.get(id(container), (None, 0))
            is_appended = isinstance(container, (list, deque)) and place[2] >= length
            fresh = type(container) if container is not None and id(container) not in self._containers else None
            if is_appended:
                self._appended.append((container, tensor))
            fits = tensor.numel() * tensor.element_size() <= LARGEST
            self.found.setdefault(index, []).append(SideValue(*place, is_appended, fresh, tensor if fits else None))
        self._before, self._containers = {}, {}

    def _tensors(self, layer: nn.Module, path: str) -> Iterator[tuple[_Place, Any, Tensor | None]]:
        """(place, list or dict there, tensor); None for an empty list or dict."""
        for where, module in chain(self._around.items(), layer.named_modules(prefix=path)):
            attributes = vars(module)
            for name in [name for name in attributes if name not in _OF_MODULES]:
                value = attributes[name]
                if isinstance(value, Tensor):
                    yield (where, name, None), None, value
                elif isinstance(value, (list, deque, dict)) and len(value) <= _MOST_ITEMS:
                    if not value:
                        yield (where, name, None), value, None
                    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                        if isinstance(item, Tensor):
                            yield (where, name, key), value, item


_CALL_REMEDY = (
    "A module of several stages calls each layer of its chain once, in order, with the result of the previous layer,"
    " and does nothing between them. Put operations in between into one of the layers, name other layers with"
    " ReCycleStrategy(layers=[...]), or use pipeline_parallel_size=1."
)
_NOTHING = object()
_tracer: ChainTracer | None = None


class ChainEnd(BaseException):
    """The step has come to the end of the chain on a worker that does not go on."""


@dataclass(frozen=True)
class Call:
    """A call of a layer by the step, with None for the previous layer's result."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def with_hidden(self, hidden: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.args:
            return (hidden, *self.args[1:]), dict(self.kwargs)
        return (), {**self.kwargs, next(iter(self.kwargs)): hidden}


@dataclass(frozen=True)
class ReturnShape:
    """Items that a layer returns beside the value that goes on.

    ``is_tuple``: the value that goes on is the first item of a tuple; ``rest``: whether each other item is None.
    """

    is_tuple: bool = False
    rest: tuple[bool, ...] = ()

    @classmethod
    def of(cls, output: Any, whole: bool) -> tuple[Any, ReturnShape]:
        """The part of ``output`` that goes on (``whole``: all of it), and the shape."""
        if whole or not isinstance(output, tuple) or not output:
            return output, cls()
        return output[0], cls(True, tuple(item is None for item in output[1:]))

    def around(self, value: Any, layer: str) -> Any:
        """Output of a layer without its other items."""
        if not self.is_tuple:
            return value
        what = f"more than the first item of what layer {layer!r} returned"
        return (value, *(None if is_none else RemoteTensor.of(what) for is_none in self.rest))


class RemoteTensor(Tensor):
    """Stands for a tensor of another stage: it can be passed on, and nothing else.

    ``what``: the tensor, in words. Of a parameter or buffer the dtype is known.
    """

    what: str
    is_parameter: bool

    @staticmethod
    def of(what: str, parameter: Tensor | None = None) -> RemoteTensor:
        like = torch.empty(0) if parameter is None else parameter
        made = make_subclass(RemoteTensor, like, require_grad=like.is_floating_point())
        made.what, made.is_parameter = what, parameter is not None
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [item for arg in (*args, *(kwargs or {}).values()) for item in _flat(arg)]
        used = next((item for item in flat if isinstance(item, RemoteTensor)), None)
        if used is None or _tracer is None or func in _HARMLESS or (used.is_parameter and func in _KNOWN):
            return super().__torch_function__(func, types, args, kwargs or {})
        if func is Tensor.detach:  # of what torch.utils.checkpoint saves; a layer must not get it
            return RemoteTensor.of(used.what)
        name = getattr(func, "__name__", func)
        raise _tracer.error(f"uses {used.what} ({name}), which is on another stage{_tracer.before_next}")


# What torch.utils.checkpoint asks of its arguments, and what is asked of any parameter.
_HARMLESS = {Tensor.device.__get__, Tensor.requires_grad.__get__}  # type: ignore[attr-defined]
_KNOWN = {
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.is_floating_point,
    Tensor.is_complex,
    CAPTURING,
}


class _PastLayers(torch.autograd.Function):
    """Result of other stages' layers from ``inputs``, with a derivative only there."""

    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, *inputs: Tensor) -> Tensor:
        ctx.count = len(inputs)
        return value.view_as(value)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if _tracer is not None:  # the step differentiates; the backward of the stage comes when the step is over
            raise _tracer.error(
                "takes a derivative by an input of the layers, as torch.autograd.grad(energy, positions) does: it goes"
                " through layers that are on another stage, so it does not exist here",
                "Use pipeline_parallel_size=1.",
            )
        return grad, *[None] * ctx.count


def _differentiates_inputs(value: Tensor) -> bool:
    """Whether autograd follows ``value`` back to a tensor that is not a parameter."""
    todo, seen = [get_gradient_edge(value).node], set()
    while todo:
        if (node := todo.pop()) in seen:
            continue
        seen.add(node)
        if not isinstance(getattr(node, "variable", None), (nn.Parameter, type(None))):
            return True
        todo += [following for following, _ in node.next_functions if following is not None]
    return False


def _flat(value: Any) -> list[Any]:
    return [item for part in value for item in _flat(part)] if isinstance(value, (tuple, list)) else [value]


@dataclass
class ChainTracer:
    """Calls of the chain so far.

    Args:
        step: the user's function in words, for errors.
        edge: the first layer of the next stage, or on the last stage the first of its own.
        received: on the last stage, the entering value, and the shape of the previous layer's return. Elsewhere the
            step ends where it calls the last layer.
        module: on the last stage, the user's module.
        side_values: on the last stage, earlier stages' values, by the index of the layer.
        remedy: for errors.

    Attributes:
        sent: the value that leaves the stage, and the shape of its last layer's return.
        calls: the step's call of each absent layer.
    """

    chain: Chain
    step: str
    edge: int = 0
    received: tuple[Any, ReturnShape] | None = None
    module: nn.Module | None = None
    side_values: Mapping[int, Sequence[SideValue]] = field(default_factory=dict)
    remedy: str = _CALL_REMEDY
    sent: tuple[Any, ReturnShape] | None = None
    calls: dict[int, Call] = field(default_factory=dict)
    _caches: dict[int, Any] = field(default_factory=dict)  # by id, as they were when the first layer was called
    _output: Any = _NOTHING
    _shape: ReturnShape = field(default_factory=ReturnShape)
    _next: int = 0
    _fresh: set[tuple[str, str]] = field(default_factory=set)  # lists and dicts that the newest layer has made
    _stand_ins: list[tuple[Any, RemoteTensor]] = field(default_factory=list)  # and the list or dict of each
    _inputs: list[Tensor] = field(default_factory=list)  # that layers of other stages got, if the user differentiates

    @contextmanager
    def on(self) -> Iterator[None]:
        """Within the block, calls of the chain's layers belong to this trace."""
        global _tracer
        previous, _tracer = _tracer, self
        try:
            yield
        finally:
            _tracer = previous
            for holder, stand_in in self._stand_ins:
                _remove(holder, stand_in)

    def enter(self, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The step calls the layer ``index``; returns the previous layer's result.

        Raises ConfigurationError if the chain does not go on like that.
        """
        paths = self.chain.paths
        if index < self._next:
            raise self.error(f"calls layer {paths[index]!r} a second time, after {paths[self._next - 1]!r}")
        if index > self._next:
            after = f"after {paths[self._next - 1]!r}" if self._next else "first"
            raise self.error(f"calls layer {paths[index]!r} {after}, without {paths[self._next]!r} before it")
        if not args and not kwargs:
            raise self.error(f"calls layer {paths[index]!r} without an argument")
        hidden = args[0] if args else next(iter(kwargs.values()))
        if index:
            expected, _ = ReturnShape.of(self._output, self.chain.whole[index - 1])
            if hidden is not expected:
                raise self.error(
                    f"does something with what layer {paths[index - 1]!r} returned before layer {paths[index]!r} gets"
                    " it, or gives that something else, as with a residual connection or a change of shape"
                )
        elif self.received is None:
            self._caches = {id(v): copy.deepcopy(v) for v in (*args, *kwargs.values()) if is_cache(v)}
        return hidden

    def leave(self, index: int, output: Any) -> None:
        self._output, self._next = output, index + 1
        if index + 1 < len(self.chain.paths):
            _, self._shape = ReturnShape.of(output, self.chain.whole[index])

    def pass_by(self, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The step calls the layer ``index`` of another stage; returns its stand-in.

        Raises ChainEnd if the step ends here.
        """
        hidden = self.enter(index, args, kwargs)
        keywords = {name: self._caches.get(id(value), value) for name, value in kwargs.items()}
        if args:
            self.calls[index] = Call((None, *(self._caches.get(id(value), value) for value in args[1:])), keywords)
        else:
            self.calls[index] = Call((), {**keywords, next(iter(keywords)): None})
        path = self.chain.paths[index]
        value, shape = RemoteTensor.of(f"what layer {path!r} returned"), self._shape
        if self.received is not None:
            entering, shape = self.received
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
            self._inputs += [t for t in tensors if not isinstance(t, RemoteTensor) and _differentiates_inputs(t)]
            value = self._past_layers(entering) if index == self.edge - 1 else value
            self._fresh.clear()
            for side_value in self.side_values.get(index, ()):
                self._deliver(side_value)
        else:
            if index == self.edge:
                self.sent = hidden, self._shape
            if index == len(self.chain.paths) - 1:
                raise ChainEnd
        output = shape.around(value, path)
        self.leave(index, output)
        return output

    def _past_layers(self, value: Any) -> Any:
        """``value`` of another stage, not differentiable by the layers' inputs."""
        if not self._inputs:
            return value
        return tree_map_only(
            Tensor, lambda t: _PastLayers.apply(t, *self._inputs) if t.is_floating_point() else t, value
        )

    def _deliver(self, side: SideValue) -> None:
        """Puts a side value of another stage where the layer has put it there."""
        assert self.module is not None
        attributes = vars(self.module.get_submodule(side.path))
        place = (side.path, side.name)
        if side.fresh is not None and (place not in self._fresh or type(attributes.get(side.name)) is not side.fresh):
            attributes[side.name] = side.fresh()
            self._fresh.add(place)
        holder: Any = attributes if side.key is None else attributes[side.name]
        key = side.name if side.key is None else side.key
        value: Tensor | RemoteTensor | None = self._past_layers(side.value)
        if value is None:
            value = RemoteTensor.of(f"{side}, of more than {LARGEST:,} bytes")
            self._stand_ins.append((holder, value))
        if side.is_appended:
            holder.append(value)
        else:
            holder[key] = value

    def finish(self, output: Any = None) -> None:
        """The step is over, and returned ``output``.

        Raises ConfigurationError if it has not called all layers, or returns a value of another stage.
        """
        if self._next < len(self.chain.paths):
            raise self.error(f"never calls layer {self.chain.paths[self._next]!r}")
        for leaf in tree_leaves(output):
            if isinstance(leaf, RemoteTensor):
                raise self.error(f"returns {leaf.what}, which is on another stage")

    @property
    def before_next(self) -> str:
        left = self.chain.paths[self._next :]
        return f", before it calls layer {left[0]!r}" if left else ""

    def error(self, what: str, remedy: str = "") -> ConfigurationError:
        return ConfigurationError(f"{self.step} {what}. {remedy or self.remedy}")


@contextmanager
def seeing_one_stage(layers: Iterable[nn.Module], function: str, remedy: str, template: Tensor) -> Iterator[None]:
    """Within the block absent ``layers`` show stand-ins for their parameters.

    These have the dtype and device of ``template``; their use, and missing attributes, raise an error of ``function``.
    """
    tracer = ChainTracer(Chain((), ()), function, remedy=remedy)
    for layer in layers:
        if isinstance(layer, AbsentLayer) and not isinstance(parameters_of(layer), _Elsewhere):  # since an earlier call
            name = f"a parameter of {layer.name}"
            layer.__dict__["_parameters"] = _Elsewhere({name: template.new_empty(0)})
    AbsentLayer.refusal = tracer.error
    try:
        with tracer.on():
            yield
    finally:
        AbsentLayer.refusal = None


def is_tracing() -> bool:
    """Whether a step is running, so that calls of the chain's layers are part of it."""
    return _tracer is not None and bool(_tracer.chain.paths)


def is_cache(value: Any) -> bool:
    """Whether ``value`` is a cache of transformers, filled by each layer.

    The layers of other stages get it as before the first one; its new content does not leave a worker.
    """
    bases = type(value).__mro__
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers.") for base in bases)


def watch(layer: nn.Module, path: str, index: int, last: bool) -> tuple[RemovableHandle, RemovableHandle]:
    """Lets tracers and recorders see the calls of ``layer``, until its handles end.

    Its randomness is that of its place: the step before the chain has the index 0, the layers 1, 2, ..., and the rest
    the next.
    """

    # Functions and not methods: they stay what they are when a callback copies the module.
    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _tracer is not None:
            _tracer.enter(index, args, kwargs)
        if _recorder is not None:
            _recorder.begin(layer, path)
            last_hooks: Any = handles[1].hooks_dict_ref()
            last_hooks.move_to_end(handles[1].id)  # behind hooks that came later, whose side values count
        draw_for_layer(index + 1)

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if _tracer is not None:
            _tracer.leave(index, output)
        if _recorder is not None:
            _recorder.end(layer, path, index)
        if last:
            draw_for_layer(index + 2)

    handles = (
        layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        layer.register_forward_hook(after),
    )
    return handles


# ---------------------------------------------------------------------- what is not here


class _Elsewhere(dict[str, Any]):
    """Parameters, buffers or children of an absent module: shown only within a step.

    A loop over all parameters meets an error there, instead of computing with a part of them; a search for modules of a
    kind finds their side values.
    """

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__()
        self.entries = entries

    @override
    def items(self) -> Any:
        if _tracer is None:
            return super().items()
        shown = {n: RemoteTensor.of(n, e) if isinstance(e, Tensor) else e for n, e in self.entries.items()}
        return shown.items()

    @override
    def values(self) -> Any:
        return dict(self.items()).values()


class AbsentPart(AbsentLayer):
    """Stands for a submodule whose parameters other stages hold.

    It has that module's attributes except parameters, buffers and modules.
    """

    def __init__(self, path: str, original: nn.Module) -> None:
        super().__init__()
        self.path = path
        self._stands_for = type(original)
        self.train(original.training)
        bare = vars(nn.Module())
        self._plain = {name: value for name, value in vars(original).items() if name not in bare}
        self._missing = frozenset(
            {*parameters_of(original), *buffers_of(original), *dir(type(original))} - {*dir(nn.Module)}
        )
        self.__dict__["_parameters"] = _Elsewhere(_emptied(path, parameters_of(original)))
        self.__dict__["_buffers"] = _Elsewhere(_emptied(path, buffers_of(original)))
        self.__dict__["_modules"] = _Elsewhere(
            {
                name: None if child is None else AbsentPart(f"{path}.{name}", child)
                for name, child in modules_of(original).items()
            }
        )

    @override
    def _apply(self, fn: Any, recurse: bool = True) -> AbsentPart:
        for table in (self._parameters, self._buffers, self._modules):
            assert isinstance(table, _Elsewhere)
            for name, entry in table.entries.items():
                if isinstance(entry, AbsentPart):
                    entry._apply(fn)
                elif entry is not None:
                    table.entries[name] = fn(entry)
        return self

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """In a step it is of its module's class, as far as ``isinstance`` sees."""
        return type(self) if _tracer is None else self.__dict__.get("_stands_for", type(self))

    @override
    def __getattr__(self, name: str) -> Any:
        attributes = self.__dict__
        if name in attributes.get("_plain", ()):
            return attributes["_plain"][name]
        children = attributes.get("_modules")
        if isinstance(children, _Elsewhere) and name in children.entries:
            if _tracer is not None:
                return children.entries[name]
        elif name not in attributes.get("_missing", ()):
            return super().__getattr__(name)
        if _tracer is not None:  # no AttributeError, which hasattr() would take for an answer
            raise _tracer.error(f"uses {self.path}.{name}, which is on another stage")
        raise AttributeError(f"{self.path}.{name} is on another stage; this worker has no part of {self.path!r}.")

    @override
    def forward(self, *_: Any, **__: Any) -> Any:
        if _tracer is not None:
            raise _tracer.error(f"calls {self.path!r} where only the layers of the chain run")
        raise RuntimeError(self._why_not())

    def _why_not(self) -> str:
        return (
            f"{self.path!r} was called outside of a training or evaluation step, in a worker that has one stage of the"
            " model. Call the whole model, self(x), or a submodule with all layers of the chain in it, which all stages"
            " evaluate together; or use pipeline_parallel_size=1."
        )

    @override
    def extra_repr(self) -> str:
        return f"{self.path}, on another stage"


def _emptied(path: str, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Tensors without elements; released ones on the CPU."""
    return {
        f"{path}.{name}": torch.empty(0, dtype=t.dtype, device="cpu" if t.is_meta else t.device)
        for name, t in tensors.items()
        if t is not None
    }


def _remove(holder: Any, value: Any) -> None:
    for key, item in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        if item is value:
            del holder[key]
            return


class RemoteLayer(AbsentPart):
    """A layer of the chain on another stage."""

    def __init__(self, path: str, original: nn.Module, index: int) -> None:
        super().__init__(path, original)
        self.index = index

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if _tracer is None:
            raise RuntimeError(self._why_not())
        return _tracer.pass_by(self.index, args, kwargs)
