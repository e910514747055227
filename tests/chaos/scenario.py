"""What one chaos run is: a grid, a training, options, and all that happens to it. Pure.

Every scenario is survivable by construction, so it must end in the exact state: in each stage one worker is never
hit by anything that ends it. The exceptions are drawn on purpose: scenarios that lose a whole stage and must end
in :class:`~lightning_recycle.errors.StageLostError`, or start again from a checkpoint.
"""

from dataclasses import dataclass

from lightning_recycle.callbacks import Fault
from lightning_recycle.planning.planner import Switch

GLOBAL_MICROBATCHES = 6
"""D * M of every scenario, on which the dropout depends."""

GLOBAL_BATCH = 12
EPOCH = 4
"""Steps per epoch."""

SAMPLES = EPOCH * GLOBAL_BATCH
STEPS = 24
STEPS_IF_STOPPED = 16
"""The length of a training that early stopping ends."""

FAMILIES = {
    "faults": "workers that are killed, exit, raise, hang, deadlock, are cut off, are told to leave, or are slow",
    "slow-hooks": "a hook of one worker or of all sleeps for longer than the heartbeat timeout",
    "slow-microbatches": "the loss of one sample takes longer than the heartbeat timeout, on whichever worker it runs",
    "held-gil": "all workers hold the GIL for longer than the heartbeat timeout",
    "machine-errors": "OSError, MemoryError or no free descriptors, once, in one worker",
    "killed-loaders": "a DataLoader process is killed",
    "killed-forkserver": "the process that forks the workers is killed",
    "full-disk": "the disk of the checkpoints is full for some steps",
    "full-tmpdir": "TMPDIR is full from some step on",
    "strangers": "another process connects to every port of the run, holds connections, sends garbage",
    "signals": "the launching process gets SIGTERM or SIGUSR1, saves, and the training is resumed from there",
    "elastic": "a run begins with few workers, others join, leave and are killed, on twice as many lanes as pipelines",
}
"""What may happen to a run, one of them per scenario; all but the first also with ordinary faults."""


@dataclass(frozen=True)
class Recipe:
    """What is trained: all that the result depends on.

    Args:
        monitored: the metric of an epoch that drives the learning rate, early stopping, and which checkpoints are
            kept; "train_error", "val_error", or "" if nothing is monitored.
        stops: whether early stopping ends the training, after ``STEPS_IF_STOPPED`` steps.
        checkpoint_every: steps between checkpoints that are all kept; 0 for none.
        keeps_best: whether the two best checkpoints by the monitored metric are kept, and the last.
    """

    dropout: bool = False
    clips: bool = False
    monitored: str = ""
    stops: bool = False
    checkpoint_every: int = 0
    keeps_best: bool = False

    @property
    def steps(self) -> int:
        return STEPS_IF_STOPPED if self.stops else STEPS

    @property
    def saves(self) -> bool:
        """Whether it writes checkpoints while it trains."""
        return bool(self.checkpoint_every) or self.keeps_best

    def __str__(self) -> str:
        shown = {
            "dropout": self.dropout,
            "clip": self.clips,
            self.monitored: bool(self.monitored),
            "stop": self.stops,
            f"checkpoint/{self.checkpoint_every}": bool(self.checkpoint_every),
            "best": self.keeps_best,
        }
        return " ".join(name for name, is_shown in shown.items() if is_shown)


@dataclass(frozen=True)
class LateFault:
    """A fault of a position's first replacement, after so many operations.

    0: while it takes over its peer's state; -1: before it is ready.
    """

    kind: str
    pipeline: int
    stage: int
    operations: int


@dataclass(frozen=True)
class Crowd:
    """How many workers there are from a step on; others are killed, or leave."""

    step: int
    workers: int
    kills: bool = False

    def __str__(self) -> str:
        return f"{self.workers} workers{' (killed)' if self.kills else ''}@{self.step}"


@dataclass(frozen=True)
class Trouble:
    """Something that is no :class:`~lightning_recycle.callbacks.Fault`; it happens to initial workers only.

    Args:
        kind: "sleep", "hold-gil", "OSError", "MemoryError", "descriptors" (no free ones), "kill-loader",
            "kill-forkserver", "fill-disk", "fill-tmpdir"; or "SIGTERM" or "SIGUSR1" for the launching process.
        step: the step at which it happens, or right after.
        where: the hook of a callback in which it happens, "forward" for a layer, "loss" for the loss of ``sample`` in
            the epoch of ``step``, as often as it is computed.
        worker: (pipeline, stage); None for all workers.
        steps: how many steps a disk is full.
    """

    kind: str
    step: int
    where: str = "on_train_batch_start"
    worker: tuple[int, int] | None = None
    seconds: float = 0.0
    steps: int = 0
    sample: int = -1

    def __str__(self) -> str:
        who = "all" if self.worker is None else ",".join(map(str, self.worker))
        what = {"seconds": f" {self.seconds:g} s", "steps": f" {self.steps} steps", "sample": f" sample {self.sample}"}
        set_ones = [text for name, text in what.items() if getattr(self, name) != type(self).__dict__[name]]
        return f"{self.kind}({who})@{self.step}:{self.where}{''.join(set_ones)}"


@dataclass(frozen=True)
class Scenario:
    """What one run consists of.

    Args:
        family: a name of ``FAMILIES``.
        faults, late_faults: of the initial workers, and of their replacements.
        troubles: what happens besides.
        staggered, split_backward, shadow: options of the strategy.
        loses_stage: whether all workers of a stage fail.
        moves: the layers that each stage is to have, by the step after which that is asked for.
        members: the processes of each position.
        lanes: the lanes of the grid; 0 for as many as pipelines.
        begins: the workers of each stage that the launching process starts; 0 for all.
        crowds: how many workers there are later; those of the launching process stay, unless they fail.
        flips: bits that flip, in ways that are found before anything is committed: a message is damaged once, or all
            products of a device are wrong.
    """

    seed: int
    family: str
    pipelines: int
    stages: int
    recipe: Recipe = Recipe()
    faults: tuple[Fault, ...] = ()
    late_faults: tuple[LateFault, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    heartbeat_timeout: float = 2.0
    staggered: bool = True
    split_backward: Switch = True
    shadow: str = "device"
    restart_workers: bool = False
    on_stage_lost: str = "raise"
    loader_processes: int = 0
    loses_stage: bool = False
    strangers: bool = False
    moves: tuple[tuple[int, tuple[int, ...]], ...] = ()
    flips: tuple[Fault, ...] = ()
    members: int = 1
    lanes: int = 0
    begins: int = 0
    crowds: tuple[Crowd, ...] = ()

    @property
    def verify(self) -> float:
        """The share of the time for checks of computations: all that it takes where a device computes wrong results."""
        return float(any(flip.target == "matmul" for flip in self.flips))

    @property
    def must_end_in_an_error(self) -> bool:
        return self.loses_stage and self.on_stage_lost == "raise"

    @property
    def starts_again(self) -> bool:
        """Whether it goes on from a checkpoint, so that steps after it happen twice."""
        return self.family == "signals" or (self.loses_stage and self.on_stage_lost == "restart")

    def __str__(self) -> str:
        """What is special about it, in one line."""
        options = {
            str(self.recipe): bool(str(self.recipe)),
            "unstaggered": not self.staggered,
            "fused": not self.split_backward,
            "host-shadow": self.shadow == "host",
            "rejoin": self.restart_workers,
            "loader": bool(self.loader_processes),
            f"lose-stage-{self.on_stage_lost}": self.loses_stage,
            "strangers": self.strangers,
            f"{self.members} members": self.members > 1,
            f"{self.begins} of {self.lanes} lanes": self.lanes > 0,
        }
        faults = [
            f"{fault.kind}({fault.pipeline},{fault.stage}{'' if fault.member is None else f',{fault.member}'})"
            f"@{fault.at if fault.step is None else f'{fault.step}:{fault.when} {fault.at}'}"
            for fault in self.faults
        ]
        late = [f"late {f.kind}({f.pipeline},{f.stage})+{f.operations}" for f in self.late_faults]
        flips = [f"flip {f.target}({f.pipeline},{f.stage})@{f.step}" for f in self.flips]
        happens = [*faults, *flips, *late, *map(str, self.troubles), *map(str, self.crowds)]
        happens += [f"layers {'/'.join(map(str, sizes))}@{step}" for step, sizes in self.moves]
        return f"{' '.join(name for name, shown in options.items() if shown) or '-'} | {' '.join(happens) or '-'}"
