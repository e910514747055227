"""The recovery decision, over every combination of statuses that survivors can report."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from lightning_recycle.control.protocol.messages import Adoption, Decision, WorkerStatus
from lightning_recycle.control.protocol.recovery import (
    Action,
    Adopt,
    Apply,
    AwaitPeers,
    CommitTogether,
    Confirm,
    Forget,
    Give,
    Serve,
    StepPart,
    Take,
    actions,
    decide,
    part_of,
)
from lightning_recycle.errors import ReCycleError
from lightning_recycle.planning.grid import Grid

T = 5  # the step that the failure hits
RUNNING, REDUCED, APPLIED = (T, False), (T, True), (T + 1, False)
GRIDS = [Grid(1, 1, 1), Grid(2, 1, 1), Grid(1, 3, 1), Grid(2, 2, 1), Grid(3, 2, 1), Grid(2, 3, 1)]


def reachable_statuses(grid: Grid) -> Iterator[dict[int, WorkerStatus]]:
    """Every report of every set of survivors that still holds all stages.

    Nobody can be further: REDUCED in step T+1 needs every worker to compute it, hence to have applied step T.
    """
    for choice in itertools.product((None, RUNNING, REDUCED, APPLIED), repeat=grid.num_workers):
        held = {rank: status for rank, status in enumerate(choice) if status is not None}
        if {grid.worker(rank).stage for rank in held} == set(range(grid.stages)):
            yield {rank: WorkerStatus(grid.worker(rank).stage, *status) for rank, status in held.items()}


def best_version(statuses: Mapping[int, WorkerStatus], stage: int) -> int:
    return max(s.version + int(s.reduced) for s in statuses.values() if s.column == stage)


def holds(status: WorkerStatus, step: int) -> bool:
    """Whether a worker still has the complete reduced gradient of ``step``: it keeps the newest two."""
    return status.version == step + 1 or (status.version == step and status.reduced)


def obey(status: WorkerStatus, decision: Decision) -> WorkerStatus:
    """What a survivor holds once it has carried out what the decision asks of it."""
    version, reduced = status.version, status.reduced
    for action in actions(0, status, decision, donors={}, commits=False, tied=False):
        match action:
            case Apply():
                assert reduced, "it applies a gradient that it does not hold"
                version, reduced = version + 1, False
            case Adopt():
                assert action.lacks == (version == action.step and not reduced)
                reduced = reduced or action.lacks
            case Serve():
                assert action.step == decision.version == version - 1
    return WorkerStatus(status.column, version, reduced)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_slowest_stage_decides_the_version_and_donors_hold_the_gradient_that_they_give(grid: Grid) -> None:
    adoptions = 0
    for statuses in reachable_statuses(grid):
        decision = decide(statuses)
        assert decision.version == min(best_version(statuses, stage) for stage in range(grid.stages)), statuses
        for adoption in decision.adoptions:
            adoptions += 1
            assert statuses[adoption.donor].column == adoption.column
            assert holds(statuses[adoption.donor], adoption.step), (adoption, statuses)
    assert (adoptions > 0) == (grid.pipelines > 1)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_survivors_that_obey_can_run_the_step_and_nothing_reduced_is_dropped(grid: Grid) -> None:
    for statuses in reachable_statuses(grid):
        decision = decide(statuses)
        for status in statuses.values():
            after = obey(status, decision)
            if status.column in decision.ahead:
                assert holds(after, decision.version), (status, statuses)
            else:
                assert (after.version, after.reduced) == (decision.version, False), (status, statuses)
            assert after.version >= status.version


def without_its_loss(grid: Grid) -> Iterator[dict[int, WorkerStatus]]:
    """Every report of survivors in a step whose loss is not known: nobody can have applied it."""
    return (held for held in reachable_statuses(grid) if all(status.version == T for status in held.values()))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_step_without_its_loss_is_not_committed_and_nothing_reduced_is_dropped(grid: Grid) -> None:
    all_ahead = 0
    for statuses in without_its_loss(grid):
        decision = decide(statuses, known_losses=T)
        assert decision.version == T, statuses
        ahead = {stage for stage in range(grid.stages) if best_version(statuses, stage) == T + 1}
        assert decision.ahead == ahead, statuses
        all_ahead += len(ahead) == grid.stages
        for status in statuses.values():
            after = obey(status, decision)
            assert after == WorkerStatus(status.column, T, status.column in ahead), (status, statuses)
        for adoption in decision.adoptions:
            assert holds(statuses[adoption.donor], adoption.step), (adoption, statuses)
    assert all_ahead > 0


@pytest.mark.parametrize(
    "statuses",
    [
        {0: WorkerStatus(0, T + 2, False), 1: WorkerStatus(1, T, False)},
        {0: WorkerStatus(0, T + 1, True), 1: WorkerStatus(1, T, False)},
        {0: WorkerStatus(0, T, False), 2: WorkerStatus(0, T + 2, False)},
    ],
)
def test_statuses_that_the_protocol_cannot_produce_are_an_error(statuses: dict[int, WorkerStatus]) -> None:
    with pytest.raises(ReCycleError, match="column 0 spans versions"):
        decide(statuses)


# ---------------------------------------------------------------------- what one worker does

HERE, AHEAD = Decision(T, frozenset(), ()), Decision(T, frozenset({0}), ())
ROLLED_FORWARD = Decision(T + 1, frozenset(), (Adoption(0, T, 2),))
ADOPTED_AHEAD = Decision(T, frozenset({0}), (Adoption(0, T, 2),))
ADOPTED_ELSEWHERE = Decision(T + 1, frozenset(), (Adoption(1, T, 3),))
LATE = Decision(T + 1, frozenset({0}), (Adoption(0, T + 1, 2),))


@pytest.mark.parametrize(
    ("status", "decision", "options", "expected"),
    [
        (RUNNING, HERE, {}, []),
        (APPLIED, AHEAD, {}, [Serve(T)]),
        (REDUCED, AHEAD, {}, []),  # the step's own run serves the others
        (REDUCED, HERE, {"tied": True, "commits": True}, [Forget()]),
        (REDUCED, ROLLED_FORWARD, {}, [Adopt(T, 2, lacks=False), AwaitPeers(), Apply()]),
        (RUNNING, ROLLED_FORWARD, {}, [Adopt(T, 2, lacks=True), AwaitPeers(), Apply()]),
        (APPLIED, ROLLED_FORWARD, {}, [Adopt(T, 2, lacks=False), AwaitPeers()]),
        (RUNNING, ROLLED_FORWARD, {"commits": True}, [Adopt(T, 2, True), AwaitPeers(), CommitTogether(T), Apply()]),
        (REDUCED, ADOPTED_ELSEWHERE, {"commits": True}, [CommitTogether(T), Apply()]),
        (REDUCED, ADOPTED_ELSEWHERE, {}, [Apply()]),
        (RUNNING, ADOPTED_AHEAD, {}, [Adopt(T, 2, lacks=True), AwaitPeers()]),
        (RUNNING, ADOPTED_AHEAD, {"tied": True, "commits": True}, [Adopt(T, 2, True), AwaitPeers(), Forget()]),
        (REDUCED, LATE, {}, [Apply(), Adopt(T + 1, 2, lacks=True), AwaitPeers()]),
        (RUNNING, HERE, {"donors": {2: 0, 4: 0, 5: 3}}, [Give((2, 4))]),
        ((-1, False), HERE, {"donors": {0: 2}}, [Take(2)]),
    ],
)
def test_actions_of_a_worker_in_a_recovery(
    status: tuple[int, bool], decision: Decision, options: dict[str, Any], expected: list[Action]
) -> None:
    arguments = {"donors": {}, "commits": False, "tied": False, **options}
    assert actions(0, WorkerStatus(0, *status), decision, **arguments) == tuple(expected)


@pytest.mark.parametrize(
    ("decision", "options", "expected"),
    [
        (AHEAD, {}, [Serve(T)]),  # it stays speculative
        (AHEAD, {"confirmed": True}, [Confirm(T), Serve(T)]),
        (Decision(T + 1, frozenset(), ()), {}, [Confirm(T)]),
        (ROLLED_FORWARD, {}, [Confirm(T), Adopt(T, 2, lacks=False), AwaitPeers()]),
        (Decision(T + 1, frozenset(), ()), {"donors": {2: 0}}, [Confirm(T), Give((2,))]),
    ],
)
def test_a_speculative_step_is_confirmed_first_if_the_step_is_committed_or_all_contributions_to_it_are_known(
    decision: Decision, options: dict[str, Any], expected: list[Action]
) -> None:
    arguments = {"donors": {}, "commits": False, "tied": False, **options}
    status = WorkerStatus(0, T + 1, False, speculative=True)
    assert status.commit_step == T
    assert actions(0, status, decision, **arguments) == tuple(expected)


def test_a_worker_never_applies_a_gradient_that_it_lacks() -> None:
    with pytest.raises(ReCycleError, match="worker 0 is to apply step 5, whose gradient it lacks"):
        actions(0, WorkerStatus(0, T, False), Decision(T + 1, frozenset(), ()), {}, commits=False, tied=False)


@pytest.mark.parametrize(
    ("version", "reduced", "expected"),
    [
        (T, False, StepPart(computes_weights=True, reduces=True, buffer_step=T, applies=True, awaits_peers=True)),
        (T, True, StepPart(computes_weights=False, reduces=False, buffer_step=T + 1, applies=True, awaits_peers=True)),
        (
            T + 1,
            False,
            StepPart(computes_weights=False, reduces=False, buffer_step=T + 1, applies=False, awaits_peers=True),
        ),
    ],
)
def test_what_a_worker_does_of_a_step_leaves_alone_what_is_done(
    version: int, reduced: bool, expected: StepPart
) -> None:
    assert part_of(T, version, reduced, idle_peer=True) == expected


def test_nobody_goes_back_to_parameters_that_it_has_not_kept() -> None:
    statuses = {0: WorkerStatus(0, 5, False, has_shadow=False), 1: WorkerStatus(1, 4, False)}
    with pytest.raises(ReCycleError, match=r"column 0 has applied step 4, .* has not kept the parameters"):
        decide(statuses)
