"""Interval of checkpoints: Young's formula, from facts that all workers have in common."""

import math
from dataclasses import replace

import pytest

from lightning_recycle.session.model_checkpoint import SaveFacts, SaveInterval, steps_between_saves

FACTS = SaveFacts(stalled=0.5, writing=1.0, step=0.1, failures=4, trained=4 * 3600.0)


def test_it_is_the_one_of_youngs_formula() -> None:
    steps, why = steps_between_saves(FACTS, workers=8)
    assert steps == round(math.sqrt(2 * 0.5 * 3600) / 0.1)
    assert "a failure every 1 hours (4 so far)" in why


def test_before_the_first_failure_it_follows_from_the_number_of_workers() -> None:
    few, _ = steps_between_saves(replace(FACTS, failures=0), workers=4)
    many, _ = steps_between_saves(replace(FACTS, failures=0), workers=400)
    assert few == round(math.sqrt(2 * 0.5 * 50_700 * 3600 / 4) / 0.1)
    assert many == pytest.approx(few / 10, rel=1e-3)


def test_checkpoints_do_not_pile_up() -> None:
    assert steps_between_saves(replace(FACTS, stalled=0.0, writing=7.0), workers=4)[0] == 140
    assert steps_between_saves(replace(FACTS, stalled=0.0, writing=0.0), workers=4)[0] == 1


def test_failures_and_time_add_up_over_peers_and_runs() -> None:
    failures = [0.0]
    first = SaveInterval(lambda: failures[0])
    first.begin(0)
    failures[0] = 2.0
    first.steps = 50
    state = {**first.state(), "trained": 1000.0}
    peer, later = SaveInterval(lambda: failures[0]), SaveInterval(lambda: 0.0)
    peer.load(state, of_peer=True)
    later.load(state, of_peer=False)
    assert peer.steps == later.steps == 50
    assert peer.facts(0.0, 0.0, 10).failures == 2
    assert later.facts(0.0, 0.0, 10).failures == 3  # something has ended the first run
    failures[0] = 3.0
    assert peer.facts(0.0, 0.0, 10).failures == 3
    assert 1000.0 <= peer.facts(0.0, 0.0, 10).trained < 1100.0
