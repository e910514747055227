"""Scenarios, drawn from a seed: one function for each family. Pure."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from chaos.scenario import EPOCH, FAMILIES, SAMPLES, STEPS_IF_STOPPED, Crowd, LateFault, Recipe, Scenario, Trouble
from lightning_recycle.callbacks import Fault

_GRIDS = ((1, 2), (2, 1), (2, 2), (2, 2), (2, 2), (2, 3), (3, 1), (3, 2), (3, 2), (3, 3), (3, 3))
_OPERATIONS = ("forward", "backward_input", "backward_weight", "reduce", "optimizer")
_ENDING = ("kill", "kill", "exit", "exception", "hang", "deadlock", "partition", "preempt")
"""Kinds of faults after which a worker is gone."""

_ANYWHERE = ("kill", "exit", "exception")  # found at once, wherever they happen
_SECOND_STEP = 2  # from here on the usual times of operations are known, so a deadlock is found
_HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip
_SHORT_TIMEOUT = 1.0  # seconds; with it a scenario that outlasts it does not take long
_LONG = 1.6  # seconds: longer than that
_MOST_POSITIONS = 4  # with two members each
_SHARE_WITH_MEMBERS = 0.6  # of the scenarios that have so few: a third of all
_ENDING_JOINED = ("kill", "kill", "exit", "exception", "preempt")  # nothing here would end one that hangs
_ENDING_INITIAL = (*_ENDING_JOINED, "hang")
_SHARE_ELASTIC = 0.08
_ELASTIC_PIPELINES = 3
_WEIGHTS = {"faults": 8}  # of the families that are not as likely as the others, which have 1


def draw(seed: int) -> Scenario:
    """The scenario of ``seed``, which decides everything, its family too."""
    rng = random.Random(f"chaos/{seed}")
    family = rng.choices(list(_DRAWS), [_WEIGHTS.get(name, 1) for name in _DRAWS])[0]
    pipelines, stages = rng.choice(_GRIDS)
    common = Scenario(
        seed,
        family,
        pipelines,
        stages,
        _recipe(rng),
        staggered=rng.random() < 0.75,
        split_backward="auto" if (drawn := rng.random()) < 0.35 else drawn < 0.85,
        shadow=rng.choice(("device", "device", "host")),
    )
    elastic = random.Random(f"as many/{seed}")
    if elastic.random() < _SHARE_ELASTIC:
        return _elastic(elastic, common)
    return _with_members(random.Random(f"members/{seed}"), _DRAWS[family](rng, common))


def _with_members(rng: random.Random, scenario: Scenario) -> Scenario:
    """In a third of the scenarios positions have two members, of which one fails, or both do. Where these need many
    processes, one has to do.
    """
    if scenario.pipelines * scenario.stages > _MOST_POSITIONS or rng.random() > _SHARE_WITH_MEMBERS:
        return scenario
    which = (None, 0, 1)
    faults = tuple(replace(fault, member=rng.choice(which)) for fault in scenario.faults)
    return replace(scenario, members=2, faults=faults, moves=(), flips=())


def _recipe(rng: random.Random) -> Recipe:
    monitored = rng.choice(("", "train_error", "val_error"))
    return Recipe(
        dropout=rng.random() < 0.2,
        clips=rng.random() < 0.2,
        monitored=monitored,
        stops=bool(monitored) and rng.random() < 0.4,
        checkpoint_every=rng.choice((3, 4)) if rng.random() < 0.2 else 0,
        keeps_best=bool(monitored) and rng.random() < 0.5,
    )


class _Positions:
    """The workers that something may end: all but one of each stage."""

    def __init__(self, rng: random.Random, scenario: Scenario) -> None:
        self._rng = rng
        safe = [rng.randrange(scenario.pipelines) for _ in range(scenario.stages)]
        self.mortal = [(d, s) for d in range(scenario.pipelines) for s in range(scenario.stages) if d != safe[s]]

    def take(self, stages: tuple[int, ...] | None = None) -> tuple[int, int] | None:
        """One that nothing has been drawn for yet, if there is any, of these stages."""
        found = [(d, s) for d, s in self.mortal if stages is None or s in stages]
        if not found:
            return None
        position = self._rng.choice(found)
        self.mortal.remove(position)
        return position

    def take_pipeline(self) -> list[tuple[int, int]]:
        """All that is left of one pipeline."""
        pipeline = self._rng.choice(self.mortal)[0]
        node = [position for position in self.mortal if position[0] == pipeline]
        self.mortal = [position for position in self.mortal if position not in node]
        return node


def _anybody(rng: random.Random, scenario: Scenario) -> tuple[int, int]:
    return rng.randrange(scenario.pipelines), rng.randrange(scenario.stages)


# ---------------------------------------------------------------------- workers that fail


def _faults(rng: random.Random, common: Scenario) -> Scenario:
    loses_stage = common.pipelines > 1 and common.stages > 1 and rng.random() < 0.12
    if loses_stage:
        return _lost_stage(rng, common)
    drawn = replace(common, faults=_survivable(rng, common), loader_processes=int(rng.random() < 0.1))
    drawn = replace(drawn, moves=_moves(random.Random(f"moves/{common.seed}"), drawn))
    drawn = replace(drawn, flips=_flips(random.Random(f"flips/{common.seed}"), drawn))
    if rng.random() < 0.5:
        return replace(drawn, restart_workers=True, late_faults=_late(rng, drawn.faults))
    return drawn


def _moves(rng: random.Random, scenario: Scenario) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if scenario.stages == 1 or rng.random() < 0.5:
        return ()
    layers = 8 if scenario.recipe.dropout else 6
    found = []
    for step in sorted(rng.sample(range(1, scenario.recipe.steps - 1), rng.choice((1, 2, 4)))):
        cuts = (0, *sorted(rng.sample(range(1, layers), scenario.stages - 1)), layers)
        found.append((step, tuple(end - start for start, end in pairwise(cuts))))
    return tuple(found)


def _flips(rng: random.Random, scenario: Scenario) -> tuple[Fault, ...]:
    """A bit that flips in a message, or in each product of a worker that has another one beside it all the time."""
    step, bit = rng.randrange(1, scenario.recipe.steps - 4), rng.choice((0, 20, None))
    chosen = rng.random()
    if chosen < 0.2 and scenario.stages > 1:
        return (Fault("bitflip", *_anybody(rng, scenario), step, target="message", bit=bit),)
    if chosen > 0.4 or scenario.recipe.clips:  # speculative steps are not checked
        return ()
    hit = {(fault.pipeline, fault.stage) for fault in scenario.faults}
    left = [[(d, s) for d in range(scenario.pipelines) if (d, s) not in hit] for s in range(scenario.stages)]
    found = [position for of_stage in left if len(of_stage) > 1 for position in of_stage]
    if not found:
        return ()
    return (Fault("bitflip", *rng.choice(found), step, target="matmul", every=1, bit=bit),)


def _lost_stage(rng: random.Random, common: Scenario) -> Scenario:
    """Ends all workers of a stage within three steps, after the first checkpoint."""
    stage = rng.randrange(common.stages)
    restarts = rng.random() < 0.5
    # A checkpoint in the middle of an epoch does not hold what was logged in it (as in Lightning), so nothing is
    # decided from that.
    recipe = replace(common.recipe, monitored="", stops=False, keeps_best=False)
    recipe = replace(recipe, checkpoint_every=rng.choice((3, 4)) if restarts else 0)
    step = rng.randrange(6, recipe.steps - 6)
    faults = tuple(
        Fault(rng.choice(_ANYWHERE), d, stage, step + rng.randrange(3), rng.choice(_OPERATIONS))
        for d in range(common.pipelines)
    )
    on_stage_lost = "restart" if restarts else "raise"
    return replace(common, recipe=recipe, faults=faults, on_stage_lost=on_stage_lost, loses_stage=True)


def _survivable(rng: random.Random, scenario: Scenario) -> tuple[Fault, ...]:
    """Faults that spare one worker of each stage, except for its speed."""
    steps, positions = scenario.recipe.steps, _Positions(rng, scenario)
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        if not positions.mortal or rng.random() < 0.12:
            where, step = _anybody(rng, scenario), rng.randrange(steps - 4)
            faults.append(Fault("slow", *where, step, factor=rng.choice((2.0, 4.0)), steps=rng.choice((1, 3))))
        elif rng.random() < 0.08:  # a whole node
            step, kind = rng.randrange(steps), rng.choice(("kill", "hang", "partition"))
            faults += [Fault(kind, *position, step) for position in positions.take_pipeline()]
        elif position := positions.take():
            writes = scenario.recipe.saves and position == (0, scenario.stages - 1)
            faults.append(_ending(rng, position, steps, writes))
    if scenario.pipelines == 1 and rng.random() < 0.5:
        # Refused: it is the last one.
        faults.append(Fault("preempt", 0, rng.randrange(scenario.stages), rng.randrange(steps)))
    return tuple(faults)


def _ending(rng: random.Random, position: tuple[int, int], steps: int, writes_checkpoints: bool) -> Fault:
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
    step = rng.randrange(_SECOND_STEP if kind == "deadlock" else 0, steps)
    return Fault(kind, *position, step, rng.choice(_OPERATIONS), when=rng.choice(("before", "after")))


def _late(rng: random.Random, faults: tuple[Fault, ...]) -> tuple[LateFault, ...]:
    replaced = [fault for fault in faults if fault.kind in _ENDING and fault.at != "end"]
    if not replaced or rng.random() < 0.5:
        return ()
    fault = rng.choice(replaced)
    operations = rng.choice((-1, 0, 0, 1, rng.randrange(1, 60)))
    kinds = _ANYWHERE if operations <= 0 else ("kill", "exit", "exception", "hang", "partition", "preempt")
    return (LateFault(rng.choice(kinds), fault.pipeline, fault.stage, operations),)


def _quick(rng: random.Random, positions: _Positions, steps: range, most: int = 1, least: int = 0) -> tuple[Fault, ...]:
    """Faults that are found at once, beside the main thing of a scenario; fewer where few workers may be lost."""
    if not steps:
        return ()
    taken = [positions.take() for _ in range(rng.randint(least, most))]
    return tuple(
        Fault(rng.choice(_ANYWHERE), *position, rng.choice(steps), rng.choice(_OPERATIONS))
        for position in taken
        if position is not None
    )


# ---------------------------------------------------------------------- slowness, which is not a failure


# A peer that is well may cost a slow worker its place, so what else fails fails before: the last one is waited for.


def _slow_hooks(rng: random.Random, common: Scenario) -> Scenario:
    step = rng.randrange(1, common.recipe.steps - 2)
    hooks = (*_HOOKS, "on_train_epoch_end", *(["on_validation_batch_end"] if common.recipe.monitored else []))
    worker = rng.choice((None, _anybody(rng, common)))
    trouble = Trouble("sleep", step, rng.choice(hooks), worker, seconds=_LONG)
    return _slow(rng, common, trouble)


def _slow_microbatches(rng: random.Random, common: Scenario) -> Scenario:
    epoch = rng.randrange(1, common.recipe.steps // EPOCH - 1)
    trouble = Trouble("sleep", epoch * EPOCH, "loss", seconds=_LONG, sample=rng.randrange(SAMPLES))
    return _slow(rng, common, trouble)


def _held_gil(rng: random.Random, common: Scenario) -> Scenario:
    step = rng.randrange(1, common.recipe.steps - 2)
    return _slow(rng, common, Trouble("hold-gil", step, rng.choice(_HOOKS), seconds=_LONG))


def _slow(rng: random.Random, common: Scenario, trouble: Trouble) -> Scenario:
    faults = _quick(rng, _Positions(rng, common), range(trouble.step - 1))
    return replace(common, troubles=(trouble,), faults=faults, heartbeat_timeout=_SHORT_TIMEOUT)


# ---------------------------------------------------------------------- faults of a machine


def _machine_errors(rng: random.Random, common: Scenario) -> Scenario:
    if common.pipelines == 1:
        common = replace(common, pipelines=2)
    positions, steps = _Positions(rng, common), common.recipe.steps
    worker, step = positions.take(), rng.randrange(1, steps - 2)
    kind = rng.choice(("OSError", "OSError", "MemoryError", "descriptors"))
    where = rng.choice((*_HOOKS, "forward", "forward")) if kind != "descriptors" else "on_train_batch_start"
    faults = _quick(rng, positions, range(step, steps), most=2)
    restart = rng.random() < 0.5
    return replace(common, troubles=(Trouble(kind, step, where, worker),), faults=faults, restart_workers=restart)


def _killed_loaders(rng: random.Random, common: Scenario) -> Scenario:
    if common.pipelines == 1:
        common = replace(common, pipelines=2)
    positions = _Positions(rng, common)
    worker = positions.take((0, common.stages - 1))  # inner stages read nothing
    trouble = Trouble("kill-loader", rng.randrange(common.recipe.steps - 2), worker=worker)
    faults = _quick(rng, positions, range(common.recipe.steps))
    restart = rng.random() < 0.5
    return replace(common, troubles=(trouble,), faults=faults, restart_workers=restart, loader_processes=1)


def _killed_forkserver(rng: random.Random, common: Scenario) -> Scenario:
    step = rng.randrange(common.recipe.steps - 4)
    trouble = Trouble("kill-forkserver", step, worker=_anybody(rng, common))
    faults = _quick(rng, _Positions(rng, common), range(common.recipe.steps), most=2)
    restart = rng.random() < 0.7
    return replace(common, troubles=(trouble,), faults=faults, restart_workers=restart)


# ---------------------------------------------------------------------- disks


def _full_disk(rng: random.Random, common: Scenario) -> Scenario:
    recipe = replace(common.recipe, checkpoint_every=2, keeps_best=False)
    steps = rng.randrange(3, 7)
    trouble = Trouble("fill-disk", rng.randrange(1, recipe.steps - steps - 3), steps=steps)
    faults = _quick(rng, _Positions(rng, common), range(recipe.steps))
    return replace(common, recipe=recipe, troubles=(trouble,), faults=faults)


def _full_tmpdir(rng: random.Random, common: Scenario) -> Scenario:
    recipe = replace(common.recipe, checkpoint_every=rng.choice((0, 3, 4)) if common.recipe.keeps_best else 3)
    trouble = Trouble("fill-tmpdir", rng.randrange(recipe.steps - 4), steps=recipe.steps)
    faults = _quick(rng, _Positions(rng, common), range(recipe.steps))
    return replace(common, recipe=recipe, troubles=(trouble,), faults=faults, restart_workers=rng.random() < 0.3)


# ---------------------------------------------------------------------- strangers, signals


def _strangers(rng: random.Random, common: Scenario) -> Scenario:
    # Connections are made, and a stranger can be there first, when a generation begins.
    faults = _quick(rng, _Positions(rng, common), range(2, common.recipe.steps), most=3, least=1)
    return replace(common, faults=faults, restart_workers=rng.random() < 0.5, strangers=True)


def _signals(rng: random.Random, common: Scenario) -> Scenario:
    recipe = replace(common.recipe, monitored="", stops=False, checkpoint_every=0, keeps_best=False)
    step = rng.randrange(1, STEPS_IF_STOPPED)
    trouble = Trouble(rng.choice(("SIGTERM", "SIGUSR1")), step, worker=_anybody(rng, common))
    faults = _quick(rng, _Positions(rng, common), range(step))
    return replace(common, recipe=recipe, troubles=(trouble,), faults=faults)


# ---------------------------------------------------------------------- as many workers as there are


def _elastic(rng: random.Random, common: Scenario) -> Scenario:
    """Three pipelines on one to six lanes. A worker of the launching process stays in each stage."""
    stages, begins, lanes = rng.choice((1, 1, 2)), rng.choice((1, 1, 2, 3)), 2 * _ELASTIC_PIPELINES
    steps = sorted(rng.sample(range(1, common.recipe.steps - 3, 3), rng.choice((2, 3, 4))))  # a change takes a few
    sizes = [rng.randint(begins * stages, lanes * stages) for _ in steps]
    if rng.random() < 0.3:
        sizes[:2] = lanes * stages, max(2, begins) * stages
    crowds = tuple(Crowd(step, size, kills=rng.random() < 0.4) for step, size in zip(steps, sizes, strict=True))
    initial = [(lane, stage) for lane in range(1, begins) for stage in range(stages)]
    faults = tuple(
        Fault(rng.choice(_ENDING_INITIAL), *position, rng.randrange(common.recipe.steps), rng.choice(_OPERATIONS))
        for position in rng.sample(initial, min(len(initial), rng.randint(0, 2)))
    )
    joined = [(lane, stage) for lane in range(begins, lanes) for stage in range(stages)]
    late = tuple(
        LateFault(rng.choice(_ENDING_JOINED if operations > 0 else _ANYWHERE), *position, operations)
        for position in rng.sample(joined, rng.randint(0, 3))
        for operations in (rng.choice((-1, 0, rng.randrange(1, 80))),)
    )
    sized = replace(common, family="elastic", pipelines=_ELASTIC_PIPELINES, stages=stages, lanes=lanes, begins=begins)
    return replace(sized, crowds=crowds, faults=faults, late_faults=late)


_DRAWS: dict[str, Callable[[random.Random, Scenario], Scenario]] = {
    "faults": _faults,
    "slow-hooks": _slow_hooks,
    "slow-microbatches": _slow_microbatches,
    "held-gil": _held_gil,
    "machine-errors": _machine_errors,
    "killed-loaders": _killed_loaders,
    "killed-forkserver": _killed_forkserver,
    "full-disk": _full_disk,
    "full-tmpdir": _full_tmpdir,
    "strangers": _strangers,
    "signals": _signals,
}
assert {*_DRAWS, "elastic"} == FAMILIES.keys()
