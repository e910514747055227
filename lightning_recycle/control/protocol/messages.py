"""Messages of workers and coordinator: frozen values, one connection per worker.

The type hints are the schema of the wire format (:mod:`~lightning_recycle.control.network.connection`): every field is
data that msgpack has, an enum, or a dataclass of such fields. What only workers and the launching process understand is
``bytes``, which the coordinator passes on and never opens.

Every name here is public; import the module, not the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from typing import Any, TypeAlias

from lightning_recycle.planning.costs import Footprint, StageProfile
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.program import Program
from lightning_recycle.planning.split_backward import SplitTrial

Number: TypeAlias = bool | int | float
"""A number that keeps its type: integers are counters and digests, compared exactly."""

Setting: TypeAlias = bool | int | float | str | None
"""The value of an option."""

Payload: TypeAlias = tuple[bytes, ...]
"""A pickled value that the coordinator passes on unread, in pieces (see :mod:`lightning_recycle.control.client`)."""

Cuts: TypeAlias = tuple[int | float, ...]
"""A layout of the layers: stage s has the parts from ``cuts[s]`` up to ``cuts[s + 1]``. Where a bound lies within a
part, the stages on both sides share it (:mod:`~lightning_recycle.planning.layer_cuts`). Empty: as at the
start.
"""

FINITE = "finite"
"""The name under which a worker tells whether what it computed is finite, where that is the question."""


IS_FINITE, NOT_FINITE = b"finite", b"not finite"


RECOVER = "RECOVER"
"""The kind of a worker's own work during a recovery, beside those of the operations of a schedule."""


OUTSIDE = -1
"""The step of what is raised outside of steps: its operation names the code, and any step may meet it."""


@dataclass(frozen=True, slots=True)
class FromWorker:
    """A message of the worker at ``rank``."""

    rank: int


class FromNonMember:
    """Marks messages that come also from a worker about to join, or just lost."""

    __slots__ = ()


class FromAnyThread:
    """Marks messages of other threads than a worker's main thread."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ToWorker:
    """A message of the coordinator."""


class StepState(Enum):
    """State of a worker in a step, as :meth:`WorkerStatus.state_in` derives it.

    Acts of that worker change it:

    - RUNNING: REDUCE, `Adopt` (if it lacks the gradient): REDUCED; `Take`: RUNNING in the committed step
    - REDUCED: STEP with `StepLoss` (and `Committed`, if stages commit), `Apply`: APPLIED; STEP without the `Committed`
      that it needs: SPECULATIVE; `Forget`, or `forget_gradient` at the start of a recovery, if its generation drops the
      step or its own checks are open (`leaves_open`): RUNNING
    - SPECULATIVE: `confirm` with a `Committed` that allows the step, `Confirm`: APPLIED; `undo`, if it does not: the
      same, and `Confirm` of the next generation makes STEP again
    - APPLIED: at once RUNNING in the next step; `Serve`, from the shadow: the same
    """

    RUNNING = "it does not yet hold its stage's complete gradient; what it has computed may be dropped"
    REDUCED = "it holds that gradient: it can apply the step, or give the gradient to its peers"
    SPECULATIVE = "it has applied the step before it knows the other stages' part of it: nothing that follows is kept"
    APPLIED = "the step counts as applied and is never redone; a shadow, if kept, has the parameters of before"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """Status of a survivor.

    Attributes:
        column: its column (:class:`~lightning_recycle.planning.grid.Positions`); with one member per position, its
            stage.
        version: steps applied to its parameters; with gradient accumulation, batches.
        reduced: whether it holds the complete reduced gradient of step ``version``.
        speculative: whether its newest step is speculative and not yet confirmed; then it is not ``reduced``.
        has_shadow: whether it can compute with the parameters of the version before.
    """

    column: int
    version: int
    reduced: bool
    speculative: bool = False
    has_shadow: bool = True

    def state_in(self, step: int) -> StepState:
        if self.version > step:
            return StepState.SPECULATIVE if self.speculative and self.version == step + 1 else StepState.APPLIED
        return StepState.REDUCED if self.reduced and self.version == step else StepState.RUNNING

    @property
    def commit_step(self) -> int | None:
        """The step to whose commit the worker contributes, if any."""
        return self.version if self.reduced else self.version - 1 if self.speculative else None


@dataclass(frozen=True, slots=True)
class Adoption:
    """Workers of ``column`` get the gradient of ``step`` from ``donor``, together."""

    column: int
    step: int
    donor: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Step at which all survivors go on.

    ``version``: the committed version v; a worker below applies the gradient that it holds or adopts, then step v runs.
    ``ahead``: the columns whose part of step v is done. ``adoptions``: in the order in which a column carries them out.
    """

    version: int
    ahead: frozenset[int]
    adoptions: tuple[Adoption, ...]


# ---------------------------------------------------------------------- worker -> coordinator


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Run that a script asks for, from a worker without a launching process.

    ``entry``: the Trainer's entry point, such as "fit". ``microbatches_given``: whether the script itself sets their
    number; otherwise it takes any. ``settings``: the options that all workers must agree on, by names such as
    "recovery.rebalance" (:data:`~lightning_recycle.control.options.GROUPS`); missing ones have their defaults.
    ``needs_launcher``: options that only a launching process can carry out, as the user wrote them. ``members``:
    processes per position. ``device``: its kind, by torch's name; empty if unknown.
    """

    entry: str
    grid: Grid
    microbatches_given: bool
    settings: Mapping[str, Setting] = field(default_factory=dict)
    needs_launcher: tuple[str, ...] = ()
    members: int = 1
    device: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """Process of a worker.

    ``token``: a random name. ``node``: its machine; workers of one machine are put into the same pipelines. ``space``:
    the same for processes that see each other's process ids; "" if unknown. ``incarnation``: the number of processes
    that held its position before.
    """

    token: str
    pid: int
    node: str = ""
    space: str = ""
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on a connection.

    ``rank``: None for a worker started by hand, which is assigned a position. ``joining``: whether the training may
    have begun without it; it enters at a step boundary.
    """

    rank: int | None
    process: Process
    joining: bool = False
    wants: RunRequest | None = None


@dataclass(frozen=True, slots=True)
class Activity:
    """Activity of a worker's main thread.

    ``operation``, ``waiting_for``: for people; the latter is empty while the thread does not wait for other processes.
    ``kind``: the operation's kind if its usual duration is known ("F", "B", ...), else empty. ``coordinated``: whether
    it waits for the coordinator, not for another worker. ``microbatch``: index in the global batch; -1 for none.
    """

    step: int
    operation: str
    waiting_for: str = ""
    kind: str = ""
    coordinated: bool = False
    microbatch: int = -1


@dataclass(frozen=True, slots=True)
class Heartbeat(FromWorker, FromNonMember, FromAnyThread):
    """Sign of life: the main thread has been at ``activity`` for ``seconds``.

    ``begun``: the newest step that the worker has begun.
    """

    generation: int
    activity: Activity
    seconds: float = 0.0
    begun: int = -1


@dataclass(frozen=True, slots=True)
class Ready(FromWorker, FromNonMember):
    """A worker that joins later is set up; it waits to be let in."""


@dataclass(frozen=True, slots=True)
class Leave(FromWorker, FromNonMember, FromAnyThread):
    """The worker got SIGTERM and leaves at the next step boundary.

    ``with_run``: the run ends at a step boundary once all workers have said so. Otherwise the last holders of the
    stages go on until they are replaced.
    """

    with_run: bool = False


@dataclass(frozen=True, slots=True)
class EndRun(FromWorker, FromNonMember, FromAnyThread):
    """A worker's job is about to end: all are to end after their present step."""


@dataclass(frozen=True, slots=True)
class Paused(FromWorker, FromAnyThread):
    """Answer to :class:`Pause`: the newest begun step; no other begins until told."""

    generation: int
    step: int
    number: int = 0


class Milestone(Enum):
    """Points that workers reach in a generation.

    ``CONNECTED``: its communicator is complete. ``ENTERED``: a joining worker has the state of its stage.
    ``LAYERS_HELD``: besides its own layers it holds all that it needs for the layout of the generation.
    ``AT_BOUNDARY``: it has applied all steps before ``step`` and waits at its beginning (:class:`Boundary`).
    ``PASSED``: its checks of other workers' computations in ``step`` found nothing. ``IN_HOOK``: it is about to run
    collectives of its position in a hook, for the ``step``-th time.
    """

    CONNECTED = "connected"
    ENTERED = "entered"
    LAYERS_HELD = "layers held"
    AT_BOUNDARY = "at boundary"
    PASSED = "passed"
    IN_HOOK = "in hook"


@dataclass(frozen=True, slots=True)
class Reached(FromWorker):
    """The worker has reached ``milestone`` in ``generation``; ``step``, if it has one."""

    generation: int
    milestone: Milestone
    step: int = -1


@dataclass(frozen=True, slots=True)
class Restored(FromWorker):
    """Before the first step: all start from a checkpoint of ``version`` steps."""

    version: int


class SavePhase(Enum):
    """Kinds of events of a checkpoint; ``BEGUN`` if the training does not wait."""

    BEGUN = "checkpoint_begun"
    COMPLETE = "saved"
    GIVEN_UP = "checkpoint_given_up"


@dataclass(frozen=True, slots=True)
class SaveBegun(FromWorker, FromNonMember):
    """The sender is at the step boundary of a batch of checkpoints, as all will be.

    ``version``: the number of steps in the checkpoints. ``writer``: the rank that names the files ``paths``.
    ``weights_only``: for each file, whether no run can resume from it. ``mid_step``: whether they are written before
    their step is over. ``in_background``: whether the training goes on meanwhile. ``stalled``: seconds for which
    checkpoints have held up the sender so far.
    """

    batch: int
    version: int
    writer: int
    paths: tuple[str, ...]
    weights_only: tuple[bool, ...]
    mid_step: bool = False
    in_background: bool = True
    stalled: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveAnnounced(FromWorker, FromNonMember, FromAnyThread):
    """Checkpoint ``index`` is whole at ``temporary``; the writer asks to name it.

    ``number``: as in :class:`MembershipQuery`, which it includes.
    """

    number: int
    batch: int
    index: int
    temporary: str


@dataclass(frozen=True, slots=True)
class SaveFailure:
    """Why a checkpoint was not written.

    ``is_refusal``: whether the file system refused; otherwise a worker was lost. ``remedy``: a sentence; empty if
    unknown.
    """

    text: str
    is_refusal: bool = False
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class SaveEnded(FromWorker, FromNonMember, FromAnyThread):
    """The writer has named checkpoint ``index`` of its batch, or could not write it.

    ``stalled``: as in :class:`SaveBegun`.
    """

    batch: int
    index: int
    failure: SaveFailure | None = None
    stalled: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveStatus:
    """Checkpoints as of a message that is the same for all workers.

    ``holders``: by column, the worker that writes its state at the next boundary; the first one of the last stage names
    the files. Empty if none can be named. ``generation``: that in which the holders were alive. ``batch``: the newest
    finished batch; -1 for none. ``failures``: for each of its checkpoints, why there is none. ``unnamed``: by index,
    temporary paths of whole files that their lost writer may not have named.
    """

    holders: tuple[int, ...] = ()
    generation: int = -1
    batch: int = -1
    failures: tuple[SaveFailure | None, ...] = ()
    unnamed: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parcel(FromWorker, FromAnyThread):
    """Part of background checkpoint ``batch`` for worker ``to``, under ``key``.

    The coordinator passes it on. It is lost with the sender, the receiver or the coordinator.
    """

    to: int
    batch: int
    key: str
    payload: Payload | None


@dataclass(frozen=True, slots=True)
class MembershipQuery(FromWorker, FromNonMember):
    """Asks whether the worker is still a member; only a member gets the answer."""

    number: int


@dataclass(frozen=True, slots=True)
class Report(FromWorker):
    """A survivor stopped for ``generation`` and reports what it holds.

    ``commit``: its contribution to the commit of its step, if it is REDUCED and commits are asked for; after a
    speculative step, that to the commit of this step. ``begun``: the newest step that it has begun. ``cuts``: its
    layout.
    """

    generation: int
    status: WorkerStatus
    commit: Payload | None = None
    begun: int = -1
    cuts: Cuts = ()


@dataclass(frozen=True, slots=True)
class Broken(FromWorker):
    """Communication failed in ``generation`` though no failure was announced.

    ``unreachable``: ranks that the worker could not reach, if it had to check its links (:class:`Regroup`).
    """

    generation: int
    reason: str
    unreachable: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Losses(FromWorker):
    """Losses of micro-batches of ``step`` by global index.

    Sent before any gradient of the last of them. ``outputs``: opaque records of hooks that saw outputs, by the same
    index. ``generation``: the losses count only if all pass the step (:class:`Reached`) in this generation; None: they
    count at once.
    """

    step: int
    losses: Mapping[int, float]
    outputs: Mapping[int, bytes] = field(default_factory=dict)
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """Checksums of the state that a worker shares with its peers after a step.

    ``sums``: 16 bytes for each of "parameters" and "optimizer state". ``interval``: the steps until the check that it
    wants next, so that checks cost little. ``device``: the name by which its machine knows it.
    """

    sums: Mapping[str, bytes]
    interval: int
    device: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Numbers of a worker after a step, by name, to be compared.

    ``everywhere``: equal on all workers, such as counters. ``inputs``: likewise, and the gradients of the step depend
    on them, such as the samples. ``stage``: equal within a stage, such as optimizer options; not all workers need
    report the same names. ``checked``: after some steps.
    """

    everywhere: Mapping[str, Number] = field(default_factory=dict)
    stage: Mapping[str, Number] = field(default_factory=dict)
    checked: Checked | None = None
    inputs: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Applied(FromWorker):
    """The worker has applied ``step``.

    ``operation_seconds``: its mean time by kind of operation, without waiting, smoothed over steps. ``step_seconds``:
    the means in this step alone. ``peak_bytes``: the most memory that it has held so far; 0 if unknown.
    """

    step: int
    operation_seconds: Mapping[str, float]
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    facts: Facts = Facts()
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Differs(FromWorker):
    """A joined worker differs from its donor after ``step`` in ``cause``, and ends."""

    step: int
    cause: str


@dataclass(frozen=True, slots=True)
class Profiled:
    """Profile of a stage over ``steps`` steps and of its link to the next; 0: no link."""

    stage: StageProfile
    latency: float
    bandwidth: float
    steps: int


@dataclass(frozen=True, slots=True)
class Commit(FromWorker):
    """The worker is REDUCED in ``step``; the answer brings all columns' payloads.

    Only if stages exchange facts before they step, or the optimizer is not staggered. The answer comes when all are
    REDUCED. ``speculative``: it steps before that; the answer may prove that wrong.
    """

    generation: int
    step: int
    payload: Payload | None
    speculative: bool = False


@dataclass(frozen=True, slots=True)
class Undo(FromWorker):
    """The speculation in ``step`` was wrong: drop its consequences and connect again."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Arrive(FromWorker):
    """The worker's part of control collective ``number``; all must agree on ``name``.

    With a ``generation`` the part counts only there and is recomputed in the next. ``begun``: the newest begun step.
    """

    number: int
    name: str
    payload: Payload | None
    generation: int | None = None
    begun: int = -1


@dataclass(frozen=True, slots=True)
class StopWish(FromWorker):
    """Whether the worker stops training at stop point ``point``.

    If so, its ``trainer.should_stop`` is set there, and it waits for :class:`StopVerdict`. If not, it is past the
    point, and answers :class:`StopRequested` (:mod:`~lightning_recycle.control.protocol.control_collectives`).
    """

    point: int
    stops: bool = True


@dataclass(frozen=True, slots=True)
class Raised(FromWorker):
    """An exception that a fault of the machine may explain; :class:`Judged` answers.

    If the worker is to be evicted, its connection closes instead. It raises at most once in a generation. ``step``: -1
    outside of steps. ``operation``: the operation, or outside of steps the place in the code; with the step it is the
    same on any worker that does this work. ``exact``: whether this worker can repeat the work with the same result.
    ``sticky``: whether the process has lost its device and cannot go on.
    """

    generation: int
    step: int
    operation: str
    summary: str
    traceback: str
    exact: bool
    sticky: bool


@dataclass(frozen=True, slots=True)
class Disputed(FromWorker):
    """Recomputing micro-batch ``microbatch`` of peer ``other`` gave other bits.

    With the sender itself as ``other``: it got other bits twice than at first. It goes on in a newer generation only,
    as the step may not be committed. ``microbatch``: index in the global batch. ``mine``, ``theirs``: the checksums of
    both, by the same names; equal ones of the sender itself are in question for their values.
    """

    generation: int
    step: int
    microbatch: int
    other: int
    mine: Mapping[str, bytes]
    theirs: Mapping[str, bytes]
    device: str = ""


@dataclass(frozen=True, slots=True)
class Voted(FromWorker):
    """The worker has computed a disputed micro-batch (:class:`Vote`), twice.

    It goes on in a newer generation only. ``varies``: the layer or results whose bits differed the second time; empty
    if none.
    """

    generation: int
    sums: Mapping[str, bytes]
    varies: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class NotFinite(FromWorker):
    """A loss, or the gradient of a stage, is not finite.

    The worker goes on in a newer generation only: the step may not be committed before the cause is known.
    ``microbatch``: that of the loss, index in the global batch; -1 for a gradient.
    """

    generation: int
    step: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Incomparable(FromWorker):
    """Computations cannot be compared in this run, for ``cause``.

    The worker gets other bits for the same micro-batch twice, or cannot send its inputs.
    """

    cause: str


@dataclass(frozen=True, slots=True)
class Crash(FromWorker, FromNonMember):
    """The worker ends with an exception.

    ``fault``: an infrastructure failure, which peers survive, not the user's exception, which ends the run.
    """

    fault: bool
    summary: str
    exception: bytes | None
    traceback: str


@dataclass(frozen=True, slots=True)
class LayoutWanted(FromWorker):
    """The user's code in this worker wants the layers to lie as ``cuts``."""

    cuts: Cuts


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Measurements of a worker's layers, one value per layer, in their order.

    ``cuts``: the layout. ``first``: the index of its first layer. ``seconds``: of a forward, relative to each other.
    ``output_bytes``: of one micro-batch. ``parameter_bytes``: of parameters, buffers and gradients. ``tied``: groups of
    layers of the whole model that share a weight. ``whole``: why stages cannot share a layer, ``fixed``: why layers
    cannot go to another worker; empty if they can.
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
class Measured(FromWorker):
    """Measurements of a worker's first steps that it has not sent before.

    ``footprint``: its memory. ``trial``: the cost of its split backwards.
    """

    profiled: Profiled | None = None
    footprint: Footprint | None = None
    layers: LayerFacts | None = None
    trial: SplitTrial | None = None


@dataclass(frozen=True, slots=True)
class Publish(FromWorker, FromAnyThread):
    """A key of a worker that others of ``generation`` look up to connect to it."""

    generation: int
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class LookUp(FromWorker, FromAnyThread):
    """Request for the values under ``keys`` in ``generation``; :class:`Found` answers."""

    generation: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Returned(FromWorker):
    """First message of a worker that has lost its coordinator.

    All that only this worker knows, for a restarted coordinator (:mod:`~lightning_recycle.control.journal`). Steps,
    ranks and generations are -1 where there is none; messages that it has sent or received are kept as they were.

    Args:
        process: with the incarnation of its :class:`Assign`.
        run: as in :class:`Enrolled`.
        joining: as in its :class:`Assign`.
        wants: the request of its script, with the grid that it was assigned.
        generation: the newest that was announced to it.
        applied: the newest step that it has applied, or got with its state.
        joins_after: the step after which the newest generation gives it its state.
        restored: the steps of the checkpoint that it resumed from; 0 without one.
        next_collective: the first control collective that it has no answer to.
        facts: of the newest steps that it applied, in order.
        losses: of steps whose mean loss it does not know.
        arrival: its part of a pending control collective that outlives generations.
        answer: the newest answer to a control collective that others may lack.
        newest_commit: also by a recovery.
        request, raised, membership_query: those that have no answer yet.
        save: the newest batch of checkpoints that it has begun, unless it knows the outcome.
        announced, saves_ended: of that batch, as its writer.
        hook: that it has entered with its siblings, some of which may not know.
        is_ready, leave, ends_run, measured: the messages of that kind that it has sent.
    """

    process: Process
    run: str
    joining: bool = False
    wants: RunRequest | None = None
    generation: int = -1
    applied: int = -1
    joins_after: int = -1
    restored: int = 0
    next_collective: int = 0
    facts: tuple[Applied, ...] = ()
    losses: tuple[Losses, ...] = ()
    step_losses: tuple[StepLoss, ...] = ()
    arrival: Arrive | None = None
    answer: Answer | None = None
    newest_commit: Committed | None = None
    request: StopWish | None = None
    raised: Raised | None = None
    membership_query: MembershipQuery | None = None
    save: SaveBegun | None = None
    announced: tuple[SaveAnnounced, ...] = ()
    saves_ended: tuple[SaveEnded, ...] = ()
    hook: HookEntered | None = None
    is_ready: bool = False
    leave: Leave | None = None
    ends_run: bool = False
    measured: Measured | None = None


@dataclass(frozen=True, slots=True)
class FaultInjected(FromWorker, FromNonMember):
    """An injected fault is about to happen in this worker; ``time`` since the epoch."""

    kind: str
    operation: str
    time: float


# ---------------------------------------------------------------------- coordinator -> worker


@dataclass(frozen=True, slots=True)
class Enrolled(ToWorker):
    """First message of a coordinator that may be restarted: its workers wait for it.

    ``run``: a random name of the run.
    """

    run: str


@dataclass(frozen=True, slots=True)
class Assign(ToWorker):
    """Assigns a position to a worker that was started by hand.

    ``incarnation``: the number of processes that held it before. ``joining``: whether the training has begun.
    ``setup``: from the launching process; None without one. ``staggered``: whether a stage may step before the others
    hold their gradients. ``takes_results``: whether the final results are wanted. ``members``: processes per position.
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
class Unfit(ToWorker):
    """Answer to a :class:`Hello` that cannot be in this run: ``why``, and a remedy.

    ``late``: its run is over, and the others are at another entry point.
    """

    why: str
    late: bool = False


@dataclass(frozen=True, slots=True)
class Pause(ToWorker):
    """A change at a step boundary: report the newest step, begin none until told.

    ``number`` counts the pauses of the generation from 0.
    """

    generation: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Boundary(ToWorker):
    """All stop at the beginning of ``step``, which none has begun: nothing is redone.

    With a ``program`` they do not stop: from that step on, until the next generation, they run this program.
    """

    generation: int
    step: int
    program: Program | None = None


@dataclass(frozen=True, slots=True)
class MembershipConfirmed(ToWorker):
    """The worker is a member."""

    number: int


@dataclass(frozen=True, slots=True)
class Judged(ToWorker):
    """Answer to :class:`Raised`: the exception is the user's ``own``, or work again.

    The work is repeated in a generation newer than ``generation``, that of the exception.
    """

    generation: int
    own: bool


@dataclass(frozen=True, slots=True)
class StopRequested(ToWorker):
    """A worker asks to stop at ``point``: workers that go on there must answer."""

    point: int


@dataclass(frozen=True, slots=True)
class StopVerdict(ToWorker):
    """Answer to :class:`StopWish`: whether all ask to stop at ``point``.

    If not, all stop after one of the next steps (:attr:`StepLoss.after_step`).
    """

    point: int
    agreed: bool


@dataclass(frozen=True, slots=True)
class Regroup(ToWorker):
    """Stop and report: ``generation`` begins, with the live ranks ``roster``.

    ``leader`` speaks for the run. ``check_links``: communication broke without a death; check which workers
    can be reached before connecting. ``unproven``: a step whose results may be wrong and are dropped; -1 for none.
    """

    generation: int
    roster: tuple[int, ...]
    leader: int = -1
    check_links: bool = False
    unproven: int = -1


@dataclass(frozen=True, slots=True)
class Vote:
    """Workers ``voters`` recompute a disputed micro-batch; :class:`Voted` answers.

    ``recorder`` gives them the inputs.
    """

    recorder: int
    voters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resume(ToWorker):
    """All survivors reported; connect, do your actions, and go on with the plan."""

    generation: int
    roster: tuple[int, ...]
    decision: Decision
    program: Program | None
    """Program of this worker for a step. The coordinator's shell adds it: each worker has another one."""
    commits: Mapping[int, Payload | None]
    """Contributions to the commit of step ``decision.version - 1``, by column, as far as known; or of all
    columns to that of ``decision.version``, if ``confirmed``."""
    confirmed: bool = False
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
class Found(ToWorker):
    """The answer to :class:`LookUp`, once all of its keys are published: their values."""

    generation: int
    values: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class HookEntered(ToWorker):
    """All members of a position are in a hook for the ``number``-th time.

    All were :attr:`Milestone.IN_HOOK`: none of them stops before the hook is over, as long as all live.
    """

    generation: int
    number: int


@dataclass(frozen=True, slots=True)
class Committed(ToWorker):
    """All are REDUCED in ``step``, or were before a loss: apply it once REDUCED.

    ``payloads``: by column. ``speculative``: whether some have applied it already.
    """

    generation: int
    step: int
    payloads: Mapping[int, Payload | None]
    speculative: bool = False


class AfterStep(Enum):
    """Next action of all after a step.

    ``STOP``: as if ``trainer.should_stop`` were set on all. ``END``: they save the wanted checkpoints, and the run
    ends.
    """

    GO_ON = "go on"
    STOP = "stop"
    END = "end"


@dataclass(frozen=True, slots=True)
class StepLoss(ToWorker):
    """Mean ``loss`` of ``step``, summed in micro-batch order; equal on all workers.

    ``counters``: the run's counters so far (failures, seconds of recovery, ...). ``outputs``: of all micro-batches, see
    :class:`Losses`. ``leader_applied``: the newest step that the leader has applied. ``check_next``: whether the next
    step ends with a check of the workers' states. ``saves``: as of this moment.
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
class Answer(ToWorker):
    """Control collective ``number`` is complete: payloads by rank, the same for all.

    Of final results, which stay with the coordinator, only whether each worker delivered some. ``leader`` and
    ``saves``: as of that moment.
    """

    number: int
    payloads: Mapping[int, Payload | bool | None]
    leader: int = -1
    saves: SaveStatus = SaveStatus()


@dataclass(frozen=True, slots=True)
class Alive(ToWorker):
    """Sign of life of the coordinator, given up after ``timeout`` seconds of silence."""

    timeout: float = 60.0


class StopReason(Enum):
    """Reason why a worker has to leave.

    The run's outcome, its own request at a step boundary, or its loss: declared dead, or of another run.
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
        return cls(type(outcome).__name__)


@dataclass(frozen=True, slots=True)
class Stop(ToWorker):
    """The run is over, or goes on without this worker; leave."""

    reason: StopReason


TYPES: tuple[type[Any], ...] = tuple(
    each
    for each in list(globals().values())
    if isinstance(each, type) and is_dataclass(each) and each.__module__ == __name__
)
"""All messages and their parts."""

FROM_WORKERS: tuple[type[Any], ...] = tuple(
    kind for kind in TYPES if issubclass(kind, FromWorker) and kind not in (FromWorker, Returned)
)
"""Messages of a worker with a position; its first message is a :class:`Hello`."""

FROM_SPARES: tuple[type[Any], ...] = (Heartbeat, Leave, Crash)
"""Messages of a worker that waits for a position."""

FIRST: tuple[type[Any], ...] = (Hello, Returned)
"""First messages of a worker."""

TO_WORKERS: tuple[type[Any], ...] = (
    *(kind for kind in TYPES if issubclass(kind, ToWorker) and kind != ToWorker),
    Parcel,
)
"""Messages of the coordinator."""
