"""What follows from trials of splitting backwards, and whether it pays. Measurements are made up."""

from dataclasses import replace

import pytest

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import Costs, Grid, Problem, Technique, Worker, solve
from lightning_recycle.planning.split_backward import SplitCosts, SplitTrial, TechniqueChoice, choose_technique

GRID = Grid(2, 2, 4)
TRIAL = SplitTrial((1.0, 2.0), (1.1, 1.2, 0.9), 3.0, 3.2, "a", 2.0)


def everywhere(trial: SplitTrial = TRIAL) -> SplitCosts:
    return SplitCosts(GRID, dict.fromkeys(GRID.workers(), trial))


def test_what_a_split_forward_takes_longer_counts_as_part_of_the_backward():
    assert TRIAL.longer == pytest.approx(2.2 / 2.0)
    assert TRIAL.input_share == pytest.approx(1.2 / 2.1)


def test_costs_of_fused_backwards_become_those_of_split_ones_and_back():
    fused = Costs((10.0, 10.0), (10.0, 20.0), (10.0, 20.0), (0.0, 0.0), (1.0, 1.0))
    known = everywhere()
    split = known.of_split(fused, (True, True))
    both = [b + w for b, w in zip(split.backward_input, split.backward_weight, strict=True)]
    assert both == pytest.approx([22.0, 44.0])
    assert split.backward_input[0] == pytest.approx(22.0 * TRIAL.input_share)
    assert (split.forward, split.optimizer) == (fused.forward, fused.optimizer)
    again = known.of_fused(Problem(GRID, split, technique=Technique(True, False)))
    assert again.technique == Technique(False, False)
    assert (again.costs.backward_input, again.costs.backward_weight) == (pytest.approx((10.0, 20.0)),) * 2
    assert known.of_split(split, (False, False)) == split, "they are split already"


def test_splitting_is_never_less_work():
    lucky = replace(TRIAL, split=(0.9, 0.9, 0.9), busy_split=2.0)
    assert lucky.longer == 1.0
    known = everywhere(lucky)
    split, fused = (
        known.least_seconds(Problem(GRID, Costs.uniform(2), technique=Technique(on))) for on in (True, False)
    )
    assert split == fused


def test_a_step_takes_at_least_what_it_keeps_the_busiest_machine_busy():
    problem = Problem(GRID, Costs.uniform(2))
    assert everywhere().least_seconds(problem) == pytest.approx(4 * 4 * 3.2 / 2), "four workers on two cores"
    trials = {worker: replace(TRIAL, place=str(worker.stage)) for worker in GRID.workers()}
    apart = SplitCosts(GRID, trials)
    assert apart.least_seconds(problem) == pytest.approx(2 * 4 * 3.2 / 2)
    lost = replace(problem, failed=frozenset({Worker(1, 0)}))
    assert apart.least_seconds(lost) == pytest.approx(8 * 3.2 / 2), "one has the work of two"
    fused = replace(problem, technique=Technique(split_backward=False))
    assert apart.least_seconds(fused) == pytest.approx(2 * 4 * 3.0 / 2)


def test_measured_operations_are_divided_as_in_the_trial():
    divided = TRIAL.divided({"F": 1.0, "BW": 4.0})
    assert divided["B"] + divided["W"] == pytest.approx(4.4)
    assert TRIAL.divided({"F": 1.0, "B": 4.0, "W": 1.0}) == {"F": 1.0, "B": 4.0, "W": 1.0}


def test_bad_trials():
    with pytest.raises(ConfigurationError, match="busy_split"):
        replace(TRIAL, busy_split=-1.0)
    with pytest.raises(ConfigurationError, match="some processors"):
        replace(TRIAL, processors=0.0)
    with pytest.raises(ConfigurationError, match=r"stages \[1\]"):
        SplitCosts(GRID, {Worker(0, 0): TRIAL})


EXAMPLE = Grid(3, 4, 6)


def chosen(slower: float = 1.0, *failed: Worker, grid: Grid = EXAMPLE, staggered: bool = True) -> TechniqueChoice:
    """F = 1, BW = 2, and B + W ``slower`` times as long as BW; nobody computes."""
    trial = SplitTrial((1.0, 2.0), (1.0, slower, slower), 0.0, 0.0, "a")
    problem = Problem(
        grid, Costs.uniform(grid.stages, 1.0, slower, slower), frozenset(failed), Technique(True, staggered)
    )
    result, choice = choose_technique(problem, SplitCosts(grid, dict.fromkeys(grid.workers(), trial)), solve)
    assert result.schedule.problem.technique == Technique(choice.splits, staggered)
    return choice


@pytest.mark.parametrize(("staggered", "fused"), [(True, 27), (False, 27)])
def test_free_splitting_is_on_where_there_are_bubbles(staggered, fused):
    choice = chosen(staggered=staggered)
    assert choice.splits
    assert choice.fused_seconds == fused
    assert choice.split_seconds < 22
    assert choice.gain == pytest.approx(1 - choice.split_seconds / fused)
    assert choice.splitting == 0


def test_splitting_that_costs_more_than_it_wins_is_off():
    choice = chosen(2.0)
    assert not choice.splits
    assert choice.splitting == pytest.approx(2 / 3)
    facts = choice.facts
    assert (facts["split"], facts["cost"]) == (False, choice.splitting)
    assert facts["fused_seconds"] == 27 < facts["split_seconds"]
    assert facts["wins"] == pytest.approx(1 - facts["split_seconds"] / 27)
