import dataclasses

import pytest
from overhead import SIDES, Plan, Size, play_round

SIZE = Size("test", width=16, blocks=1, heads=2, context=8, batch_size=4, steps_per_turn=2, dropout=0.0)


def test_all_sides_take_their_turns_and_train_the_same_model():
    turns, losses = play_round(Plan(SIZE, turns=2, warmup=1))
    assert {side: len(mine) for side, mine in turns.items()} == dict.fromkeys(SIDES, 2)
    assert all(turn.seconds > 0 and turn.processor_seconds > 0 for mine in turns.values() for turn in mine)
    for side in SIDES:
        assert losses[side] == pytest.approx(losses["baseline"], rel=1e-5), side


def test_gates_lie_after_the_warmup_and_between_turns():
    plan = Plan(dataclasses.replace(SIZE, steps_per_turn=3), turns=2, warmup=4)
    assert [step for step in range(plan.steps) if plan.is_gate(step)] == [4, 7]
