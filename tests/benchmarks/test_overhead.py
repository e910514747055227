import dataclasses

import pytest
from overhead import SIDES, Plan, Size, play_round

pytestmark = pytest.mark.long

SIZE = Size("test", width=16, blocks=1, heads=2, context=8, batch_size=4, steps_per_turn=2, dropout=0.0)


def test_all_sides_take_their_turns_and_train_the_same_model():
    played = play_round(Plan(SIZE, turns=2, warmup=1))
    assert {side: len(mine.turns) for side, mine in played.items()} == dict.fromkeys(SIDES, 2)
    assert all(turn.seconds > 0 and turn.processor_seconds > 0 for mine in played.values() for turn in mine.turns)
    for side, mine in played.items():
        assert mine.loss == pytest.approx(played["baseline"].loss, rel=1e-5), side
        assert mine.memory.state == played["baseline"].memory.state, side
        assert mine.memory.state < mine.memory.own < mine.memory.peak, side


def test_gates_lie_after_the_warmup_and_between_turns():
    plan = Plan(dataclasses.replace(SIZE, steps_per_turn=3), turns=2, warmup=4)
    assert [step for step in range(plan.steps) if plan.is_gate(step)] == [4, 7]
