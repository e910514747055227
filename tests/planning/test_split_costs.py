"""What follows from trials of splitting backwards. Measurements are made up."""

from dataclasses import replace

import pytest

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import Costs, Grid, Problem, Technique, Worker
from lightning_recycle.planning.profile import SplitCosts, SplitTrial

GRID = Grid(2, 2, 4)
TRIAL = SplitTrial((1.0, 2.0), (1.1, 1.2, 0.9), 3.0, 3.2, "a", 2.0)


def everywhere(trial: SplitTrial = TRIAL) -> SplitCosts:
    return SplitCosts(GRID, dict.fromkeys(GRID.workers(), trial))


def test_what_a_split_forward_takes_longer_counts_as_part_of_the_backward() -> None:
    assert TRIAL.longer == pytest.approx(2.2 / 2.0)
    assert TRIAL.input_share == pytest.approx(1.2 / 2.1)


def test_costs_of_fused_backwards_become_those_of_split_ones_and_back() -> None:
    fused = Costs((10.0, 10.0), (10.0, 20.0), (10.0, 20.0), (0.0, 0.0), (1.0, 1.0))
    known = everywhere()
    split = known.of_split(fused, (True, True))
    both = [b + w for b, w in zip(split.backward_input, split.backward_weight, strict=True)]
    assert both == pytest.approx([22.0, 44.0])
    assert split.backward_input[0] == pytest.approx(22.0 * TRIAL.input_share)
    assert (split.forward, split.optimizer) == (fused.forward, fused.optimizer)
    assert known.of_fused(split, (False, False)) == pytest.approx((20.0, 40.0))
    assert known.of_split(split, (False, False)) == split, "they are split already"
    assert known.of_fused(fused, (True, True)) == (20.0, 40.0)


def test_splitting_is_never_less_work() -> None:
    lucky = replace(TRIAL, split=(0.9, 0.9, 0.9), busy_split=2.0)
    assert lucky.longer == 1.0
    known = everywhere(lucky)
    split, fused = (
        known.least_seconds(Problem(GRID, Costs.uniform(2), technique=Technique(on))) for on in (True, False)
    )
    assert split == fused


def test_a_step_takes_at_least_what_it_keeps_the_busiest_machine_busy() -> None:
    problem = Problem(GRID, Costs.uniform(2))
    assert everywhere().least_seconds(problem) == pytest.approx(4 * 4 * 3.2 / 2), "four workers on two cores"
    trials = {worker: replace(TRIAL, place=str(worker.stage)) for worker in GRID.workers()}
    apart = SplitCosts(GRID, trials)
    assert apart.least_seconds(problem) == pytest.approx(2 * 4 * 3.2 / 2)
    lost = replace(problem, failed=frozenset({Worker(1, 0)}))
    assert apart.least_seconds(lost) == pytest.approx(8 * 3.2 / 2), "one has the work of two"
    coupled = replace(problem, technique=Technique(decoupled=False))
    assert apart.least_seconds(coupled) == pytest.approx(2 * 4 * 3.0 / 2)


def test_measured_operations_are_divided_as_in_the_trial() -> None:
    divided = TRIAL.divided({"F": 1.0, "BW": 4.0})
    assert divided["B"] + divided["W"] == pytest.approx(4.4)
    assert TRIAL.divided({"F": 1.0, "B": 4.0, "W": 1.0}) == {"F": 1.0, "B": 4.0, "W": 1.0}


def test_bad_trials() -> None:
    with pytest.raises(ConfigurationError, match="busy_split"):
        replace(TRIAL, busy_split=-1.0)
    with pytest.raises(ConfigurationError, match="some processors"):
        replace(TRIAL, processors=0.0)
    with pytest.raises(ConfigurationError, match=r"stages \[1\]"):
        SplitCosts(GRID, {Worker(0, 0): TRIAL})
