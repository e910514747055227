"""What one chaos run is: a grid, options and faults, all drawn from a seed. Pure.

Every scenario is survivable by construction, so it must end with the exact weights: in each stage one worker is never
hit by anything that ends it. The exceptions are drawn on purpose: scenarios that lose a whole stage and must end
in :class:`~lightning_recycle.errors.StageLostError`, or start again from a checkpoint.
"""

import random
from dataclasses import dataclass

from lightning_recycle.callbacks import Fault

__all__ = ["GLOBAL_MICROBATCHES", "STEPS", "LateFault", "Scenario", "draw"]

GLOBAL_MICROBATCHES = 6
"""D * M of every scenario, on which the dropout depends."""

STEPS = 24

_GRIDS = ((1, 2), (2, 1), (2, 2), (2, 2), (2, 2), (2, 3), (3, 1), (3, 2), (3, 2), (3, 3), (3, 3))
_OPERATIONS = ("forward", "backward_input", "backward_weight", "reduce", "optimizer")
_ENDING = ("kill", "kill", "exit", "exception", "hang", "deadlock", "partition", "preempt")
"""Kinds of faults after which a worker is gone."""

_ANYWHERE = ("kill", "exit", "exception")  # found at once, wherever they happen
_SECOND_STEP = 2  # from here on the usual times of operations are known, so a deadlock is found


@dataclass(frozen=True)
class LateFault:
    """A fault of a position's first replacement.

    Args:
        kind: as in :class:`~lightning_recycle.callbacks.Fault`.
        pipeline: the position's pipeline.
        stage: the position's stage.
        operations: how many operations precede the fault; 0: while it takes over its peer's state; -1: before it is
            ready.
    """

    kind: str
    pipeline: int
    stage: int
    operations: int


@dataclass(frozen=True)
class Scenario:
    """What one run consists of.

    Args:
        seed: the seed that it was drawn from.
        pipelines: D.
        stages: S.
        faults: the faults of the initial workers.
        late_faults: the faults of their replacements.
        dropout: whether layers draw random numbers.
        clips: whether the norm of the gradient is clipped.
        staggered: an option of the strategy, like those that follow.
        decoupled: whether the backward is split.
        shadow: "device" or "host".
        restart_workers: whether lost workers are replaced.
        normalize: whether healthy workers may move.
        on_stage_lost: "raise" or "restart".
        checkpoint_every: steps between checkpoints; 0 for none.
        loader_processes: the processes of each worker's DataLoader.
        loses_stage: whether all workers of a stage fail.
    """

    seed: int
    pipelines: int
    stages: int
    faults: tuple[Fault, ...]
    late_faults: tuple[LateFault, ...] = ()
    dropout: bool = False
    clips: bool = False
    staggered: bool = True
    decoupled: bool = True
    shadow: str = "device"
    restart_workers: bool = False
    normalize: bool = False
    on_stage_lost: str = "raise"
    checkpoint_every: int = 0
    loader_processes: int = 0
    loses_stage: bool = False

    @property
    def microbatches(self) -> int:
        return GLOBAL_MICROBATCHES // self.pipelines

    @property
    def must_end_in_an_error(self) -> bool:
        return self.loses_stage and self.on_stage_lost == "raise"

    def __str__(self) -> str:
        """What is special about it, in one line."""
        options = [
            name
            for name, shown in (
                ("dropout", self.dropout),
                ("clip", self.clips),
                ("unstaggered", not self.staggered),
                ("coupled", not self.decoupled),
                ("host-shadow", self.shadow == "host"),
                ("rejoin", self.restart_workers),
                ("move", self.normalize),
                (f"checkpoint/{self.checkpoint_every}", bool(self.checkpoint_every)),
                ("loader", bool(self.loader_processes)),
                (f"lose-stage-{self.on_stage_lost}", self.loses_stage),
            )
            if shown
        ]
        faults = [
            f"{fault.kind}({fault.pipeline},{fault.stage})"
            f"@{fault.at if fault.step is None else f'{fault.step}:{fault.when} {fault.at}'}"
            for fault in self.faults
        ]
        late = [f"late {f.kind}({f.pipeline},{f.stage})+{f.operations}" for f in self.late_faults]
        return f"{' '.join(options) or '-'} | {' '.join([*faults, *late]) or '-'}"


def draw(seed: int) -> Scenario:
    """The scenario of ``seed``."""
    rng = random.Random(f"chaos/{seed}")
    pipelines, stages = rng.choice(_GRIDS)
    loses_stage = pipelines > 1 and stages > 1 and rng.random() < 0.12
    restarts_run = loses_stage and rng.random() < 0.5
    restart_workers = not loses_stage and rng.random() < 0.5
    checkpoint_every = 4 if restarts_run or rng.random() < 0.2 else 0
    if loses_stage:
        faults = _fall_of_a_stage(rng, pipelines, stages)
        late: tuple[LateFault, ...] = ()
    else:
        faults = _survivable(rng, pipelines, stages, has_checkpoints=bool(checkpoint_every))
        late = _late(rng, faults) if restart_workers else ()
    # A worker that moves leaves its stage with one worker less, so nothing may fail there.
    one_stage = len({fault.stage for fault in faults if fault.kind != "slow"}) <= 1
    return Scenario(
        seed,
        pipelines,
        stages,
        faults,
        late,
        dropout=rng.random() < 0.25,
        clips=rng.random() < 0.2,
        staggered=rng.random() < 0.75,
        decoupled=rng.random() < 0.85,
        shadow=rng.choice(("device", "device", "host")),
        restart_workers=restart_workers,
        normalize=not restart_workers and one_stage and rng.random() < 0.6 and not loses_stage,
        on_stage_lost="restart" if restarts_run else "raise",
        checkpoint_every=checkpoint_every,
        loader_processes=int(rng.random() < 0.1),
        loses_stage=loses_stage,
    )


def _fall_of_a_stage(rng: random.Random, pipelines: int, stages: int) -> tuple[Fault, ...]:
    """Ends all workers of a stage within three steps, after the first checkpoint."""
    stage = rng.randrange(stages)
    step = rng.randrange(6, STEPS - 6)
    return tuple(
        Fault(rng.choice(_ANYWHERE), d, stage, step + rng.randrange(3), rng.choice(_OPERATIONS))
        for d in range(pipelines)
    )


def _survivable(rng: random.Random, pipelines: int, stages: int, has_checkpoints: bool) -> tuple[Fault, ...]:
    """Faults that spare one worker of each stage, except for its speed."""
    safe = [rng.randrange(pipelines) for _ in range(stages)]
    mortal = [(d, s) for d in range(pipelines) for s in range(stages) if d != safe[s]]
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        if not mortal or rng.random() < 0.12:
            where = (rng.randrange(pipelines), rng.randrange(stages))
            step = rng.randrange(STEPS - 4)
            faults.append(Fault("slow", *where, step, factor=rng.choice((2.0, 4.0)), steps=rng.choice((1, 3))))
        elif pipelines > 1 and rng.random() < 0.08:  # a whole node
            step, kind = rng.randrange(STEPS), rng.choice(("kill", "hang", "partition"))
            pipeline = rng.choice(mortal)[0]
            node = [position for position in mortal if position[0] == pipeline]
            faults += [Fault(kind, *position, step) for position in node]
            mortal = [position for position in mortal if position not in node]
        else:
            position = rng.choice(mortal)
            mortal.remove(position)
            faults.append(_ending(rng, position, has_checkpoints and position == (0, stages - 1)))
    if pipelines == 1 and rng.random() < 0.5:
        faults.append(Fault("preempt", 0, rng.randrange(stages), rng.randrange(STEPS)))  # refused: it is the last one
    return tuple(faults)


def _ending(rng: random.Random, position: tuple[int, int], writes_checkpoints: bool) -> Fault:
    kind = rng.choice(_ENDING)
    where = rng.random()
    if where < 0.1:
        return Fault(rng.choice(_ANYWHERE), *position, at="setup")
    if where < 0.2:
        return Fault(rng.choice((*_ANYWHERE, "hang", "partition")), *position, at="recovery")
    if where < 0.25:
        return Fault(rng.choice((*_ANYWHERE, "hang", "preempt")), *position, at="end")
    if where < 0.6 and writes_checkpoints:
        return Fault(rng.choice((*_ANYWHERE, "hang")), *position, at="checkpoint")
    step = rng.randrange(_SECOND_STEP if kind == "deadlock" else 0, STEPS)
    return Fault(kind, *position, step, rng.choice(_OPERATIONS), when=rng.choice(("before", "after")))


def _late(rng: random.Random, faults: tuple[Fault, ...]) -> tuple[LateFault, ...]:
    replaced = [fault for fault in faults if fault.kind in _ENDING and fault.at != "end"]
    if not replaced or rng.random() < 0.5:
        return ()
    fault = rng.choice(replaced)
    operations = rng.choice((-1, 0, 0, 1, rng.randrange(1, 60)))
    kinds = _ANYWHERE if operations <= 0 else ("kill", "exit", "exception", "hang", "partition", "preempt")
    return (LateFault(rng.choice(kinds), fault.pipeline, fault.stage, operations),)
