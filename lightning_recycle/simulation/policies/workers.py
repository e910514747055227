"""Placements: physical workers, their positions in a grid, and whole pipelines made of them.

Concept: physical workers are numbered ``node * workers_per_node + i``. A policy's layout says which worker has which
position; the functions here move them with as little copying as possible.

Contract: pure. Internal to ``policies``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from lightning_recycle.planning import Grid, Worker, layer_moves, normalized_failures, roles
from lightning_recycle.simulation.policies.policy import Configuration, Context, Policy, stopped

__all__ = [
    "Placement",
    "Teams",
    "assemble_teams",
    "fresh",
    "live_workers",
    "place",
    "share_batch",
    "whole_pipelines",
]

Teams = tuple[tuple[int, ...], ...]
"""Pipelines as tuples of physical workers, by stage."""


def live_workers(context: Context, nodes: Iterable[int]) -> tuple[int, ...]:
    """The physical workers of live nodes, in order."""
    each = context.cluster.workers_per_node(context.model)
    return tuple(node * each + i for node in sorted(nodes) for i in range(each))


# -- positions in a grid with holes (ReCycle) -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    """Position of each physical worker that has one, as sorted pairs.

    Args:
        positions: pairs (worker, position).
        copies: the most states any worker must send to reach this placement; different senders copy in parallel.
    """

    positions: tuple[tuple[int, Worker], ...]
    copies: int = 0

    def failures(self, grid: Grid) -> tuple[int, ...]:
        """Vacant positions of each stage."""
        held = Counter(position.stage for _, position in self.positions)
        return tuple(grid.pipelines - held[stage] for stage in range(grid.stages))


def fresh(grid: Grid, workers: Collection[int], distribution: tuple[int, ...]) -> Placement:
    """A fresh placement: every worker loads its state from a checkpoint."""
    gone = normalized_failures(grid, distribution)
    positions = [position for position in grid.workers() if position not in gone]
    return Placement(tuple(zip(sorted(workers), positions, strict=False)))


def keep(grid: Grid, before: Placement, workers: Collection[int]) -> tuple[dict[int, Worker], list[Worker]]:
    """Workers that keep their positions, and the vacant positions; idle workers first fill the barest stages."""
    live = set(workers)
    held = {worker: position for worker, position in before.positions if worker in live}
    idle = sorted(live.difference(held))
    vacant = sorted(set(grid.workers()).difference(held.values()))
    lost = Counter(position.stage for position in vacant)
    if any(count == grid.pipelines for count in lost.values()):
        return held, vacant
    for worker in idle[: len(vacant)]:
        position = max(vacant, key=lambda place: (lost[place.stage], -place.pipeline, -place.stage))
        vacant.remove(position)
        lost[position.stage] -= 1
        held[worker] = position
    return held, vacant


def place(
    grid: Grid, before: Placement, workers: Collection[int], distribution: tuple[int, ...] | None = None
) -> Placement | None:
    """The new placement of ``workers``; None when a stage has lost all its replicas.

    Args:
        grid: the grid.
        before: the previous placement.
        workers: the live workers; those without a position fill vacant ones.
        distribution: failures of each stage after normalization; None leaves the failures where they are.
    """
    held, vacant = keep(grid, before, workers)
    if any(all(Worker(d, stage) in vacant for d in range(grid.pipelines)) for stage in range(grid.stages)):
        return None
    known = {worker for worker, _ in before.positions}
    senders: Counter[Worker] = Counter()
    for worker, position in held.items():
        if worker not in known:
            peers = [place for other, place in held.items() if place.stage == position.stage and other in known]
            senders[min(peers, key=lambda peer: (senders[peer], peer))] += 1
    if distribution is not None:
        taken = roles(grid, vacant, distribution)
        stages = range(grid.stages + 1)  # each is moved as a whole
        senders.update(move.source for move in layer_moves(grid, vacant, stages, stages, taken))
        held = {worker: taken[position] for worker, position in held.items()}
    return Placement(tuple(sorted(held.items())), max(senders.values(), default=0))


# -- whole pipelines ---------------------------------------------------------------------------------------------------


def assemble_teams(
    before: Teams, workers: Collection[int], stages: int, most: int, *, repair: bool = True
) -> tuple[Teams, int]:
    """Whole pipelines of live workers, and how many workers must be given a state.

    Args:
        before: the previous pipelines.
        workers: the live workers.
        stages: workers per pipeline.
        most: number of pipelines wanted.
        repair: whether to fill gaps of broken pipelines, first with idle workers, then with those of the most broken
            one, which need no copy where they had the same stage. Otherwise broken pipelines are dissolved, and only
            enough idle workers form a new one.
    """
    live = set(workers)
    whole = [team for team in before if live.issuperset(team)]
    broken = sorted(
        ([worker if worker in live else None for worker in team] for team in before if not live.issuperset(team)),
        key=lambda team: team.count(None),
    )
    idle = sorted(live.difference(worker for team in before for worker in team))
    free: dict[int, int] = {}  # workers of dissolved pipelines, with the stage whose newest state they have
    copied = 0
    while broken and repair:
        team = broken.pop(0)
        gaps = [stage for stage, worker in enumerate(team) if worker is None]
        while broken and len(idle) + len(free) < len(gaps):
            free |= {worker: stage for stage, worker in enumerate(broken.pop()) if worker is not None}
        if len(idle) + len(free) < len(gaps):
            idle += [worker for worker in team if worker is not None]
            break
        for stage in gaps:
            same = sorted(worker for worker, had in free.items() if had == stage)
            if same:
                team[stage] = same[0]
                del free[same[0]]
        for stage in (stage for stage in gaps if team[stage] is None):
            team[stage] = idle.pop(0) if idle else min(free)
            free.pop(team[stage] or 0, None)
            copied += 1
        whole.append(tuple(worker for worker in team if worker is not None))
    idle += [*free, *(worker for team in broken for worker in team if worker is not None)]
    idle.sort()
    while len(whole) < most and len(idle) >= stages:
        whole.append(tuple(idle[:stages]))
        copied += stages
        idle = idle[stages:]
    return tuple(sorted(whole[:most])), copied


def whole_pipelines(
    context: Context, policy: Policy, teams: Teams, label: str, *, keep_batch: bool = True
) -> Configuration:
    """Whole pipelines with the policy's schedule and checkpoints.

    Args:
        context: the model and the cluster.
        policy: the policy.
        teams: the workers of each pipeline.
        label: label of the configuration.
        keep_batch: whether the pipelines share the whole global batch, in shares that differ by at most one micro-batch
            (a step takes as long as the largest share); otherwise each keeps its own part.
    """
    model, count = context.model, len(teams)
    if not count:
        return stopped("too few workers for a pipeline", teams)
    grid = model.grid
    micro = -(-grid.global_microbatches // count) if keep_batch else grid.microbatches
    step = policy.pipeline_step(model, micro)
    part = 1.0 if keep_batch else count / grid.pipelines
    label += "" if count == grid.pipelines else f", {count} of {grid.pipelines} pipelines"
    return policy.running(context, label, step, count * grid.stages, teams, part=part)


def share_batch(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """``total`` micro-batches over pipelines so that the least-squares difference of their times is smallest.

    Args:
        total: micro-batches in a step.
        speeds: micro-batches per second of each pipeline in steady state.

    Without rounding the solution is proportional to speed (all times equal). It is rounded to whole
    micro-batches by giving the next one to the pipeline that finishes it first; each gets at least one.
    """
    shares = [max(1, math.floor(total * speed / sum(speeds))) for speed in speeds]
    while sum(shares) > total:
        slowest = max(range(len(shares)), key=lambda i: (shares[i] > 1, shares[i] / speeds[i]))
        shares[slowest] -= 1
    while sum(shares) < total:
        next_one = min(range(len(shares)), key=lambda i: ((shares[i] + 1) / speeds[i], i))
        shares[next_one] += 1
    return tuple(shares)
