"""Faults: which worker fails, how and when, and their effects on a process.

A :class:`Fault` is data, which is due by what the worker is about to do or has just done. Faults at times are drawn at
random, or replayed from an availability trace: a source yields :class:`TimedFault` values, each a time in seconds, a
rank and a kind. It is a pure function of its arguments, so all processes agree without communicating. An
:class:`Agenda` compares those of one process with a clock.

Each effect makes the calling process fail as it would in a cluster, in the main thread and without privileges. A bit
flip changes one number, once, in what the worker holds, computes or sends; or arithmetic is wrong from then on, in
every n-th matrix product. The number that flips follows from the fault alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_recycle.arguments import (
    OptionGroup,
    choice,
    integer,
    is_integer,
    is_number,
    option,
    shown_options,
    suggests_options,
)
from lightning_recycle.errors import ConfigurationError, InjectedFaultError, suggestion
from lightning_recycle.planning.grid import Op, OpKind
from lightning_recycle.runtime.worker_links import borrowed, drop_everything
from lightning_recycle.torch_internals import TorchDispatchMode

KINDS = ("kill", "exit", "exception", "hang", "deadlock", "slow", "partition", "preempt", "bitflip")
"""The ways in which a worker can fail."""

KINDS_AT_TIMES = tuple(kind for kind in KINDS if kind not in ("slow", "bitflip"))
"""Kinds without further arguments, for faults at random times or of a trace."""

TARGETS = ("parameter", "optimizer", "activation", "gradient", "message", "matmul")
"""The places in which a bit can flip."""

POINTS = ("setup", "recovery", "checkpoint", "validation", "end")
"""The points of a worker's life outside the operations of a step."""

_OPERATIONS: dict[str, tuple[OpKind, ...]] = {
    "forward": (OpKind.FORWARD,),
    "recompute": (OpKind.RECOMPUTE,),
    "backward_input": (OpKind.BACKWARD_INPUT, OpKind.BACKWARD),
    "backward_weight": (OpKind.BACKWARD_WEIGHT, OpKind.BACKWARD),
    "reduce": (OpKind.REDUCE,),
    "optimizer": (OpKind.STEP,),
}
_OF_A_MICROBATCH = ("forward", "recompute", "backward_input", "backward_weight")


@suggests_options
@dataclass(frozen=True)
class Fault(OptionGroup):
    """One failure of one worker, which happens once; replacements do not suffer it.

    =============  ==================================================================================================
    kind           what happens
    =============  ==================================================================================================
    ``kill``       SIGKILL
    ``exit``       the process ends with exit code 1, without any clean-up
    ``exception``  an error of the infrastructure is raised (not the user's: the others survive it)
    ``hang``       SIGSTOP: every thread of the process stops, heartbeats too; its connections stay open
    ``deadlock``   the main thread blocks in Python while the heartbeats go on
    ``slow``       every operation takes ``factor`` times as long, for ``steps`` steps
    ``partition``  no packet reaches the process or leaves it any more, though its TCP connections stay open
    ``preempt``    SIGTERM: the worker leaves at the end of the step
    ``bitflip``    a bit of a number flips, and nothing else happens: a silent corruption
    =============  ==================================================================================================

    Args:
        kind: a kind from the table.
        pipeline: pipeline of the worker that fails, in the grid as it was at the start.
        stage: stage of the worker that fails.
        step: step of the schedule, counted from 0: an optimizer step, or a batch where gradients are accumulated. With
            a point instead of an operation it may be left out; the fault then happens when that point is first reached.
        at: an operation: "forward", "recompute", "backward_input", "backward_weight", "reduce" or "optimizer"; the
            fault happens at the worker's first one of this kind in that step. Where the schedule fuses the backward,
            both backward operations mean the fused one; "recompute" only happens where it has forwards computed again.
            Or a point: "setup" (the worker is set up, before its first generation), "recovery" (in the middle of the
            recovery from another failure), "checkpoint" (before a checkpoint is written), "validation" (before a
            validation batch), "end" (training is over, but the results are not yet delivered).
        microbatch: index (0 to M - 1, of any pipeline) of the micro-batch to whose operation the fault is restricted.
        when: "before" the operation or "after" it.
        factor: factor on the time of operations, more than 1; for "slow" only.
        steps: number of steps that it lasts, including the one in which it begins; for "slow" only.
        target: for "bitflip" only, where: in a "parameter", in the state of the "optimizer", in an "activation" that
            the operation computes (a forward), in a "gradient" of a parameter (``at="backward_weight", when="after"``),
            in the next "message" to another worker; or in the result of each ``every``-th matrix product from then on
            ("matmul"), as by a device that is broken.
        bit: for "bitflip" only, which bit of the number, from the lowest, 0, an error of one unit in the last place.
            By default the lowest one of its exponent, which doubles or halves it.
        every: for ``target="matmul"``: n of every n-th.
        member: the member of the position that fails, where it has several processes; by default all of them do.

    Raises:
        ConfigurationError: for unknown names, numbers out of range, and arguments that do not belong together.
    """

    kind: str = option(MISSING, choice(*KINDS))
    pipeline: int = option(MISSING, integer(0))
    stage: int = option(MISSING, integer(0))
    step: int | None = option(None, integer(0, otherwise="with a point"))
    at: str = option("forward", choice(*_OPERATIONS, *POINTS))
    microbatch: int | None = option(None, integer(0, otherwise="for any"))
    _: KW_ONLY
    when: str = option("before", choice("before", "after"))
    factor: float | None = None
    steps: int | None = None
    target: str | None = None
    bit: int | None = option(None, integer(0, otherwise="for the lowest of the exponent"))
    every: int | None = option(None, integer(1, otherwise="without target='matmul'"))
    member: int | None = option(None, integer(0, otherwise="for all"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.at in POINTS:
            if self.when == "after":
                self._reject(f"{self.at!r} is a point, not an operation, so nothing comes after it; leave when out.")
        elif self.step is None:
            self._reject(f"{self.at!r} happens in every step: give step=0 or another number.")
        if self.microbatch is not None and self.at not in _OF_A_MICROBATCH:
            self._reject(f"{self.at!r} concerns no micro-batch; leave microbatch out.")
        if self.kind == "slow":
            self._check_slow()
        elif self.factor is not None or self.steps is not None:
            self._reject(f"factor and steps belong to the kind 'slow'; leave them out for {self.kind!r}.")
        if self.kind == "bitflip":
            self._check_bitflip()
        elif (self.target, self.bit, self.every) != (None, None, None):
            self._reject(f"target, bit and every belong to the kind 'bitflip'; leave them out for {self.kind!r}.")

    def _check_slow(self) -> None:
        if not is_number(self.factor, 1, above=True):
            self._reject(f"factor={self.factor!r}: give a factor above 1 on the time of operations, e.g. factor=3.0.")
        if not is_integer(self.steps, 1):
            self._reject(f"steps={self.steps!r}: give the number of steps for which the worker is slow, e.g. steps=2.")
        if self.at == "end":
            self._reject("no operation follows the end; use another point.")

    def _check_bitflip(self) -> None:
        if self.target not in TARGETS:
            known = f"one of {', '.join(map(repr, TARGETS))}.{suggestion(self.target, TARGETS)}"
            self._reject(f"target={self.target!r}: say where the bit flips, with {known}")
        if self.at in POINTS:
            self._reject(f"{self.at!r} is a point, and a bit flips at an operation, such as 'forward'.")
        if (self.target == "matmul") != (self.every is not None):
            self._reject(
                f"every={self.every!r}: give n of every n-th product with target='matmul', and with that only."
            )
        if self.target == "activation" and (self.at, self.when) != ("forward", "before"):
            self._reject("an activation is what a forward computes; use at='forward', when='before'.")
        if self.target == "gradient" and (self.at, self.when) != ("backward_weight", "after"):
            self._reject("the gradient is there after a backward_weight; use at='backward_weight', when='after'.")

    def _reject(self, reason: str) -> NoReturn:
        raise ConfigurationError(f"{self}: {reason}")

    def __repr__(self) -> str:
        """As it would be written, without default values."""
        return shown_options(self, "Fault")

    def matches(self, step: int, op: Op, when: str = "before") -> bool:
        """Whether the fault is due "before" or "after" its worker runs ``op`` of ``step``."""
        if step != self.step or when != self.when or op.kind not in _OPERATIONS.get(self.at, ()):
            return False
        return self.microbatch is None or (op.microbatch is not None and op.microbatch.index == self.microbatch)

    def matches_point(self, point: str, step: int) -> bool:
        """Whether the fault is due when the right worker reaches ``point`` in ``step``."""
        return point == self.at and point in POINTS and self.step in (None, step)


# ---------------------------------------------------------------------- faults at times


@dataclass(frozen=True, order=True, slots=True)
class TimedFault:
    """The worker of ``rank`` is to fail at ``time`` seconds in the way ``kind``."""

    time: float
    rank: int
    kind: str


def random_faults(
    mtbf: float,
    num_workers: int,
    kinds: Sequence[str],
    seed: int,
    rank: int,
    incarnation: int = 0,
    max_faults: int | None = None,
) -> tuple[TimedFault, ...]:
    """The random fault of one process, in seconds since its first operation.

    Its time is exponential with mean ``mtbf * num_workers``, drawn from (seed, rank, incarnation) and nothing else, so
    other processes do not affect it.

    Args:
        mtbf: mean seconds between two failures anywhere in a complete grid.
        kinds: kinds of faults, drawn with equal probability.
        incarnation: 0 for the first process of a position, 1, 2, ... for its replacements.
        max_faults: only this many faults happen, the first among those of all original processes, and none in
            replacements: a limit that no process needs others to keep.
    """

    def drawn(rank: int, incarnation: int = 0) -> TimedFault:
        rng = random.Random(f"{seed}/{rank}/{incarnation}")
        return TimedFault(rng.expovariate(1 / (mtbf * num_workers)), rank, rng.choice(kinds))

    if max_faults is None:
        return (drawn(rank, incarnation),)
    allowed = sorted(map(drawn, range(num_workers)))[:max_faults] if incarnation == 0 else []
    return tuple(fault for fault in allowed if fault.rank == rank)


def trace_faults(
    availability: Sequence[tuple[float, int]],
    num_workers: int,
    kinds: Sequence[str],
    seed: int,
    time_scale: float = 1.0,
    max_faults: int | None = None,
) -> tuple[TimedFault, ...]:
    """The faults of all workers while ``availability`` falls, in time order.

    A grid seldom has as many workers as a trace has nodes, so nodes are scaled to workers: at the
    trace's peak all W workers are available, at n nodes W * n / peak of them, rounded to the nearest. When that number
    falls, as many workers fail, drawn from (seed, index of the record) among those that have not failed, or whose place
    has been filled since. When it rises, as many failed places count as filled, the longest empty first. Whether a
    process really fills the place depends on ``RecoveryOptions(max_restarts=...)``; without it, a fault of an empty
    place has no effect. A run begins with all workers, however the trace begins.

    Args:
        availability: (time in seconds, nodes from then on), in order.
        kinds: kinds of faults, drawn with equal probability.
        time_scale: wall-clock seconds per second of the trace: 0.01 plays an hour in 36 s.
        max_faults: only this many faults, the first ones.
    """
    peak = max((nodes for _, nodes in availability), default=0)
    if peak == 0:
        return ()
    targets = [int(num_workers * nodes / peak + 0.5) for _, nodes in availability]
    filled = list(range(num_workers))
    empty: list[int] = []
    faults: list[TimedFault] = []
    for index, (before, target) in enumerate(itertools.pairwise(targets), start=1):
        if target > before:
            returning = empty[: target - before]
            del empty[: target - before]
            filled = sorted(filled + returning)
        elif target < before:
            rng = random.Random(f"{seed}/{index}")
            moment = availability[index][0] * time_scale
            for rank in rng.sample(filled, min(before - target, len(filled))):
                filled.remove(rank)
                empty.append(rank)
                faults.append(TimedFault(moment, rank, rng.choice(kinds)))
    return tuple(faults[:max_faults])


class Agenda:
    """The faults that are due in one process, by its clock.

    Faults already past at the first look never become due: they would have hit a process that did not exist yet.
    ``origin`` is the clock's value at time 0 of ``faults``; by default, that of the first look.
    """

    def __init__(self, faults: Iterable[TimedFault], clock: Callable[[], float], origin: float | None = None) -> None:
        self._faults = deque(faults)
        self._origin, self._clock = origin, clock
        self._looked = False

    def take_due(self) -> TimedFault | None:
        """The earliest fault that is due and has not been taken, if any."""
        if not self._faults:
            return None
        if self._origin is None:
            self._origin = self._clock()
        now = self._clock() - self._origin
        while not self._looked and self._faults and self._faults[0].time < now:
            self._faults.popleft()
        self._looked = True
        return self._faults.popleft() if self._faults and self._faults[0].time <= now else None


# ---------------------------------------------------------------------- effects of faults


_DEADLOCK_SECONDS = 3600.0  # by then, nothing will find the deadlock any more
_PARTITION_INTERVAL = 0.05  # seconds until a socket opened later is cut off

_SO_MAX_PACING_RATE = 47  # from asm-generic/socket.h; the socket module does not have it


def deadlock() -> None:
    """Blocks this thread, and no other, in Python; InjectedFaultError after an hour."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=_DEADLOCK_SECONDS)
    raise InjectedFaultError(f"An injected deadlock was not found within {_DEADLOCK_SECONDS:.0f} seconds.")


# ---------------------------------------------------------------------- partition


def partition() -> None:
    """Cuts this process off for good; its TCP sockets stay open.

    Existing sockets are cut off when this returns, later ones within 50 ms of opening. One or two packets of each may
    still get out (more on a new connection that sends full segments). Unix sockets, pipes, shared memory and
    RDMA keep working.
    """
    _cut_all_sockets()
    threading.Thread(target=_keep_cutting, name="recycle-partition", daemon=True).start()


def _keep_cutting() -> None:
    while True:
        time.sleep(_PARTITION_INTERVAL)
        _cut_all_sockets()


def _cut_all_sockets() -> None:
    for name in os.listdir("/proc/self/fd"):
        # Another thread may close a descriptor at any moment; then there is nothing to cut off.
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with borrowed(int(name)) as sock:
                    if sock and sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                        _cut(sock)


def _cut(sock: socket.socket) -> None:
    """Drops incoming packets by a filter, and slows outgoing ones down to nothing.

    Accepted connections inherit the filter. Outgoing packets wait for a pace of 1 byte/s. Linux does not pace the first
    ten segments of a connection (``tcp_update_skb_after_send``); Nagle's algorithm holds small ones back until what was
    sent before is acknowledged, and the acknowledgements are dropped.
    """
    drop_everything(sock)
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)


def _signal_self(number: int) -> None:
    """Sends a signal to the process, as others would; not to this thread."""
    os.kill(os.getpid(), number)


EFFECTS: dict[str, Callable[[], None]] = {
    "kill": partial(_signal_self, signal.SIGKILL),  # the system closes its connections
    "exit": partial(os._exit, 1),  # no `finally`, no exit handlers, no message
    "hang": partial(_signal_self, signal.SIGSTOP),  # all threads; goes on after SIGCONT
    "deadlock": deadlock,
    "partition": partition,
    "preempt": partial(_signal_self, signal.SIGTERM),  # as from a cluster manager that reclaims the machine
}
"""How the calling process fails, by the kind of fault."""


# ---------------------------------------------------------------------- bit flips

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
_PRODUCTS = {
    op for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv") for op in (getattr(torch.ops.aten, name).default,)
}


@torch.no_grad()
def flip(tensors: Iterable[Any], bit: int | None, draw: random.Random) -> bool:
    """Flips a bit of one number of the floating-point tensors, in place.

    Args:
        bit: its place, from the lowest, 0; None for the lowest bit of the exponent, which doubles or halves the number.
        draw: draws the number.

    Returns:
        Whether there was one.
    """
    found = [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    if not found:
        return False
    place = draw.randrange(sum(tensor.numel() for tensor in found))
    for tensor in found:
        if place < tensor.numel():
            _flip_at(tensor.detach(), place, bit)
            break
        place -= tensor.numel()
    return True


def _flip_at(tensor: Tensor, place: int, bit: int | None) -> None:
    width = 8 * tensor.element_size()
    chosen = _MANTISSA[tensor.dtype] if bit is None else bit % width
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), tensor.shape))
    number = tensor[index].reshape(1).contiguous()
    mask = 1 << chosen if chosen < width - 1 else -(1 << chosen)
    wrong = number.view(_INTEGERS[tensor.element_size()]) ^ mask
    tensor[index] = wrong.view(tensor.dtype)[0]


def flipped(value: Any, bit: int | None, draw: random.Random) -> Any:
    """A copy of a tensor, or of a tuple of tensors and None, with a flipped bit."""
    several = value if isinstance(value, tuple) else (value,)
    copies = tuple(None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in several)
    flip([None if t is None else t.detach() for t in copies], bit, draw)
    return copies if isinstance(value, tuple) else copies[0]


def flip_in_next_output(modules: Sequence[nn.Module], bit: int | None, draw: random.Random) -> None:
    """Flips a bit in the next tensor that one of ``modules`` returns, in place."""
    handles: list[Any] = []

    def on_output(module: nn.Module, inputs: Any, output: Any) -> None:
        if not handles:
            return
        if flip(output if isinstance(output, tuple) else (output,), bit, draw):
            for handle in handles:
                handle.remove()
            handles.clear()

    handles += [module.register_forward_hook(on_output) for module in modules]


class WrongArithmetic(TorchDispatchMode):
    """Within the block, every ``every``-th matrix product has a flipped bit.

    The count goes on from block to block. ``bit``: see :func:`flip`; 0 is an error of one unit in the last place.
    """

    def __init__(self, every: int, bit: int | None, draw: random.Random) -> None:
        super().__init__()
        self._every, self._bit, self._draw = every, bit, draw
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS and result.is_floating_point():
            self._count += 1
            if self._count % self._every == 0:
                flip([result], self._bit, self._draw)
        return result
