"""Workers of a stage check each other's computations, losses, gradients, states.

In a step with checks each worker records one micro-batch, drawn from the step: its inputs, and checksums of the output,
the input gradient and the weight gradients. A peer computes the record at its CHECK, without lasting changes, and
compares. Other bits are reported, and the worker goes no further, so the step cannot be committed. All workers of the
stage then compute the record twice, and vote. If several get other bits each time, the layers are not deterministic,
and comparing ends; a single one has a broken device. Machines of other kinds may round differently: they have no vote,
and a worker whose record comes from one computes its own once more instead.

Wrong results may have reached other stages. So no worker applies a step before all have reported that they have no
objection (:class:`~lightning_recycle.control.protocol.messages.Milestone`).

Replicas are compared, too: counters, options, checksums of applied steps, inputs. Parameters and optimizer states of a
stage's workers are the same bits, since they step with the same reduced gradient; checksums are compared now and then,
after the same steps on all workers. Buffers are not compared. Copies of a parameter on several stages are compared at
the end of each epoch and evaluation: a hook that goes through ``self.parameters()`` finds those of one stage, and may
pair them wrongly.
"""

from __future__ import annotations

import cmath
import contextlib
import hashlib
import logging
import math
import pickle
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recycle.control.client import ControlClient
from lightning_recycle.control.protocol import messages
from lightning_recycle.control.protocol.member import Interrupted
from lightning_recycle.control.protocol.messages import FINITE, IS_FINITE, NOT_FINITE, Checked
from lightning_recycle.devices import hardware_name
from lightning_recycle.planning.grid import Grid, OpKind
from lightning_recycle.planning.program import COMPLETING, Program, Task
from lightning_recycle.runtime.communicator import Communicator, receive_object, send_object
from lightning_recycle.runtime.stage import Stage
from lightning_recycle.runtime.stage_bundle import StageTies
from lightning_recycle.runtime.wire import MAX_TENSORS, Channel, Incoming
from lightning_recycle.tensor_memory import checksum, local_part, put_together, take_apart
from lightning_recycle.torch_internals import foreach_add_, tree_flatten, version_of

log = logging.getLogger(__name__)

_OUTPUT, _INPUT_GRADIENT, WEIGHT_GRADIENT = "output", "input gradient", "weight gradient"


@dataclass
class MicrobatchRecord:
    """Inputs and results of a stage for one micro-batch, recorded from its forward on.

    ``wanted``: which input tensors need a gradient; ``sums``: checksums of the results; ``machine``: properties that
    must be equal for equal bits; ``watches_numbers``: finite results matter, not their bits.
    """

    step: int
    microbatch: int
    inputs: Any
    target: Any
    wanted: tuple[bool, ...]
    split_backward: bool
    grads: Any = None
    sums: dict[str, bytes] = field(default_factory=dict)
    machine: str = ""
    watches_numbers: bool = False

    @classmethod
    def of(cls, step: int, task: Task, inputs: Any, target: Any) -> MicrobatchRecord | None:
        """A record, or None if the stage's inputs cannot be sent to others."""
        try:
            inputs_copy, target_copy = map_tensors((inputs, target), _copy)
            requires_grad = tuple(tensor.requires_grad for tensor in tensors_of(inputs))
        except Exception as error:  # whatever an object of the user's raises that cannot be pickled
            log.debug("Micro-batch %d cannot be recorded: %s", task.index, error)
            return None
        return cls(step, task.index, inputs_copy, target_copy, requires_grad, task.split_backward)


def is_sound(values: Sequence[Tensor | float | None]) -> bool:
    """Whether no number is NaN or infinite, except negative infinity in a mask."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point() and bool((torch.isnan(value) | torch.isposinf(value)).any()):
                return False
            if value.is_complex() and not bool(torch.isfinite(value).all()):
                return False
        elif value is not None and not math.isfinite(value):
            return False
    return True


class GradientsApart:
    """Separate gradients of parameters for one micro-batch, which may be added later.

    In a ``with`` statement they are in the place of the others within the block.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._usual: list[tuple[nn.Parameter, Tensor]] = []
        self._apart: list[Tensor] = []
        self._clean: list[int] = []  # their versions when nothing was written

    def begin(self) -> None:
        """Replaces each ``parameter.grad`` by an empty separate gradient."""
        self._usual = [(p, p.grad) for p in self._parameters if p.grad is not None]
        if not self._apart:
            self._apart = [torch.zeros_like(grad) for _, grad in self._usual]
            self._clean = [*map(_writes, self._apart)]
        for (parameter, _), apart in zip(self._usual, self._apart, strict=True):
            parameter.grad = apart

    def end(self) -> None:
        """Restores ``parameter.grad``, unless the user's code has replaced it."""
        for (parameter, usual), apart in zip(self._usual, self._apart, strict=True):
            if parameter.grad is apart:
                parameter.grad = usual

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: Any) -> None:
        self.end()

    def add(self) -> None:
        pairs = zip(self._usual, self._apart, self._clean, strict=True)
        written = [(usual, apart) for (_, usual), apart, clean in pairs if _writes(apart) > clean]
        if written:
            foreach_add_(*map(list, zip(*written, strict=True)))
        self._usual, self._apart, self._clean = [], [], []


def _writes(grad: Tensor) -> int:
    return version_of(grad) + version_of(local_part(grad))


@dataclass(eq=False)
class Recomputation:
    """Computes records once more; ``divisor``: micro-batches in the global batch."""

    stage: Stage
    parameters: Sequence[nn.Parameter]
    divisor: int
    recomputing: Callable[[int], AbstractContextManager[None]] = lambda index: nullcontext()

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.requires_grad and p.grad is not None]

    def __call__(self, record: MicrobatchRecord) -> dict[str, bytes]:
        """This worker's checksums of all results that ``record`` has checksums of.

        Runs F, and B and W where the record has them, with the record's randomness; this worker's gradients stay
        unchanged.
        """
        stage, index = self.stage, record.microbatch
        inputs, target, grads = map_tensors((record.inputs, record.target, record.grads), _copy)
        for tensor, wanted in zip(tensors_of(inputs), record.wanted, strict=True):
            tensor.requires_grad_(wanted)
        with self.recomputing(index), GradientsApart(self.parameters):
            output = stage.forward(record.step, index, inputs, target, split_backward=record.split_backward)
            results: list[Any] = [*tensors_of(output), None]
            if stage.has_loss:
                results[-1] = float(stage.loss(record.step, index, output, target, self.divisor))
            sums = {_OUTPUT: checksum(results)}
            if _INPUT_GRADIENT not in record.sums:
                stage.forget(index)
                return _with_numbers(record, sums, results)
            if record.split_backward:
                input_grads = stage.backward_input(index, grads)
                stage.backward_weight(index)
            else:
                input_grads = stage.backward(index, grads)
            sums[_INPUT_GRADIENT] = checksum(tensors_of(input_grads))
            results += [*tensors_of(input_grads), *self.gradients()]
            if WEIGHT_GRADIENT in record.sums:
                sums[WEIGHT_GRADIENT] = checksum(self.gradients())
            return _with_numbers(record, sums, results)


def _with_numbers(record: MicrobatchRecord, sums: dict[str, bytes], results: list[Any]) -> dict[str, bytes]:
    if record.watches_numbers:
        sums[FINITE] = IS_FINITE if is_sound(results) else NOT_FINITE
    return sums


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in ``value``, of any objects."""
    return take_apart(value)[1]


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``value``, of any objects, with other tensors."""
    rest, tensors = take_apart(value)
    return put_together(rest, [function(tensor) for tensor in tensors])


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


_VERDICT_TIMEOUT = 600.0  # seconds until the others have voted, or a generation inspects the step


class Verifier:
    """One worker's part in the checks of computations, losses and gradients.

    A loss or gradient that is not finite is reported before the step can be committed. The step is run again and
    *inspected*: a worker that makes such a value of finite ones keeps a record of the micro-batch, and all workers of
    its stage compute that. Finite values on a peer show a broken device; otherwise the step is run once more and the
    value is the model's own. Outside of inspected steps this costs nothing: losses, and norms where they are needed,
    are known anyway; sums over gradients are for devices for which no worker has to wait.

    Args:
        is_comparable: whether peers compute the same bits.
        may_blame_device: whether values that are not finite may show a broken device: not with a scaled loss, or
            without peers.

    Attributes:
        tasks: this worker's next ones, with its CHECK.
        target: the operation that completes the micro-batch on which this worker is checked.
        inspects: whether this attempt is inspected, with gradients of this worker alone.
    """

    def __init__(
        self,
        client: ControlClient,
        communicator: Communicator,
        stage: Stage,
        recompute: Recomputation,
        grid: Grid,
        device: str,
        is_comparable: bool,
        may_blame_device: bool = False,
    ) -> None:
        self._client, self._communicator, self._stage = client, communicator, stage
        self._recompute, self._device = recompute, device
        self._is_comparable, self._may_blame_device = is_comparable, may_blame_device
        self._tag = grid.global_microbatches  # behind those of micro-batches
        self._program = Program()
        self.tasks: tuple[Task, ...] = ()
        self._completing: list[Task] = []  # of each micro-batch
        self.target: Task | None = None
        self._own_gradients = GradientsApart(())
        self._checked_rank, self._checking_rank = -1, -1  # rank whose record comes, and rank that gets this worker's
        self._incoming: Incoming | None = None
        self._records: dict[int, MicrobatchRecord] = {}  # of this attempt
        self._own_record: MicrobatchRecord | None = None  # what it is checked on, when it is complete
        self._disputed: MicrobatchRecord | None = None
        self._unpassed_step = -1  # the step that all must have passed
        self._inspected = self._excused = -1
        self.inspects = False
        self._was_finite = True  # the loss of the newest step

    # ------------------------------------------------------------------ being checked

    def follow(self, program: Program) -> None:
        self._program = program
        self._completing = [task for task in program.tasks if task.op.kind in COMPLETING]

    def inspect(self, inspected: int, excused: int) -> None:
        """Sets the step to inspect, and the last step whose values are accepted."""
        self._inspected, self._excused = inspected, excused

    def begin(self, step: int, is_first_attempt: bool) -> None:
        """Begins an attempt at ``step``, the first if no stage has finished it before."""
        checks, self.tasks = self._program.checks, self._program.tasks
        self._own_record = self._disputed = self._incoming = self.target = None
        self._records = {}
        self.inspects = self._may_blame_device and step == self._inspected
        # Once its loss is known some may have applied the step: what others make of it can be held back no more.
        self._unpassed_step = step if self._program.has_checks(step) and not self._client.knows_loss(step) else -1
        if self._unpassed_step < 0:
            return
        number = checks.drawn(step) if checks is not None and self._is_comparable and is_first_attempt else None
        if checks is None or number is None:
            self._report_passed()
            return
        self.target = self._completing[number % len(self._completing)]
        self._own_gradients = GradientsApart(self._recompute.parameters)
        self._checked_rank, self._checking_rank = checks.partners(step, self._client.rank)
        self._incoming = self._communicator.post_receive(Channel.ACTIVATIONS, self._checked_rank, self._tag)
        self.tasks = self._program.tasks_with_check(checks.operations_before[number])

    @property
    def records(self) -> bool:
        """Whether micro-batches of this attempt are recorded."""
        return self.target is not None or self.inspects

    @property
    def needs_last_gradients(self) -> bool:
        """Whether the last micro-batch's gradients must wait for :meth:`complete_record`."""
        return self.inspects or (self.target is not None and self.target is self._completing[-1])

    def leaves_open(self, step: int) -> bool:
        """Whether the newest attempt at ``step``, not passed by all, may be wrong."""
        return step == self._unpassed_step and not self._client.knows_loss(step)

    def _report_passed(self) -> None:
        self._client.send(
            messages.Reached(self._client.rank, self._client.generation, messages.Milestone.PASSED, self._unpassed_step)
        )

    def _is_checked_on(self, task: Task) -> bool:
        return self.target is not None and task.index == self.target.index

    def record_inputs(self, step: int, task: Task, inputs: Any, target: Any) -> None:
        is_checked = self._is_checked_on(task)
        if is_checked or self.inspects:
            record = MicrobatchRecord.of(step, task, inputs, target)
            if record is not None:
                self._records[task.index] = record
            elif is_checked:
                self._give_up("what its layers are given cannot be sent to another worker")

    def record_output(self, task: Task, output: Any, loss: Tensor | float | None) -> None:
        if (record := self._records.get(task.index)) is not None:
            made = [*tensors_of(output), None if loss is None else float(loss)]
            record.sums[_OUTPUT] = checksum(made)
            self._dispute_if_unsound(record, made, record.inputs)

    def begin_gradients(self, task: Task) -> None:
        """``task``, which adds weight gradients, begins."""
        if self._is_checked_on(task) and task.index in self._records:
            self._own_gradients.begin()

    def record_backward(self, task: Task, grads: Any, input_grads: Any) -> None:
        if (record := self._records.get(task.index)) is not None:
            made = tensors_of(input_grads)
            record.grads = map_tensors(grads, _copy)
            record.sums[_INPUT_GRADIENT] = checksum(made)
            if task.op.kind is OpKind.BACKWARD_INPUT and self._is_checked_on(task):
                self._own_gradients.end()
            self._dispute_if_unsound(record, made, grads)

    def complete_record(self, task: Task) -> None:
        """Sends the peer the record, once the weight gradients of ``task`` are complete."""
        if (record := self._records.pop(task.index, None)) is None:
            return
        if task is self.target:
            record.sums[WEIGHT_GRADIENT] = checksum(self._recompute.gradients())
            self._own_gradients.end()
            self._own_gradients.add()
            record.machine, self._own_record = _machine_digest(), record
            self._communicator.send(Channel.ACTIVATIONS, _as_message(record), self._checking_rank, self._tag)
        if self.inspects:
            made = self._recompute.gradients()
            self._dispute_if_unsound(record, made, (record.inputs, record.grads))
            self.inspects = is_sound(made)  # otherwise all gradients have those numbers in them from now on

    def _dispute_if_unsound(self, record: MicrobatchRecord, made: Sequence[Tensor | float | None], inputs: Any) -> None:
        """In an inspected step, disputes a ``record`` that made right numbers wrong."""
        if self.inspects and not is_sound(made) and is_sound(tensors_of(inputs)):
            wrong = replace(record, sums={**record.sums, FINITE: NOT_FINITE}, watches_numbers=True)
            self.dispute(wrong, self._client.rank, wrong.sums)

    # ------------------------------------------------------------------ finite values

    def check_losses(self, step: int, losses: Mapping[int, float]) -> None:
        wrong = next((index for index, loss in losses.items() if not math.isfinite(loss)), None)
        if wrong is not None and self._may_report(step):
            self._report_not_finite(step, wrong)

    def check_gradient(self, step: int, squared_norm: float | None, buffers: Sequence[Tensor]) -> None:
        """Checks the reduced gradient; ``squared_norm``: its own, if known."""
        if not self._may_report(step):
            return
        if squared_norm is None:
            is_finite = all(_is_finite(buffer) for buffer in buffers if buffer.is_cpu)
        else:
            is_finite = math.isfinite(squared_norm)
        if not is_finite:
            self._report_not_finite(step, -1)

    def record_loss(self, loss: float) -> None:
        self._was_finite = math.isfinite(loss)

    def _may_report(self, step: int) -> bool:
        return self._may_blame_device and step > self._excused and self._was_finite

    def _report_not_finite(self, step: int, microbatch: int) -> NoReturn:
        self._client.send(messages.NotFinite(self._client.rank, self._client.generation, step, microbatch))
        self._client.await_announcement(_VERDICT_TIMEOUT)
        raise Interrupted

    # ------------------------------------------------------------------ checking

    def check(self, step: int) -> None:
        """Recomputes a peer's record, if the step has checks; Interrupted if it differs."""
        if self._incoming is None:
            return
        checked, incoming = self._checked_rank, self._incoming
        self._incoming = None
        with self._client.waiting(f"rank {checked}"):
            record = _from_message(self._communicator.receive(incoming))
        if record.machine != _machine_digest():
            if self._own_record is None:
                self._report_passed()
                return
            record, checked = self._own_record, self._client.rank
        sums = self._recompute(record)
        if sums != record.sums:
            if checked == self._client.rank and (varies := self._what_varies(record, sums)):
                self._give_up(f"{varies} gives other bits each time")
                return
            self.dispute(record, checked, sums)
        self._report_passed()

    def dispute(self, record: MicrobatchRecord, other: int, sums: Mapping[str, bytes]) -> NoReturn:
        """Has all workers of the stage compute ``record``, on which ``other`` disagrees.

        ``sums``: this worker's results. If ``other`` is this worker, its first results differed.
        """
        self._disputed = record
        rank, generation = self._client.rank, self._client.generation
        step, index = record.step, record.microbatch
        told = messages.Disputed(rank, generation, step, index, other, sums, record.sums, self._device)
        self._client.send(told)
        self._client.await_announcement(_VERDICT_TIMEOUT)
        raise Interrupted

    def vote(self, vote: messages.Vote) -> None:
        rank = self._client.rank
        if rank in vote.voters:
            with self._client.waiting("a record of a peer"):
                if rank == vote.recorder:
                    for other in vote.voters:
                        if other != rank:
                            send_object(self._communicator, self._disputed, other)
                    record = self._disputed
                else:
                    record = receive_object(self._communicator, vote.recorder)
            assert record is not None, "who disputed keeps the record"
            with self._stage.as_in_training(), self._client.busy("a disputed micro-batch"):
                record = map_tensors(record, lambda tensor: tensor.detach().to(self._communicator.device))
                has_a_say = record.machine in ("", _machine_digest())
                sums = self._recompute(record) if has_a_say else {}
                varies = self._what_varies(record, sums) if has_a_say else ""
            self._client.send(messages.Voted(rank, self._client.generation, sums, varies, self._device))
        self._client.await_announcement(_VERDICT_TIMEOUT)
        raise Interrupted

    def _give_up(self, cause: str) -> None:
        self._is_comparable = False
        log.warning("Computations cannot be compared: %s.", cause)
        self._client.send(messages.Incomparable(self._client.rank, cause))

    def _what_varies(self, record: MicrobatchRecord, sums: Mapping[str, bytes]) -> str:
        """The first layer, or the results, that differ when ``record`` is computed again.

        Empty if the sums are ``sums`` again.
        """
        again = self._recompute(record)
        if again == sums:
            return ""
        one, other = self._outputs(record), self._outputs(record)
        results = f"the {' and the '.join(name for name in sums if sums[name] != again[name])} of this stage"
        return next((mine[0] for mine, twice in zip(one, other, strict=False) if mine != twice), results)

    def _outputs(self, record: MicrobatchRecord) -> list[tuple[str, bytes]]:
        """By name, the checksum of each leaf layer's output in a forward."""
        checksums: list[tuple[str, bytes]] = []

        def summed(output: Any) -> bytes:
            # Not what stands for tensors of other stages.
            return checksum([tensor for tensor in tensors_of(output) if type(tensor) is Tensor])

        def watch(name: str, module: nn.Module) -> Any:
            return module.register_forward_hook(lambda _, __, output: checksums.append((name, summed(output))))

        with contextlib.ExitStack() as stack:
            for name, module in self._stage.named_leaves():
                stack.enter_context(watch(name, module))
            self._recompute(record)
        return checksums


def _as_message(record: MicrobatchRecord) -> tuple[Tensor, ...]:
    """A value that can be sent: the tensors, and the rest as bytes."""
    skeleton, tensors = take_apart(record)
    if len(tensors) >= MAX_TENSORS:
        skeleton, tensors = pickle.dumps(record), []
    return torch.frombuffer(bytearray(skeleton), dtype=torch.uint8), *tensors


def _from_message(message: Any) -> MicrobatchRecord:
    rest, *tensors = message
    found: MicrobatchRecord = put_together(bytes(rest.cpu().numpy().tobytes()), tensors)
    return found


def _machine_digest() -> str:
    """A digest of the properties that two workers must share to get the same bits."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = _processor() if kind is None else hardware_name(kind)
    facts = (device, torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next((line for line in file if line.startswith("model name")), platform.processor())
    except OSError:
        return platform.processor()


def _is_finite(values: Tensor) -> bool:
    """Whether the sum of all numbers is finite, which costs less than to test each."""
    # A sum of many finite numbers may be too large for a float16.
    total = values.sum(dtype=torch.float32 if values.dtype == torch.float16 else None)
    return cmath.isfinite(total.item())  # torch.isfinite() is four operations


FIRST_INTERVAL = 50
"""Steps between two checks as long as it is not known what they cost."""

_SHARE = 1e-3  # of the time of a step
_MOST_STEPS = 10_000


def stage_state(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, list[Any]]:
    """Parameters and optimizer states that a stage's workers share, by checksum name."""
    return {
        "parameters": [parameter.detach() for parameter in module.parameters()],
        "optimizer state": list(_leaves(optimizers)),
    }


def _leaves(optimizers: Iterable[Optimizer]) -> Iterator[Any]:
    """The tensors and numbers in the optimizers' states, by parameter."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    yield from _nested_leaves(optimizer.state[parameter])


def _nested_leaves(owner: Any) -> Iterator[Any]:
    keys = sorted(owner, key=str) if isinstance(owner, Mapping) else range(len(owner))
    for key in keys:
        value = owner[key]
        if isinstance(value, (dict, list)):
            yield from _nested_leaves(value)
        elif isinstance(value, (Tensor, bool, int, float)):
            yield value


class StateChecks:
    """A worker's regular comparison of weights and optimizer states with its peers.

    ``every``: steps between two checks; 0 for never, None for as few that they take a thousandth of the time.
    """

    def __init__(self, device: str, every: int | None, clock: Any = time.perf_counter) -> None:
        self._device, self._check_interval, self._clock = device, every, clock
        self._due: set[int] = set()
        self._last: tuple[int, float] | None = None  # the newest check: its step, and when it was over
        self._seconds = math.inf  # that one takes, at best

    def announce(self, step: int) -> None:
        self._due.add(step)

    def is_due(self, step: int) -> bool:
        return self._check_interval != 0 and step in self._due

    def check(self, step: int, module: nn.Module, optimizers: Iterable[Optimizer]) -> Checked:
        """The checksums of this worker after ``step``."""
        self._due = {due for due in self._due if due > step}
        began = self._clock()
        sums = self.sums(module, optimizers)
        ended = self._clock()
        interval = self._interval(step, began)
        self._seconds, self._last = min(self._seconds, ended - began), (step, ended)
        return Checked(sums, interval, self._device)

    def sums(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, bytes]:
        if self._check_interval == 0:
            return {}
        return {name: checksum(values) for name, values in stage_state(module, optimizers).items()}

    def _interval(self, step: int, now: float) -> int:
        """Steps until the check that it wants next."""
        if self._check_interval is not None:
            return self._check_interval
        if self._last is None or step <= self._last[0]:
            return FIRST_INTERVAL
        seconds = (now - self._last[1]) / (step - self._last[0])  # of a step
        if seconds <= 0:
            return FIRST_INTERVAL
        return min(_MOST_STEPS, max(1, math.ceil(self._seconds / (_SHARE * seconds))))


# ---------------------------------------------------------------------- copies on several stages


def sums_of_copies(ties: StageTies, parameters: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Checksums of this stage's copies of other stages' parameters, by first name."""
    own_copies = [(tie.copies[0][1], name) for tie in ties.ties for stage, name in tie.copies if stage == ties.stage]
    return {first: checksum([parameters[name].detach()]) for first, name in own_copies if name in parameters}


def copies_differ(sums: Iterable[tuple[int, Mapping[str, bytes]]]) -> str:
    """Warns of copies that differ between stages, in words; empty if all are equal.

    Differences within a stage have another cause, and are left to :class:`StateChecks`.
    """
    found: dict[str, dict[int, set[bytes]]] = {}
    for stage, own in sums:
        for name, value in own.items():
            found.setdefault(name, {}).setdefault(stage, set()).add(value)
    names = [
        name
        for name, stages in found.items()
        if all(len(values) == 1 for values in stages.values()) and len(set.union(*stages.values())) > 1
    ]
    if not names:
        return ""
    which = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"Several stages hold a copy of {which}, and these copies are no longer equal: a hook has changed one otherwise"
        " than another, so the result is not that of one device. Hooks find the parameters of their own stage in"
        " self.parameters(): do not pair them with others by their order or draw numbers for one after another. Use"
        " names, do it in __init__() or setup(), where the model is whole, or use pipeline_parallel_size=1."
    )


# ---------------------------------------------------------------------- options of optimizers

_MOST_OPTIONS = 64  # that are reported one by one


def optimizer_options(optimizers: Iterable[Optimizer]) -> dict[str, float]:
    """Numeric options of all groups, by name ("lr", "betas[1]", "lr of group 2")."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    numbers: dict[str, float] = {}
    for index, group in enumerate(groups):
        which = f" of group {index}" if index else ""
        options = [(str(key), value) for key, value in group.items() if key != "params"]
        for name, value in options:
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if isinstance(number, (int, float)):
                numbers[f"{name}{which}"] = number
            elif isinstance(value, (tuple, list)):
                options += [(f"{name}[{place}]", item) for place, item in enumerate(value)]
    if len(numbers) <= _MOST_OPTIONS:
        return numbers
    names = list(numbers)
    reported = {name: numbers[name] for name in names[:_MOST_OPTIONS]}
    reported["digest of the other options"] = hash(tuple(numbers[name] for name in names[_MOST_OPTIONS:]))
    return reported


# ---------------------------------------------------------------------- inputs of self(x)

# Share of a tensor's norm. Workers on unlike machines compute nearly the same; other samples are far from it.
_TOLERANCE = 1e-2

Fingerprint: TypeAlias = tuple[bytes, list[tuple[float, float]]]
"""A digest of all that is exact, and of each tensor of numbers its norm and a projection."""


def fingerprint(inputs: Sequence[Any]) -> Fingerprint:
    """A fingerprint of ``inputs`` in a few bytes: see :func:`alike`."""
    leaves, structure = tree_flatten(list(inputs))
    exact, near = hashlib.sha256(str(structure).encode()), []
    for leaf in leaves:
        exact.update(type(leaf).__qualname__.encode())
        if not isinstance(leaf, Tensor):
            with contextlib.suppress(Exception):  # what cannot be pickled stays in this process; its type must do
                exact.update(pickle.dumps(leaf))
            continue
        exact.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
        flat = leaf.detach().cpu().flatten()
        if not (flat.is_floating_point() or flat.is_complex()):
            exact.update(flat.contiguous().numpy().tobytes())
            continue
        real = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
        values = torch.nan_to_num(real.double(), nan=1.0, posinf=2.0, neginf=3.0)
        weights = torch.cos(torch.arange(values.numel(), dtype=torch.float64))
        near.append((float(values.norm()), float(values @ weights)))
    return exact.digest(), near


def alike(a: Fingerprint, b: Fingerprint) -> bool:
    """Whether inputs with these fingerprints are equal but for rounding."""
    return a[0] == b[0] and all(
        max(abs(norm - other_norm), abs(projection - other)) <= _TOLERANCE * max(norm, other_norm)
        for (norm, projection), (other_norm, other) in zip(a[1], b[1], strict=True)
    )
