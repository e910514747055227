"""Which stages have more workers than others: found by drafts."""

from collections.abc import Callable
from itertools import permutations
from math import inf

import pytest

from lightning_recycle.planning.worker_orders import better_orders


class Counted:
    """A draft that notes what it was asked."""

    def __init__(self, draft: Callable[[tuple[int, ...]], float]) -> None:
        self.draft, self.asked = draft, list[tuple[int, ...]]()

    def __call__(self, counts: tuple[int, ...]) -> float:
        self.asked.append(counts)
        return self.draft(counts)


def late(counts: tuple[int, ...]) -> float:
    """Best where the last stages have the most workers, with a minimum that exchanges lead to from anywhere."""
    return -sum(stage * count for stage, count in enumerate(counts))


@pytest.mark.parametrize("start", sorted(set(permutations((2, 3, 4, 4)))))
def test_the_best_order_is_found_from_any_other(start: tuple[int, ...]) -> None:
    draft = Counted(late)
    assert better_orders([start], draft, 100)[0] == (2, 3, 4, 4)
    assert len(draft.asked) == len(set(draft.asked))
    assert all(sorted(counts) == [2, 3, 4, 4] for counts in draft.asked)


def test_the_search_goes_on_from_the_best_start() -> None:
    found = better_orders([(4, 3, 2), (4, 1, 4), (4, 3, 2)], late, 100)
    assert found[0] == (1, 4, 4)
    assert set(found) == {(4, 3, 2), (4, 1, 4), (1, 4, 4), (4, 4, 1)}
    assert [late(counts) for counts in found] == sorted(late(counts) for counts in found)


@pytest.mark.parametrize("most", range(6))
def test_there_are_no_more_drafts_than_asked_for(most: int) -> None:
    draft = Counted(late)
    assert len(better_orders([(4, 3, 2), (2, 3, 4)], draft, most)) == len(draft.asked) == min(most, 4)


def test_what_has_no_plan_comes_last() -> None:
    found = better_orders([(2, 1)], lambda counts: inf if counts == (2, 1) else 1.0, 10)
    assert found == [(1, 2), (2, 1)]


def test_stages_that_are_alike_have_one_order() -> None:
    draft = Counted(late)
    assert better_orders([(3, 3, 3)], draft, 10) == [(3, 3, 3)] == draft.asked
    assert better_orders([], draft, 10) == []
