"""Modules drawn at random, whose steps keep values in many ways, and what one process makes of them.

:class:`OneProcess` trains the same module on one device without anything of this project's: its training step runs the
micro-batches of all pipelines one after the other, each from what the *slot* kept.
"""

import copy
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

PIPELINES, PIPELINE_BATCH, BATCHES, EPOCHS, WIDTH = 2, 8, 4, 2, 6
STEPS = BATCHES * EPOCHS


# ---------------------------------------------------------------------- kinds of values


class Box:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.held = {"n": 0.0}


@dataclass(frozen=True)
class Kind:
    """A kind of value: how it begins, how a number is added to it, and what the loss reads."""

    begin: Callable[[], Any]
    add: Callable[[Any, float], Any]
    """Returns the value to assign; None if the value was changed in place."""
    read: Callable[[Any], float]


def _in_place(change: Callable[[Any, float], Any]) -> Callable[[Any, float], Any]:
    def add(value: Any, number: float) -> None:
        change(value, number)

    return add


def _put(value: Any, key: Any, number: float) -> None:
    value[key] += number


def _zeros() -> Tensor:
    return torch.zeros(2, dtype=torch.float64)


def _total(value: Any) -> float:
    return float(value.sum())


KINDS: dict[str, Kind] = {
    "number": Kind(lambda: 0, lambda v, n: v + n, float),
    # What a hook sets, 3, is none of the texts of steps: an equal one would be no change that a worker could see.
    "text": Kind(str, lambda v, n: v + ("xyx" if n > 1 else "xx" if n > 0.5 else "y"), lambda v: float(v.count("x"))),
    "pair": Kind(lambda: (0.0, 0), lambda v, n: (v[0] + n, v[1] + 1), lambda v: v[0]),
    "tensor": Kind(_zeros, lambda v, n: v + n, _total),
    "tensor in place": Kind(_zeros, _in_place(lambda v, n: v.add_(n)), _total),
    "buffer": Kind(_zeros, _in_place(lambda v, n: v.add_(n)), _total),
    "array": Kind(lambda: np.zeros(2), _in_place(lambda v, n: np.add(v, n, out=v)), _total),
    "entry": Kind(lambda: {"n": 0.0}, _in_place(lambda v, n: _put(v, "n", n)), lambda v: v["n"]),
    "nested": Kind(
        lambda: {"a": [{"n": 0.0}]}, _in_place(lambda v, n: _put(v["a"][0], "n", n)), lambda v: v["a"][0]["n"]
    ),
    "counter": Kind(Counter, _in_place(lambda v, n: v.update({"n": n})), lambda v: float(v["n"])),
    "appended": Kind(list, _in_place(lambda v, n: v.append(n)), sum),
    "window": Kind(lambda: deque([0.0], 2), _in_place(lambda v, n: v.append(v[-1] + n)), lambda v: float(sum(v))),
    "item": Kind(lambda: [0.0], _in_place(lambda v, n: _put(v, 0, n)), lambda v: v[0]),
    "set": Kind(set, _in_place(lambda v, n: v.add((len(v), n))), lambda v: sum(n for _, n in v)),
    "object": Kind(Box, _in_place(lambda v, n: _put(v.held, "n", n)), lambda v: v.held["n"]),
}


@dataclass(frozen=True)
class Place:
    """A value that a step changes from batch ``begins`` on.

    In the forward of ``layer``, or in the step; ``alike`` by all micro-batches, or by their samples; ``hook`` sets it
    anew, once.
    """

    kind: str
    layer: int | None
    alike: bool
    begins: int
    hook: str


@dataclass(frozen=True)
class Recipe:
    """What is trained, and on which grid.

    Args:
        zeroing: how ``optimizer_zero_grad`` is overridden; not at all if empty.
        gradients: what ``on_before_optimizer_step`` does with gradients, or ``on_before_zero_grad``.
        parameters: what becomes of parameters during the training.
        changes: the hook in which it does.
        accumulate: the number of batches whose gradients one step takes.
        dies: the pipeline and stage of a worker, and the step at which it is killed; None: no worker dies.
        replaced: whether another process takes its place.
    """

    places: tuple[Place, ...] = ()
    zeroing: str = ""
    gradients: str = ""
    parameters: str = ""
    changes: str = "on_train_epoch_start"
    norm: str = ""
    optimizer: str = "SGD"
    clip: float | None = None
    accumulate: int = 1
    stages: int = 1
    microbatches: int = 1
    dies: tuple[int, int, int] | None = None
    replaced: bool = False


_HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step", "on_train_epoch_start")
_CHANGING = ("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end")
_OF_ONE_LAYER = (
    "added", "extended", "exchanged", "layer exchanged", "taken away", "taken away without state", "left to itself",
)  # fmt: skip


@st.composite
def recipes(draw: Any) -> Recipe:
    """Recipes in which anything may meet anything."""
    stages = draw(st.sampled_from([1, 1, 2]))
    place = st.builds(
        Place, kind=st.sampled_from(sorted(KINDS)), layer=st.sampled_from([None, 0, 1, 2]), alike=st.booleans(),
        begins=st.sampled_from([0, 0, 2, 5]), hook=st.sampled_from(["", "", *_HOOKS]),
    )  # fmt: skip
    # What comes and goes outside of the layers is, with several stages, in none of them.
    parameters = ["", "", "frozen", "thawed", "unused", "zero at first"]
    if stages == 1:
        parameters += [*_OF_ONE_LAYER, "frozen and dropped", "only in the optimizer"]
    return Recipe(
        places=tuple(draw(st.lists(place, min_size=1, max_size=3))),
        zeroing=draw(st.sampled_from(["", "", "", "kept", "faded", "zeros", "every other", "replaced", "nothing"])),
        gradients=draw(st.sampled_from(["", "", "scaled", "exchanged", "ones before zeroing"])),
        parameters=draw(st.sampled_from(parameters)),
        changes=draw(st.sampled_from(_CHANGING)),
        norm=draw(st.sampled_from(["", "", "batch", "spectral", "weight"])),
        optimizer=draw(st.sampled_from(["SGD", "AdamW", "NAdam"])),
        clip=draw(st.sampled_from([None, None, 0.05])),
        accumulate=draw(st.sampled_from([1, 1, 2])),
        stages=stages,
        microbatches=draw(st.sampled_from([1, 2, 4])),
        dies=draw(
            st.none() | st.tuples(st.integers(0, PIPELINES - 1), st.integers(0, stages - 1), st.integers(0, STEPS - 3))
        ),
        replaced=draw(st.booleans()),
    )


# ---------------------------------------------------------------------- the module


class Places(nn.Module):
    """Mixin of a module some of whose values forwards or steps change."""

    def hold(self, places: Mapping[str, Place]) -> None:
        self.places, self.is_on = dict(places), 0
        self.set_by_hooks: list[str] = []
        for name, place in places.items():
            value = KINDS[place.kind].begin()
            self.register_buffer(name, value) if place.kind == "buffer" else setattr(self, name, value)

    def scale(self) -> float:
        """What the values make of an output: a factor near 1."""
        return 1 + 0.1 * math.tanh(sum(KINDS[p.kind].read(getattr(self, n)) for n, p in self.places.items()) / 4)

    def change(self, samples: Tensor) -> None:
        for name, place in self.places.items():
            if self.is_on >= place.begins:
                number = 1.0 if place.alike else float(samples.detach().mean().sigmoid())
                value = KINDS[place.kind].add(getattr(self, name), number)
                if value is not None:
                    setattr(self, name, value)

    def set_anew(self, hook: str, number: float) -> None:
        for name, place in self.places.items():
            if place.hook == hook:
                kind, fresh = KINDS[place.kind], KINDS[place.kind].begin()
                value = kind.add(fresh, number)
                setattr(self, name, fresh if value is None else value)
                self.set_by_hooks.append(name)


class Noting(Places):
    """A linear layer that keeps values."""

    def __init__(self, inputs: int, outputs: int, norm: str = "") -> None:
        super().__init__()
        linear = nn.Linear(inputs, outputs).double()
        wrap = {"spectral": parametrizations.spectral_norm, "weight": parametrizations.weight_norm}.get(norm)
        self.linear = linear if wrap is None else wrap(linear)
        self.after = nn.BatchNorm1d(outputs).double() if norm == "batch" else nn.Identity()
        if norm == "batch":  # from zero rounding alone would move it: of two samples it makes 1 and -1
            nn.init.uniform_(self.after.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.change(x)
        return self.after(self.linear(x)) * self.scale()


class DrawnModule(Places, L.LightningModule):
    def __init__(self, recipe: Recipe) -> None:
        L.LightningModule.__init__(self)
        torch.manual_seed(3)
        self.recipe = recipe
        layers = [Noting(WIDTH, 8, recipe.norm), Noting(8, 8, recipe.norm), Noting(8, 2)]
        self.net = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
        self.more = nn.ModuleList([nn.Linear(2, 2).double() for _ in range(2)])
        self.free = [torch.zeros(2, dtype=torch.float64, requires_grad=True)]
        named = {f"kept_{index}": place for index, place in enumerate(recipe.places)}
        for number, layer in enumerate([None, *layers]):
            owner: Places = self if layer is None else layer
            owner.hold({n: p for n, p in named.items() if p.layer == (None if layer is None else number - 1)})

    # ------------------------------------------------------------------ a step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out, kind = self.net(x), self.recipe.parameters
        self.change(x)
        if kind == "unused" and batch_idx % 2:
            out = out + self.more[0](out)
        elif kind in _OF_ONE_LAYER:
            out = out + self.more[-1](out)
        elif kind == "only in the optimizer":
            out = out + self.free[0]
        loss = F.cross_entropy(out, y) * self.scale()
        if kind == "zero at first":
            loss = loss - (0.0 if self.is_on < 3 else 0.1) * self.more[1](out).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        own = [*self.parameters(), *(self.free if self.recipe.parameters == "only in the optimizer" else ())]
        # A bias before a BatchNorm has gradients of rounding, of which Adam would make steps of any size.
        options = {"momentum": 0.9} if self.recipe.optimizer == "SGD" else {"weight_decay": 0.1, "eps": 1e-4}
        return getattr(torch.optim, self.recipe.optimizer)(own, lr=0.03, **options)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        how = self.recipe.zeroing
        if how in ("", "zeros") or (how == "kept" and batch_idx % 4 == 0):
            optimizer.zero_grad(set_to_none=how != "zeros")
        for name, parameter in self.named_parameters():
            if how == "every other" and name.endswith(("weight", "bias")[batch_idx // 2 % 2]):
                parameter.grad = None
            elif how == "faded" and parameter.grad is not None:
                parameter.grad.mul_(0.5)
            elif how == "replaced" and parameter.grad is not None:
                parameter.grad = 0.1 * torch.sign(parameter.detach())

    # ------------------------------------------------------------------ hooks

    def _all(self) -> Iterator[Places]:
        yield from (module for module in self.modules() if isinstance(module, Places))

    def _change_parameters(self, hook: str) -> None:
        if hook != self.recipe.changes:
            return
        kind, optimizer = self.recipe.parameters, self.optimizers().optimizer
        group = optimizer.param_groups[0]
        if kind in ("frozen", "frozen and dropped", "thawed"):
            self.net[2].requires_grad_(kind == "thawed")
        if kind == "frozen and dropped":
            for parameter in self.net[2].parameters():
                parameter.grad = None
        if kind not in _OF_ONE_LAYER:
            return
        torch.manual_seed(5)
        new, old = nn.Linear(2, 2).double().to(self.device), self.more[-1]
        if kind == "exchanged":
            group["params"] = [new.weight if parameter is old.weight else parameter for parameter in group["params"]]
            old.weight = new.weight
        elif kind in ("added", "extended"):
            self.more.append(new)
        else:
            gone = set(map(id, old.parameters()))
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in gone]
            for parameter in old.parameters() if kind != "taken away without state" else ():
                optimizer.state.pop(parameter, None)
            if kind != "left to itself":
                self.more[-1] = new if kind == "layer exchanged" else nn.Identity()
        if kind == "added":
            optimizer.add_param_group({"params": new.parameters(), "lr": 0.1})
        elif kind in ("extended", "layer exchanged"):
            group["params"] += list(new.parameters())

    def on_train_start(self) -> None:
        if self.recipe.parameters == "thawed":
            self.net[2].requires_grad_(False)
        self._change_parameters("on_train_start")

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self._change_parameters("on_train_epoch_start")
            self._set_anew("on_train_epoch_start")

    def _set_anew(self, hook: str) -> None:
        for owner in self._all():
            owner.set_anew(hook, 3.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batches = self.current_epoch * BATCHES + batch_idx
        for owner in self._all():
            owner.is_on = batches
        if batches == 3:
            self._set_anew("on_train_batch_start")
        if batches == BATCHES:
            self._change_parameters("on_train_batch_start")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self._set_anew("on_train_batch_end")
        if self.is_on == BATCHES - 1:
            self._change_parameters("on_train_batch_end")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for parameter in self.parameters() if self.recipe.gradients == "ones before zeroing" else ():
            parameter.grad = torch.ones_like(parameter)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.is_on in (3, 5):
            self._set_anew("on_before_optimizer_step")
        for parameter in self.parameters() if self.recipe.gradients else ():
            if parameter.grad is not None and self.recipe.gradients == "scaled":
                parameter.grad.mul_(0.9)
            elif parameter.grad is not None and self.recipe.gradients == "exchanged":
                parameter.grad = parameter.grad * 0.9


def loader(workers: int) -> DataLoader[Any]:
    """The data, for ``workers`` pipelines."""
    generator = torch.Generator().manual_seed(0)
    samples = PIPELINES * PIPELINE_BATCH * BATCHES
    x = torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=PIPELINES * PIPELINE_BATCH // workers)


# ---------------------------------------------------------------------- what one process makes of it

_STATISTICS = ("running_mean", "running_var")


class OneProcess(DrawnModule):
    """Trains on one device: each step runs the micro-batches of all pipelines, in the order of their slots."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.by_slot: dict[str, list[Any]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        slots = PIPELINES * self.recipe.microbatches
        begin = self._values()
        for path, owner in self.named_modules():
            if isinstance(owner, Places):
                for name in owner.set_by_hooks:  # what a hook has set holds for all slots
                    self.by_slot.pop(f"{path}.{name}" if path else name, None)
                owner.set_by_hooks.clear()
        losses, ends = [], []
        for slot in range(slots):
            self._set({n: self.by_slot[n][slot] if n in self.by_slot else value for n, value in begin.items()})
            losses.append(super().training_step((x[slot::slots], y[slot::slots]), batch_idx))
            ends.append(self._values())
        for name in begin:
            left = [end[name] for end in ends]
            if name.rpartition(".")[2] in _STATISTICS:
                mean = torch.stack(left).mean(0)
                self._set({name: mean})
            elif isinstance(begin[name], list) and all(
                len(value) > len(begin[name]) and value[:-1] == begin[name] for value in left
            ):
                self._set({name: begin[name] + [value[-1] for value in left]})
            elif name not in self.by_slot and all(as_numbers(left[0]) == as_numbers(value) for value in left):
                self._set({name: left[0]})
            else:
                self.by_slot[name] = left
                self._set({name: left[-1]})
        return torch.stack(losses).mean()

    def _values(self) -> dict[str, Any]:
        return kept_values(self)

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            path, _, attribute = name.rpartition(".")
            owner = self.get_submodule(path)
            own = copy.deepcopy(value)
            if attribute in owner._buffers:
                owner._buffers[attribute] = own
            else:
                setattr(owner, attribute, own)


def kept_values(module: DrawnModule) -> dict[str, Any]:
    """Copies of the values that steps keep, and of all buffers, by name."""
    found = {
        f"{path}.{name}" if path else name: getattr(owner, name)
        for path, owner in module.named_modules()
        if isinstance(owner, Places)
        for name in owner.places
    }
    return copy.deepcopy({**found, **dict(module.named_buffers())})


def as_numbers(value: Any) -> Any:
    """Something that compares as the value does."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Box):
        return value.held
    return list(value) if isinstance(value, deque) else value
