"""Gradients of a stage: flat buffers, buckets, sums over several batches.

``parameter.grad`` is a view into a buffer: backward accumulates in place and nothing is copied. A bucket is a part of
a buffer, with whole gradients: those of the last layers are the first bucket, since a backward completes them first.
What several stages hold is in buckets of its own, which are laid out alike in all of them.

There are two sets of buffers, used by even and odd steps: the reduced gradient of a step is kept until the step after
the next begins, so a peer that lost its part of an all-reduce can adopt it. That is so with a single stage, too: its
workers do not wait for each other between REDUCE and the next step, so the first backward of step t+1 may write to the
buffers of a worker while a peer still lacks the sum of step t, and then loses the worker that was to pass it on.

Which parameters require a gradient may change between two steps. Each set is laid out for the step that begins in it,
so the older one is still what peers expect.

A parameter that no micro-batch used has no gradient (None), as on one device, so an optimizer leaves it alone. An empty
buffer holds negative zeros, to which nothing but negative zeros add up to a negative zero: what still holds only those
after the sum over all workers was never written, or is zero wherever it was.

Of a parameter that is a DTensor the buffers hold the gradient of this process's shard, which may be empty, and
``parameter.grad`` is a DTensor over it.

With gradient accumulation Lightning counts batches, and so does the schedule: each batch is a step of it, with a
recovery of its own, and its reduced gradient is added to :class:`AccumulatedGradients`, on every worker of the stage
alike. So a failure costs one batch, however many are accumulated; what earlier batches have added is held by all peers.
The buffers of a step stay as REDUCE left them, since a peer may have to adopt them.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lightning_recycle.errors import UnsupportedFeatureError
from lightning_recycle.tensor_memory import local_part, sharded_like
from lightning_recycle.torch_internals import foreach_add_, foreach_norm, version_of

__all__ = ["AccumulatedGradients", "Bucket", "GradientBuffers", "Share"]

log = logging.getLogger(__name__)

_ALIGNMENT = 16  # elements; keeps every view as aligned as a separate tensor


@dataclass(frozen=True, eq=False)
class Bucket:
    """The gradients of some parameters: a part of a flat buffer, and a ``grad`` for each, a view into it.

    ``stages``: those that hold the parameters, if not this one alone. The sum is over all of their workers.
    """

    buffer: Tensor
    parameters: tuple[nn.Parameter, ...]
    grads: tuple[Tensor, ...]
    stages: tuple[int, ...] = ()

    @property
    def is_in_place(self) -> bool:
        """Whether the gradients of the parameters are still those."""
        return all(p.grad is grad for p, grad in zip(self.parameters, self.grads, strict=True))


class _Set:
    """Gradients of ``parameters`` in one flat buffer per dtype, and per set of stages that hold them. A bucket has up
    to ``bucket_bytes``, or one of them.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        bucket_bytes: float,
        holders: Mapping[nn.Parameter, tuple[int, ...]],
    ) -> None:
        self.holds = tuple(map(id, parameters))
        held = set(self.holds)
        ordered = [p for p in parameters if p not in holders] + [p for p in holders if id(p) in held]
        kinds = dict.fromkeys((holders.get(p, ()), p.dtype) for p in ordered)
        self.parameters: list[nn.Parameter] = []
        self.buffers: list[Tensor] = []
        self.views: list[Tensor] = []
        self.grads: list[Tensor] = []  # the views, of sharded parameters as DTensors
        self.firsts: list[Tensor] = []  # per buffer, where each view begins
        buckets: list[Bucket] = []
        for stages, dtype in kinds:
            mine = [p for p in ordered if p.dtype == dtype and holders.get(p, ()) == stages]
            parts = [local_part(p) for p in mine]
            sizes = [-(-part.numel() // _ALIGNMENT) * _ALIGNMENT for part in parts]
            buffer = torch.empty(sum(sizes), dtype=dtype, device=device)  # filled when a step begins in it
            self.parameters += mine
            self.buffers.append(buffer)
            offsets = [0, *itertools.accumulate(sizes)]
            views = [buffer[at : at + part.numel()].view(part.shape) for part, at in zip(parts, offsets, strict=False)]
            begins = [at for at, part in zip(offsets, parts, strict=False) if part.numel()]
            self.firsts.append(torch.tensor(begins, dtype=torch.int64, device=device))
            grads = [sharded_like(p, view) for p, view in zip(mine, views, strict=True)]
            self.views += views
            self.grads += grads
            for first, end in _ranges([size * buffer.element_size() for size in sizes], bucket_bytes):
                part = buffer[offsets[first] : offsets[end]]
                buckets.append(Bucket(part, tuple(mine[first:end]), tuple(grads[first:end]), stages))
        # Each is complete once its first parameter is, which a backward reaches last.
        place = {id(parameter): number for number, parameter in enumerate(ordered)}
        self.buckets = sorted(buckets, key=lambda bucket: (bucket.stages, -place[id(bucket.parameters[0])]))


def _ranges(sizes: Sequence[int], most: float) -> Iterator[tuple[int, int]]:
    """Cuts the list of ``sizes`` from its end, into ranges (first, end) that add up to ``most`` or have one item."""
    end, total = len(sizes), 0
    for index in range(len(sizes) - 1, -1, -1):
        if total and total + sizes[index] > most:
            yield index + 1, end
            end, total = index + 1, 0
        total += sizes[index]
    if end:
        yield 0, end


class GradientBuffers:
    """Flat gradients of those of ``parameters`` that require one when a step begins, in buckets of ``bucket_bytes``.

    After a failure others may want the reduced gradient of a step that this worker has applied. So where hooks or the
    optimizer change gradients in place, they get copies.

    Args:
        parameters: whose.
        device: where they are.
        bucket_bytes: the size of a bucket.
        lends_copies: whether gradients may be changed in place. If a change is seen, copies are lent from then on.
        holders: for each parameter that other stages hold as well, all stages that do; in the same order in all of
            them.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        bucket_bytes: float = math.inf,
        lends_copies: bool = False,
        holders: Mapping[nn.Parameter, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        self._all, self._device, self._bucket_bytes, self._holders = list(parameters), device, bucket_bytes, holders
        self._sets = [self._empty(self._trained()) for _ in range(2)]
        self._attached = self._sets[0]
        self._lends_copies = lends_copies
        self._lent: _Set | None = None
        self._versions: list[int] = []  # of the buffers that are lent themselves

    def _empty(self, parameters: Sequence[nn.Parameter]) -> _Set:
        return _Set(parameters, self._device, self._bucket_bytes, self._holders)

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._all if p.requires_grad]

    def of_step(self, step: int) -> list[Tensor]:
        """The flat buffers of ``step``; none if nothing is trained."""
        return self._sets[step % 2].buffers

    def buckets(self, step: int) -> list[Bucket]:
        """The buckets of ``step``; none if nothing is trained. Those of this stage alone come first, in the order in
        which a backward completes them.
        """
        return self._sets[step % 2].buckets

    def renew(self, step: int) -> None:
        """Takes other memory for the gradients of ``step``, since a sum may still write to what they have."""
        old = self._sets[step % 2]
        new = self._sets[step % 2] = self._like(old, None)
        if self._attached is old:
            self._attached = new

    def tensors(self) -> list[Tensor]:
        """All buffers."""
        lent = [] if self._lent is None else [self._lent]
        return [buffer for each in (*self._sets, *lent) for buffer in each.buffers]

    def begin(self, step: int) -> None:
        """Empties the buffers of ``step`` and makes each ``parameter.grad`` a view into them."""
        trained = self._trained()
        if self._sets[step % 2].holds != tuple(map(id, trained)):
            self._sets[step % 2] = self._empty(trained)
        for buffer in self.of_step(step):
            buffer.fill_(complex(-0.0, -0.0) if buffer.is_complex() else -0.0)
        self.attach(step)

    def attach(self, step: int) -> None:
        """Makes each ``parameter.grad`` a view into the buffers of ``step``; what they do not hold has no gradient."""
        self._attach(self._sets[step % 2])

    def _attach(self, chosen: _Set) -> None:
        if chosen.holds != self._attached.holds:
            for parameter in self._attached.parameters:
                parameter.grad = None
        self._attached = chosen
        for parameter, grad in zip(chosen.parameters, chosen.grads, strict=True):
            parameter.grad = grad

    def hand_over(self, step: int, again: bool = False) -> None:
        """Makes each ``parameter.grad`` what it is on one device after a backward of the whole batch of ``step``.

        Args:
            step: its number.
            again: whether it was handed over before; what has been changed of it since stays so.
        """
        chosen = self._sets[step % 2]
        if self._lends_copies:
            known, self._lent = self._lent, self._like(chosen, self._lent)
            if not again or self._lent is not known:
                for buffer, copy in zip(chosen.buffers, self._lent.buffers, strict=True):
                    copy.copy_(buffer)
            chosen = self._lent
        self._attach(chosen)
        self._versions = [version_of(buffer) for buffer in chosen.buffers]
        held = (pair for pair in zip(chosen.parameters, chosen.views, strict=True) if pair[1].numel())
        for buffer, firsts in zip(chosen.buffers, chosen.firsts, strict=True):
            for suspected, (parameter, view) in zip(_is_empty(buffer[firsts]).tolist(), held, strict=False):
                if suspected and bool(_is_empty(view).all()):
                    parameter.grad = None

    def _like(self, chosen: _Set, known: _Set | None) -> _Set:
        """Buffers for the same parameters: those that are ``known``, or new ones."""
        if known is not None and known.holds == chosen.holds:
            return known
        place = {id(parameter): number for number, parameter in enumerate(self._all)}
        return self._empty(sorted(chosen.parameters, key=lambda p: place[id(p)]))

    def look_for_changes(self) -> None:
        """If the gradients that were handed over have been changed, copies are handed over from now on."""
        if not self._lends_copies and self._versions != [version_of(buffer) for buffer in self._attached.buffers]:
            self._lends_copies = True
            log.info("Hooks or the optimizer change gradients in place; from now on they get copies.")

    def check(self, step: int) -> None:
        """Raises UnsupportedFeatureError if a gradient left its buffer (sparse, or replaced by a hook)."""
        chosen = self._sets[step % 2]
        for parameter, grad in zip(chosen.parameters, chosen.grads, strict=True):
            if parameter.grad is not grad:
                kind = "None" if parameter.grad is None else f"a separate {parameter.grad.layout} tensor"
                raise UnsupportedFeatureError(
                    f"The gradient of a parameter of shape {tuple(parameter.shape)} became {kind}; the strategy needs"
                    " dense gradients accumulated in place. Use sparse=False in embeddings and do not replace .grad in"
                    " hooks."
                )

    def by_parameter(self, step: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter, with its gradient in ``step``, or this process's part of it."""
        chosen = self._sets[step % 2]
        return zip(chosen.parameters, chosen.views, strict=True)

    def squared_norm(self, step: int, without: Collection[nn.Parameter] = ()) -> float:
        """The sum of squares of all gradients of ``step``, except those of the parameters ``without``."""
        left_out = {id(parameter) for parameter in without}
        views = [view for p, view in self.by_parameter(step) if id(p) not in left_out]
        return float(sum(float(norm) ** 2 for norm in foreach_norm(views))) if views else 0.0


def _is_empty(values: Tensor) -> Tensor:
    """Which of ``values`` are negative zeros."""
    if values.is_complex():
        return _is_empty(torch.view_as_real(values)).all(-1)
    return (values == 0) & torch.signbit(values)


@dataclass(frozen=True)
class Share:
    """The share of a batch in the step of the optimizer that it belongs to.

    Args:
        batches: the number of batches by which the sum of their gradients is divided.
        begins: whether it is the first of them.
        ends: whether the optimizer steps after it.
    """

    batches: int = 1
    begins: bool = True
    ends: bool = True


class AccumulatedGradients:
    """Sums of the batches since the newest step of the optimizer; none where batches do not accumulate.

    Args:
        gradients: the gradients of each step of the schedule.
        parameters: the parameters of the stage.
        sums: what it begins with.
    """

    def __init__(
        self,
        gradients: GradientBuffers,
        parameters: Sequence[nn.Parameter],
        sums: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
    ) -> None:
        self._gradients = gradients
        self._parameters = list(parameters)
        self._sums: dict[nn.Parameter, Tensor] = dict(sums)

    @torch.no_grad()
    def add(self, step: int, share: Share) -> None:
        """Makes each ``parameter.grad`` what it is on one device after the backward of the batch of ``step``."""
        self._gradients.hand_over(step)
        if share.begins:
            self._sums = {}
        if share == Share():
            return
        found = {p: p.grad for p in self._parameters if p.grad is not None}
        known = [p for p in found if p in self._sums]
        if known:
            sums, parts = ([local_part(of[p]) for p in known] for of in (self._sums, found))
            foreach_add_(sums, parts, alpha=1 / share.batches)
        self._sums.update({p: grad / share.batches for p, grad in found.items() if p not in self._sums})
        self._attach()

    def attach(self, step: int) -> None:
        """Makes each ``parameter.grad`` again what it was after :meth:`add`, of which ``step`` was the newest."""
        self._gradients.hand_over(step, again=True)
        self._attach()

    def _attach(self) -> None:
        for parameter, total in self._sums.items():
            parameter.grad = total

    @torch.no_grad()
    def squared_norm(self, step: int, share: Share, without: Collection[nn.Parameter] = ()) -> float:
        """The sum of squares of all gradients that the optimizer gets if it steps after ``step``, except those of the
        parameters ``without``.
        """
        if share == Share():
            return self._gradients.squared_norm(step, without)
        left_out = {id(parameter) for parameter in without}
        counted = [total for parameter, total in self._totals(step, share).items() if id(parameter) not in left_out]
        return float(sum(float(norm) ** 2 for norm in foreach_norm(counted))) if counted else 0.0

    @torch.no_grad()
    def is_finite(self, step: int, share: Share) -> bool:
        """Whether all gradients that the optimizer gets if it steps after ``step`` are finite."""
        whole = share == Share()
        found = self._gradients.of_step(step) if whole else list(self._totals(step, share).values())
        return not found or bool(torch.stack([torch.isfinite(tensor).all() for tensor in found]).all())

    def _totals(self, step: int, share: Share) -> dict[nn.Parameter, Tensor]:
        """The sums as they will be after the batch of ``step``."""
        totals = {} if share.begins else dict(self._sums)
        for parameter, gradient in self._gradients.by_parameter(step):
            part = gradient / share.batches
            totals[parameter] = local_part(totals[parameter]) + part if parameter in totals else part
        return {parameter: local_part(total) for parameter, total in totals.items()}

    @property
    def sums(self) -> Mapping[nn.Parameter, Tensor]:
        """The sums, by parameter."""
        return self._sums

    def state(self) -> dict[int, Tensor]:
        """For a worker that joins this stage, by the index of the parameter."""
        return {index: self._sums[p] for index, p in enumerate(self._parameters) if p in self._sums}

    def load_state(self, state: Mapping[int, Tensor]) -> None:
        self.load_sums({self._parameters[index]: total for index, total in state.items()})

    def load_sums(self, sums: Mapping[nn.Parameter, Tensor]) -> None:
        """Goes on with these sums."""
        self._sums = {parameter: total.to(parameter.device) for parameter, total in sums.items()}
