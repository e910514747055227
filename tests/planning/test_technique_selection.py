"""Techniques are on where the plan wins more than they cost."""

import pytest

from lightning_recycle import planning as p
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.layouts.technique_selection import choose_technique

FUSED, SPLIT = p.Technique(False, False), p.Technique(True, True)
GRID = p.Grid(3, 4, 6)


def problem(slower: float = 1.0, *failed: p.Worker, grid: p.Grid = GRID) -> p.Problem:
    """F = 1, BW = 2, and B + W ``slower`` times as long as BW."""
    costs = p.Costs.uniform(grid.stages, 1.0, slower, slower)
    return p.Problem(grid, costs, frozenset(failed))


def test_free_splitting_is_on_where_there_are_bubbles() -> None:
    choice = choose_technique(problem(), (2.0,) * 4)
    assert choice.technique == SPLIT
    assert dict(choice.compared)[FUSED] == 27
    assert choice.period < 20
    assert choice.splitting == 0


def test_splitting_that_costs_more_than_it_wins_is_off() -> None:
    choice = choose_technique(problem(2.0), (2.0,) * 4)
    assert not choice.technique.decoupled
    assert choice.splitting == pytest.approx(2 / 3)
    assert choice.why()[0].startswith("fused backwards")
    assert choice.why()[-1] == "split backwards cost 66.7 % of F and BW"


def test_one_stage_has_nothing_to_win() -> None:
    choice = choose_technique(problem(1.0, grid=p.Grid(3, 1, 6)), (2.0,))
    assert choice.technique == FUSED


def test_a_staggered_optimizer_that_costs_more_than_it_wins_is_off() -> None:
    dear = choose_technique(problem(), (2.0,) * 4, stagger_seconds=100.0)
    assert dear.technique == p.Technique(True, False)
    assert choose_technique(problem(), (2.0,) * 4).technique == SPLIT


def test_a_failure_can_make_splitting_pay() -> None:
    """With as many micro-batches as these there are hardly any bubbles, unless the peers of the dead leave some."""
    few = choose_technique(problem(1.06, p.Worker(1, 2)), (2.0,) * 4)
    assert few.technique.decoupled


@pytest.mark.parametrize("staggered", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_what_the_user_decides_is_kept(decoupled: bool, staggered: bool) -> None:
    choice = choose_technique(problem(2.0), (2.0,) * 4, decoupled=decoupled, staggered=staggered)
    assert choice.technique == p.Technique(decoupled, staggered)
    assert len(choice.compared) == 1


def test_bad_switches_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="decoupled='on'"):
        choose_technique(problem(), (2.0,) * 4, decoupled="on")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="one per stage"):
        choose_technique(problem(), (2.0,))
