"""Messages of workers and coordinator: frozen values, one connection per worker.

The type hints are the schema of the wire format (:mod:`~lightning_recycle.control.network.wire_format`): every field is
data that msgpack has, an enum, or a dataclass of such fields. What only workers and the launching process understand is
``bytes``, which the coordinator passes on and never opens.

Every name here is public; import the module, not the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from lightning_recycle.planning.costs import Footprint, StageProfile
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.program import Program
from lightning_recycle.planning.splitting import SplitTrial

Number: TypeAlias = bool | int | float
"""A number that keeps its type: integers are counters and digests, compared exactly."""

Setting: TypeAlias = bool | int | float | str | None
"""The value of an option."""

Payload: TypeAlias = tuple[bytes, ...]
"""A pickled value that the coordinator passes on unread, in pieces (see :mod:`lightning_recycle.control.client`)."""

Cuts: TypeAlias = tuple[int | float, ...]
"""A layout of the layers: stage s has the parts from ``cuts[s]`` up to ``cuts[s + 1]``. Where a bound lies within a
part, the stages on both sides share it (:mod:`~lightning_recycle.planning.cuts`). Empty: as at the
start.
"""

FINITE = "finite"
"""The name under which a worker tells whether what it computed is finite, where that is the question."""


IS_FINITE, NOT_FINITE = b"finite", b"not finite"


OUTSIDE = -1
"""The step of what is raised outside of steps: its operation names the code, and any step may meet it."""


class StepState(Enum):
    """State of a worker in a step."""

    RUNNING = "it does not yet hold its stage's complete gradient; what it has computed may be dropped"
    REDUCED = "it holds that gradient: it can apply the step, or give the gradient to its peers"
    GUESSED = "it has applied the step before it knows the other stages' part of it: nothing that follows is kept"
    APPLIED = "its parameters have the next version; the shadow has those of before"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """Status of a survivor.

    Args:
        column: its column (:class:`~lightning_recycle.planning.grid.Positions`); with one member per position, its
            stage.
        version: optimizer steps applied to its parameters.
        reduced: whether it holds the complete reduced gradient of step ``version``.
        unsettled: whether it has applied its newest step on a guess that nothing has confirmed yet; then it is not
            ``reduced``.
        has_shadow: whether it keeps the parameters of the version before, and can compute with them.
    """

    column: int
    version: int
    reduced: bool
    unsettled: bool = False
    has_shadow: bool = True

    def state_in(self, step: int) -> StepState:
        """Its state in ``step``."""
        if self.version > step:
            return StepState.GUESSED if self.unsettled and self.version == step + 1 else StepState.APPLIED
        return StepState.REDUCED if self.reduced and self.version == step else StepState.RUNNING

    @property
    def commit_step(self) -> int | None:
        """The step to whose commit it contributes, if any."""
        return self.version if self.reduced else self.version - 1 if self.unsettled else None


@dataclass(frozen=True, slots=True)
class Adoption:
    """Workers of ``column`` that lack the gradient of ``step`` get it from ``donor``.

    All take part.
    """

    column: int
    step: int
    donor: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision about the step at which all survivors go on.

    Args:
        version: the committed version v; a worker below applies what it holds or adopts, then step v runs.
        ahead: the columns whose part of step v is done.
        adoptions: in the order in which a column carries them out.
    """

    version: int
    ahead: frozenset[int]
    adoptions: tuple[Adoption, ...]


# ---------------------------------------------------------------------- worker -> coordinator


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Run that a script asks for, from a worker without a launching process.

    Args:
        entry: the Trainer's entry point: "fit", "validate", ...
        grid: the grid.
        microbatches_given: whether the script itself says how many micro-batches; otherwise it takes another number.
        settings: the options that all workers must agree on, by names such as "recovery.rebalance": see
            :data:`~lightning_recycle.control.options.GROUPS`. What is missing has its default.
        needs_launcher: options that only a launching process can carry out, as the user wrote them.
        members: the processes of each position of the grid.
        device: the kind of device that the worker computes on, by torch's name; empty if it does not say.
    """

    entry: str
    grid: Grid
    microbatches_given: bool
    settings: Mapping[str, Setting] = field(default_factory=dict)
    needs_launcher: tuple[str, ...] = ()
    members: int = 1
    device: str = ""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on a connection.

    Args:
        rank: the position that the worker was started for; None for one started by hand, which is assigned one.
        pid: its process id.
        joining: whether the training may have begun without it: it enters at a step boundary.
        node: its machine's name; workers of one machine are put into the same pipelines.
        wants: what its script wants, if it was started by hand.
        token: a random name of the process, which tells it from any other that holds its position.
        space: a name for what its process id means, the same for processes that see each other; "" if unknown.
    """

    rank: int | None
    pid: int
    joining: bool = False
    node: str = ""
    wants: RunRequest | None = None
    token: str = ""
    space: str = ""


@dataclass(frozen=True, slots=True)
class Activity:
    """Activity of a worker's main thread.

    Args:
        step: the optimizer step.
        operation: its name, for people.
        waiting_for: what it waits for from other processes, for people; empty while it does something itself.
        since: when that began, in seconds of the worker's monotonic clock.
        kind: the operation's kind if its usual duration is known ("F", "B", ...), else empty.
        coordinated: whether what it waits for comes from the coordinator, and not from another worker.
        microbatch: the index in the global batch of the micro-batch that it works on; -1 if it works on none.
    """

    step: int
    operation: str
    waiting_for: str
    since: float
    kind: str = ""
    coordinated: bool = False
    microbatch: int = -1


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life, with what the main thread does.

    Args:
        rank: the worker's rank.
        generation: the generation that it has entered.
        activity: what its main thread does.
        seconds: for how long.
        begun: the newest step that it has begun.
    """

    rank: int
    generation: int
    activity: Activity
    seconds: float = 0.0
    begun: int = -1


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker that joins later is set up; it waits to be let in."""

    rank: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The worker was told to end (SIGTERM) and leaves at the next step boundary.

    ``with_run``: whether the run is to end at a step boundary once all workers say so. Otherwise the last holders of
    the stages go on until somebody replaces them.
    """

    rank: int
    with_run: bool = False


@dataclass(frozen=True, slots=True)
class EndRun:
    """A worker's job is about to end: all are to end after their present step."""

    rank: int


@dataclass(frozen=True, slots=True)
class Paused:
    """The answer to :class:`Pause`: the newest step that the worker has begun.

    It begins no other until told where to stop.
    """

    rank: int
    generation: int
    step: int
    number: int = 0


class Milestone(Enum):
    """Points that workers reach in a generation.

    ``CONNECTED``: its communicator is complete. ``ENTERED``: a worker that joins has the state of its stage.
    ``LAYERS_HELD``: it holds all layers that it is to have in the layout for which the generation began, besides its
    own. ``AT_BOUNDARY``: it has applied all steps before ``step`` and waits at its beginning, as :class:`Boundary`
    asked. ``PASSED``: in ``step`` workers check each other's computations, and it has found nothing, or has nothing to
    check. ``IN_HOOK``: it is about to run collectives of its position in a hook, for the ``step``-th time.
    """

    CONNECTED = "connected"
    ENTERED = "entered"
    LAYERS_HELD = "layers held"
    AT_BOUNDARY = "at boundary"
    PASSED = "passed"
    IN_HOOK = "in hook"


@dataclass(frozen=True, slots=True)
class Reached:
    """The worker has reached ``milestone`` in ``generation``; ``step``, if it has one."""

    rank: int
    generation: int
    milestone: Milestone
    step: int = -1


@dataclass(frozen=True, slots=True)
class Restored:
    """Before the first step: the worker starts from a checkpoint of ``version`` steps.

    All others do, too.
    """

    rank: int
    version: int


class SavePhase(Enum):
    """Kinds of history events of a checkpoint; ``BEGUN`` if the training does not wait."""

    BEGUN = "checkpoint_begun"
    COMPLETE = "saved"
    GIVEN_UP = "checkpoint_given_up"


@dataclass(frozen=True, slots=True)
class SaveBegun:
    """The sender is at the step boundary of a batch of checkpoints, as all workers will be.

    Args:
        rank: the sender.
        batch: the number of the batch.
        version: how many steps the checkpoints hold.
        writer: the rank that gives the files their names.
        paths: where they are to be.
        weights_only: for each, whether no run can go on from it.
        mid_step: whether they are written before their step is over.
        in_background: whether the training goes on meanwhile.
        stalled: seconds for which checkpoints have held up the sender so far.
    """

    rank: int
    batch: int
    version: int
    writer: int
    paths: tuple[str, ...]
    weights_only: tuple[bool, ...]
    mid_step: bool = False
    in_background: bool = True
    stalled: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveAnnounced:
    """Checkpoint ``index`` is whole at ``temporary``; the writer asks to name it.

    ``number``: as in :class:`Confirm`, which it includes.
    """

    rank: int
    number: int
    batch: int
    index: int
    temporary: str


@dataclass(frozen=True, slots=True)
class SaveFailure:
    """Why a checkpoint was not written.

    Args:
        is_refusal: whether it was the file system that refused; otherwise a worker was lost.
        remedy: a sentence on what helps; empty if nothing is known.
    """

    text: str
    is_refusal: bool = False
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class SaveEnded:
    """The writer has named checkpoint ``index`` of its batch, or could not write it.

    ``stalled``: as in :class:`SaveBegun`. ``facts``: measurements of the writer, opaque.
    """

    rank: int
    batch: int
    index: int
    failure: SaveFailure | None = None
    stalled: float = 0.0
    facts: Payload | None = None


@dataclass(frozen=True, slots=True)
class SaveStatus:
    """Checkpoints as of a message that is the same for all workers.

    Args:
        holders: by column, the worker that writes its state at the next boundary; the first one of the last stage gives
            the files their names. Empty if none can be named.
        generation: that in which they were alive.
        batch: the newest batch that is over; -1 for none.
        failures: for each of its checkpoints, why there is none.
        unnamed: by index, the temporary paths of whole files whose writer was lost before they surely had their names.
        facts: measurements of the writer, opaque.
    """

    holders: tuple[int, ...] = ()
    generation: int = -1
    batch: int = -1
    failures: tuple[SaveFailure | None, ...] = ()
    unnamed: Mapping[int, str] = field(default_factory=dict)
    facts: Payload | None = None


@dataclass(frozen=True, slots=True)
class Parcel:
    """Part of a background checkpoint, passed on by the coordinator.

    It is lost with the sender, the receiver or the coordinator.

    ``to``: the rank of the other worker. ``batch``: the number of the checkpoints. ``key``: what it waits for.
    """

    rank: int
    to: int
    batch: int
    key: str
    payload: Payload | None


@dataclass(frozen=True, slots=True)
class Confirm:
    """Asks whether the worker is still a member; only a member gets the answer."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class Report:
    """A survivor stopped for ``generation`` and says what it holds.

    ``commit``: its contribution to the commit of its step, if it is REDUCED and commits are asked for; if it has
    applied its newest step on a guess, that to the commit of this step. ``begun``: the newest step that it has begun.
    ``cuts``: the layout of the layers that it has, see :data:`Cuts`. ``hooks``: how often it has run collectives of its
    position in hooks.
    """

    rank: int
    generation: int
    status: WorkerStatus
    commit: Payload | None = None
    begun: int = -1
    cuts: Cuts = ()
    hooks: int = 0


@dataclass(frozen=True, slots=True)
class Broken:
    """Communication failed in ``generation`` though no failure was announced.

    ``unreachable``: ranks that the worker could not reach, if it was told to check its links (:class:`Regroup`).
    """

    rank: int
    generation: int
    reason: str
    unreachable: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses of micro-batches of ``step``, by global index.

    Sent before any gradient of the last of them.

    ``outputs``: what hooks did with the outputs, by the same index, if there are such hooks; passed on unread.
    ``generation``: the one in which all must have passed the step (:class:`Reached`); in others these do not count.
    None: they count as they are.
    """

    rank: int
    step: int
    losses: Mapping[int, float]
    outputs: Mapping[int, bytes] = field(default_factory=dict)
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """Checksums of what a worker holds after a step, the same for its peers.

    Args:
        sums: 16 bytes for each of "parameters" and "optimizer state".
        interval: after how many steps it wants to check again, so that the checks cost little.
        device: its device, by the name that its machine knows it by.
    """

    sums: Mapping[str, bytes]
    interval: int
    device: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Numbers that a worker holds after a step, by name, to be compared.

    Args:
        everywhere: equal on all workers, such as counters.
        inputs: equal on all workers, and the gradients of the step depend on them, such as the samples.
        stage: equal within a stage, such as options of the optimizer; not all workers need report the same names.
        checked: checksums that are equal within a stage, after some steps.
    """

    everywhere: Mapping[str, Number] = field(default_factory=dict)
    stage: Mapping[str, Number] = field(default_factory=dict)
    checked: Checked | None = None
    inputs: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Applied:
    """The worker has applied ``step``.

    Args:
        rank: the worker's rank.
        step: the step.
        operation_seconds: its mean time by kind of operation, without waiting, smoothed over steps.
        step_seconds: the mean times in this step alone, of the kinds that occurred.
        facts: values that must be equal elsewhere.
        peak_bytes: the most memory that it has held so far; 0 if that is not known.
    """

    rank: int
    step: int
    operation_seconds: Mapping[str, float]
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    facts: Facts = Facts()
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Differs:
    """A joined worker differs from its donor after ``step`` in ``cause``, and ends."""

    rank: int
    step: int
    cause: str


@dataclass(frozen=True, slots=True)
class Profiled:
    """Profile of a stage over ``steps`` steps, and of the link to the next stage.

    0 without a link.
    """

    stage: StageProfile
    latency: float
    bandwidth: float
    steps: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The worker is REDUCED in ``step``; ``payload`` reaches all with the answer.

    The answer comes when all are.

    Only if a stage must know something of the others before it steps, or the optimizer is not staggered. ``guesses``:
    whether it steps before it knows that, on a guess that the answer may prove wrong.
    """

    rank: int
    generation: int
    step: int
    payload: Payload | None
    guesses: bool = False


@dataclass(frozen=True, slots=True)
class Undo:
    """A guess about ``step`` was wrong, as all reports show.

    What was computed with it since is worthless, and the same workers connect again.
    """

    rank: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Arrive:
    """The worker's part of control collective ``number``; all must agree on ``name``.

    With a ``generation`` the part counts only in that generation, and is recomputed in the next. ``begun``: the newest
    step that the worker has begun.
    """

    rank: int
    number: int
    name: str
    payload: Payload | None
    generation: int | None = None
    begun: int = -1


@dataclass(frozen=True, slots=True)
class StopWish:
    """Whether the worker stops training at stop point ``point``
    (:mod:`~lightning_recycle.control.protocol.control_collectives`).

    If so, its ``trainer.should_stop`` is set there, and it waits to hear whether all stop (:class:`StopVerdict`). If
    not, it is past the point, and answers :class:`StopRequested`.
    """

    rank: int
    point: int
    stops: bool = True


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception that a fault of the machine may explain; :class:`Judged` answers.

    If the worker is to be evicted, its connection closes instead.

    Args:
        rank: the worker's rank.
        generation: the generation that it has entered; it raises at most once in each.
        step: the step whose work raised; -1 outside of steps.
        operation: the operation, or outside of steps the place in the code. With the step it is the same on whatever
            worker does that work.
        summary: class and message, for people.
        traceback: for people.
        exact: whether this worker can do that work again with the same result.
        sticky: whether the process cannot go on, whatever the cause: its device is lost to it.
    """

    rank: int
    generation: int
    step: int
    operation: str
    summary: str
    traceback: str
    exact: bool
    sticky: bool


@dataclass(frozen=True, slots=True)
class Disputed:
    """Recomputing micro-batch ``microbatch`` of peer ``other`` gave other bits.

    Or the worker's own, twice, and it got other bits than at first. It goes on in a newer generation only, as nobody
    may commit the step.

    Args:
        rank: the worker.
        generation: the generation that it has entered.
        step, microbatch: what it computed; the index in the global batch.
        other: the peer, or the worker itself.
        mine, theirs: the checksums of what it got, and of what the other had got, by the same names. Equal ones of the
            worker itself are in question because of what they are.
        device: the worker's device, by the name that its machine knows it by.
    """

    rank: int
    generation: int
    step: int
    microbatch: int
    other: int
    mine: Mapping[str, bytes]
    theirs: Mapping[str, bytes]
    device: str = ""


@dataclass(frozen=True, slots=True)
class Voted:
    """The worker has computed a disputed micro-batch (:class:`Vote`), twice.

    It goes on in a newer generation only.

    ``sums``: what it got; ``varies``: the layer or the results that had other bits the second time, empty if none had.
    """

    rank: int
    generation: int
    sums: Mapping[str, bytes]
    varies: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A loss, or the gradient of a stage, is not finite.

    The worker goes on in a newer generation only, as nobody may commit the step before it is known whose that is.

    ``microbatch``: whose loss it is, the index in the global batch; -1 for a gradient.
    """

    rank: int
    generation: int
    step: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Incomparable:
    """Computations cannot be compared in this run, for ``cause``.

    The worker gets other bits when it computes the same micro-batch twice, or cannot send what it computes with.
    """

    rank: int
    cause: str


@dataclass(frozen=True, slots=True)
class Crash:
    """The worker ends with an exception.

    ``fault`` tells an infrastructure failure, which peers survive, from the user's exception, which ends the run.
    """

    rank: int
    fault: bool
    summary: str
    exception: bytes | None
    traceback: str


@dataclass(frozen=True, slots=True)
class LayoutWanted:
    """The user's code in this worker wants the layers to lie as ``cuts``."""

    rank: int
    cuts: Cuts


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Measurements of the layers of a worker, in their order.

    Args:
        cuts: the layout under which it has them.
        first: the first of them.
        seconds: of a forward, relative to each other.
        output_bytes: of the output of one micro-batch.
        parameter_bytes: of parameters, buffers and gradients.
        optimizer_bytes: of the optimizer's state.
        trains: whether it has parameters that are trained.
        tied: of the whole model, groups of layers that share a weight.
        whole: why stages cannot share a layer; empty if they can.
        fixed: why they cannot go to another worker; empty if they can.
    """

    cuts: Cuts
    first: int
    seconds: tuple[float, ...]
    output_bytes: tuple[int, ...]
    parameter_bytes: tuple[int, ...]
    optimizer_bytes: tuple[int, ...]
    trains: tuple[bool, ...]
    tied: tuple[tuple[int, ...], ...] = ()
    fixed: str = ""
    whole: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a worker has measured in its first steps, and not told before.

    ``footprint``: its memory. ``trial``: the cost of its split backwards.
    """

    rank: int
    profiled: Profiled | None = None
    footprint: Footprint | None = None
    layers: LayerFacts | None = None
    trial: SplitTrial | None = None


@dataclass(frozen=True, slots=True)
class Publish:
    """A key of a worker that others of ``generation`` look up to connect to it."""

    rank: int
    generation: int
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class LookUp:
    """Request for values that workers of ``generation`` publish under ``keys``.

    :class:`Found` answers.
    """

    rank: int
    generation: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Returned:
    """First message of a worker that has lost its coordinator.

    It has all that only this worker knows, for a coordinator that was started again
    (:mod:`~lightning_recycle.control.journal`).

    Args:
        rank: its position.
        pid, node, token, space: as in :class:`Hello`.
        run: the run that it is in, see :class:`Enrolled`.
        incarnation: that of its :class:`Assign`.
        joining: whether the training had begun without it then.
        wants: what its script wants, with the grid that it was told.
        generation: the newest that was announced to it; -1 before the first.
        roster, leader, moved: of that generation.
        resumed: the newest generation in which it was told where all go on; -1 for none.
        was_parked: whether it was parked since then.
        cuts: the layout of that one.
        applied: the newest step that it has applied, or got with its state; -1 for none.
        joins_after: the step after which the newest generation gives it its state; -1 for none.
        restored: the steps of the checkpoint that it goes on from; 0 without one.
        next_collective: the first control collective that it has no answer to.
        facts: what it said of the newest steps that it applied, one after the other, the newest last.
        losses: what it said of steps whose loss it was not told.
        step_losses: the newest that it has received.
        arrival: its part of a control collective that it waits for, whatever generations come.
        answer: the newest answer to a control collective that others may lack.
        known: what it was told of the newest commit, also by a recovery.
        request: its wish to stop, if nobody has answered yet.
        verdict: what it was told of wishes to stop, at the latest point.
        raised: its exception, likewise.
        confirm: its question whether it is a member, likewise.
        save: the newest batch of background checkpoints that it has begun, unless it was told how that ended.
        announced, saves_ended: what it said of that batch as its writer.
        hook: that it has entered a hook together with its siblings, of which some may not know.
        is_ready: whether it has said that it is set up and waits to be let in.
        entered: whether it has said that it has got its state, if the training had begun without it.
        leave: its wish to leave, if it has said so.
        ends_run: whether it has said that all are to end.
        measured: all that it has told of what it measured.
    """

    rank: int
    pid: int
    node: str
    token: str
    space: str
    run: str
    incarnation: int = 0
    joining: bool = False
    wants: RunRequest | None = None
    generation: int = -1
    roster: tuple[int, ...] = ()
    leader: int = -1
    moved: Mapping[int, int] = field(default_factory=dict)
    resumed: int = -1
    was_parked: bool = False
    cuts: Cuts = ()
    applied: int = -1
    joins_after: int = -1
    restored: int = 0
    next_collective: int = 0
    facts: tuple[Applied, ...] = ()
    losses: tuple[Losses, ...] = ()
    step_losses: tuple[StepLoss, ...] = ()
    arrival: Arrive | None = None
    answer: Answer | None = None
    known: Committed | None = None
    request: StopWish | None = None
    verdict: StopVerdict | None = None
    raised: Raised | None = None
    confirm: Confirm | None = None
    save: SaveBegun | None = None
    announced: tuple[SaveAnnounced, ...] = ()
    saves_ended: tuple[SaveEnded, ...] = ()
    hook: HookEntered | None = None
    is_ready: bool = False
    entered: bool = False
    leave: Leave | None = None
    ends_run: bool = False
    measured: Measured | None = None


@dataclass(frozen=True, slots=True)
class FaultInjected:
    """An injected fault is about to happen in this worker; ``time`` since the epoch."""

    rank: int
    kind: str
    operation: str
    time: float


# ---------------------------------------------------------------------- coordinator -> worker


@dataclass(frozen=True, slots=True)
class Enrolled:
    """First message of a coordinator that may be restarted: its workers wait for it.

    ``run``: a random name of the run.
    """

    run: str


@dataclass(frozen=True, slots=True)
class Assign:
    """Tells a worker started by hand which position it takes.

    Args:
        rank: the position.
        incarnation: how many processes held it before.
        joining: whether the training has begun.
        grid: the grid of the run.
        setup: what the launching process passes to it; None from a coordinator without one.
        staggered: whether a stage may step before the others hold their gradients.
        takes_results: whether somebody wants what workers deliver in the end.
        members: the processes of each position of the grid.
    """

    rank: int
    incarnation: int
    joining: bool
    grid: Grid
    setup: Payload | None = None
    staggered: bool = True
    takes_results: bool = False
    members: int = 1


@dataclass(frozen=True, slots=True)
class Unfit:
    """Answer to a :class:`Hello` that cannot be in this run: ``why``, and a remedy.

    ``late``: the run that it came for is over, and the others are at another entry point.
    """

    why: str
    late: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """A change at a step boundary: report where you are, and begin no further step.

    Until told. ``number`` counts the pauses of the generation from 0.
    """

    generation: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Boundary:
    """All stop at the beginning of ``step``, which none has begun: nothing is redone.

    With a ``program`` nobody stops: all run that of another schedule from that step on, until the next generation.
    """

    generation: int
    step: int
    program: Program | None = None


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The worker is a member."""

    number: int


@dataclass(frozen=True, slots=True)
class Judged:
    """Answer to :class:`Raised`: the exception is the user's ``own``, or work again.

    In a generation newer than ``generation``, in which it was raised.
    """

    generation: int
    own: bool


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A worker asks to stop at ``point``: who goes on there is to say so.

    At once, or when it comes there.
    """

    point: int


@dataclass(frozen=True, slots=True)
class StopVerdict:
    """Answer to :class:`StopWish`: whether all ask to stop at ``point``.

    If not, all stop after one of the next steps (:attr:`StepLoss.after_step`).
    """

    point: int
    agreed: bool


@dataclass(frozen=True, slots=True)
class Regroup:
    """Stop and report: ``generation`` begins, with the live ranks ``roster``.

    A worker that is not in ``roster`` is parked: it stops, keeps what it holds, does not report, and waits for a
    generation with it. ``leader`` speaks for the run. ``check_links``: communication broke though nobody died; before
    you connect, check whom you can reach. ``unproven``: a step whose results may be wrong: drop what you hold of it; -1
    for none. ``moved``: see :class:`~lightning_recycle.planning.grid.Positions`.
    """

    generation: int
    roster: tuple[int, ...]
    leader: int = -1
    check_links: bool = False
    unproven: int = -1
    moved: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Vote:
    """Workers ``voters`` of a stage compute a disputed micro-batch again.

    They answer :class:`Voted`; ``recorder`` gives them the inputs.
    """

    recorder: int
    voters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """All survivors reported; connect, do your actions, and go on with the plan."""

    generation: int
    roster: tuple[int, ...]
    decision: Decision
    program: Program | None
    """Program of this worker for a step. The coordinator's shell adds it: each worker has another one."""
    commits: Mapping[int, Payload | None]
    """Contributions of the stages to the commit of step ``decision.version - 1``, by stage, as far as known; or of all
    stages to that of ``decision.version``, if ``settled``."""
    settled: bool = False
    """Whether step ``decision.version`` runs again although a worker has applied it as all contributed to it."""
    donors: Mapping[int, int] = field(default_factory=dict)
    """For each rank that joins, the peer that gives it its state."""
    cuts: Cuts = ()
    """The layout that all have in this generation. Who holds the layers of this one besides another takes it up."""
    becomes: Cuts = ()
    """If not empty: no step runs in this generation. All get what they lack of this layout, besides what they have."""
    strangers: tuple[int, ...] = ()
    """The ranks that join with another layout."""
    vote: Vote | None = None
    """Computation of some before anything else, while the others wait for the next generation."""
    inspects: int = -1
    """The step in which all look where values begin that are not finite; -1 for none."""
    excused: int = -1
    """Values of steps up to this one that are not finite are the model's."""


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to :class:`LookUp`, once all of its keys are published: their values."""

    generation: int
    values: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class HookEntered:
    """All members of a position are in a hook for the ``number``-th time.

    They are :attr:`Milestone.IN_HOOK`: none of them stops before the hook is over, as long as all live.
    """

    generation: int
    number: int


@dataclass(frozen=True, slots=True)
class Committed:
    """All are REDUCED in ``step``: apply it.

    Or all were before a loss: a worker that does the step again applies it as soon as it is REDUCED.

    ``payloads``: one of each stage, by stage. ``guessed``: whether some have applied it already, on a guess.
    """

    generation: int
    step: int
    payloads: Mapping[int, Payload | None]
    guessed: bool = False


class AfterStep(Enum):
    """Next action of all after a step.

    ``GO_ON``: they go on. ``STOP``: they stop training early, as if ``trainer.should_stop`` were set on all. ``END``:
    they save what is wanted, and the run ends.
    """

    GO_ON = "go on"
    STOP = "stop"
    END = "end"


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Mean ``loss`` of ``step``, summed in the order of the micro-batches.

    ``counters``: the run's counters so far (failures, seconds of recovery, ...), the same for all workers. ``outputs``:
    those of all micro-batches, see :class:`Losses`. ``leader_applied``: the newest step that the leader has applied.
    ``after_step``: the same for all workers. ``check_next``: whether the next step ends with a check of what they hold.
    ``saves``: as of this moment, the same for all workers.
    """

    step: int
    loss: float
    counters: Mapping[str, float] = field(default_factory=dict)
    leader_applied: int = -1
    outputs: Mapping[int, bytes] = field(default_factory=dict)
    after_step: AfterStep = AfterStep.GO_ON
    check_next: bool = False
    saves: SaveStatus = SaveStatus()


@dataclass(frozen=True, slots=True)
class Answer:
    """Control collective ``number`` is complete: payloads by rank, the same for all.

    Of the results, which stay with the coordinator, only whether each worker delivered some.

    ``leader``: the rank that speaks for the run at that moment. ``saves``: as of that moment.
    """

    number: int
    payloads: Mapping[int, Payload | bool | None]
    leader: int = -1
    saves: SaveStatus = SaveStatus()


@dataclass(frozen=True, slots=True)
class Alive:
    """Sign of life of the coordinator, given up after ``timeout`` seconds of silence."""

    timeout: float = 60.0


class StopReason(Enum):
    """Reason why a worker has to leave.

    How the run ended, that it left at a step boundary, as it asked, or that it was lost: declared dead, or of another
    run.
    """

    FINISHED = "Finished"
    LEFT = "Left"
    LOST = "Lost"
    ENDED = "Ended"
    STAGE_LOST = "StageLost"
    CRASHED = "Crashed"
    FAILED = "Failed"

    @classmethod
    def of(cls, outcome: Any) -> StopReason:
        """The reason that corresponds to an outcome of the run."""
        return cls(type(outcome).__name__)


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is over, or goes on without this worker; leave."""

    reason: StopReason


# ---------------------------------------------------------------------- who says what

FROM_WORKERS: tuple[type[Any], ...] = (
    Heartbeat,
    Ready,
    Leave,
    EndRun,
    Paused,
    Reached,
    Restored,
    SaveBegun,
    SaveAnnounced,
    SaveEnded,
    Parcel,
    Confirm,
    Report,
    Broken,
    Losses,
    Applied,
    Differs,
    Measured,
    Commit,
    Undo,
    Arrive,
    StopWish,
    Raised,
    Disputed,
    Voted,
    NotFinite,
    Incomparable,
    Crash,
    LayoutWanted,
    Publish,
    LookUp,
    FaultInjected,
)
"""Messages of a worker with a position; its first message is a :class:`Hello`."""

FROM_SPARES: tuple[type[Any], ...] = (Heartbeat, Leave, Crash)
"""Messages of a worker that waits for a position."""

FIRST: tuple[type[Any], ...] = (Hello, Returned)
"""First messages of a worker."""

TO_WORKERS: tuple[type[Any], ...] = (
    Enrolled,
    Assign,
    Unfit,
    Pause,
    Boundary,
    Confirmed,
    Regroup,
    Resume,
    Committed,
    StepLoss,
    Answer,
    StopRequested,
    StopVerdict,
    Judged,
    Found,
    HookEntered,
    Parcel,
    Alive,
    Stop,
)
"""Messages of the coordinator."""
