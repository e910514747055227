"""Functions that run in turns, and meet."""

import threading

import pytest

from lightning_recycle import UnsupportedFeatureError
from lightning_recycle.runtime.manual_step_runner import Lockstep


class Place:
    def __init__(self, notes, number):
        self.notes, self.number = notes, number

    def __enter__(self):
        self.notes.append(f"in {self.number}")

    def __exit__(self, *_):
        self.notes.append(f"out {self.number}")


def places(count, notes=None):
    return [Place([] if notes is None else notes, number) for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_is_done_together_is_done_once_with_all_parts_by_the_caller(count):
    turns = Lockstep(places(count))
    calls = []

    def together(parts):
        calls.append((parts, threading.current_thread()))
        return sum(parts)

    def body(number):
        total = turns.meet("one", number, together)
        return turns.meet("two", total * number, together) + turns.number

    total = sum(range(count))
    assert turns.run([lambda n=n: body(n) for n in range(count)]) == [total**2 + n for n in range(count)]
    assert [parts for parts, _ in calls] == [list(range(count)), [total * n for n in range(count)]]
    assert {thread for _, thread in calls} == {threading.current_thread()}


def test_turns_are_in_order_each_in_its_place():
    notes = []
    turns = Lockstep(places(2, notes))

    def body(number):
        notes.append(f"{number} begins")
        turns.meet("here", None, lambda _: notes.append("together"))
        notes.append(f"{number} ends")

    turns.run([lambda: body(0), lambda: body(1)])
    assert notes[:13] == [
        "in 0", "0 begins", "out 0", "in 1", "1 begins", "out 1",
        "in 0", "together", "out 0",
        "in 0", "0 ends", "out 0", "in 1",
    ]  # fmt: skip


@pytest.mark.parametrize("raising", [0, 1, "together"])
def test_an_error_ends_all(raising):
    before = threading.active_count()
    turns = Lockstep(places(2))
    ended = []

    def together(_):
        if raising == "together":
            raise KeyError("together")

    def body(number):
        try:
            turns.meet("one", None, together)
            if number == raising:
                raise KeyError(number)
            turns.meet("two", None, together)
        except Exception:
            ended.append("except Exception")
            raise
        finally:
            ended.append(number)

    with pytest.raises(KeyError, match=str(raising)):
        turns.run([lambda: body(0), lambda: body(1)])
    assert sorted(item for item in ended if item != "except Exception") == [0, 1]
    assert ended.count("except Exception") == (0 if raising == "together" else 1)
    assert threading.active_count() == before


def test_different_ways_are_an_error_that_names_them():
    turns = Lockstep(places(2))

    def body(number):
        turns.meet("a backward pass", None, lambda _: None)
        if number:
            turns.meet("a step of optimizer 1", None, lambda _: None)

    with pytest.raises(UnsupportedFeatureError, match="the end of the step and a step of optimizer 1"):
        turns.run([lambda: body(0), lambda: body(1)])


def test_a_further_meeting_of_one_that_is_ended_ends_it_too():
    turns = Lockstep(places(2))

    def body(number):
        try:
            turns.meet("one", None, lambda _: 1 / 0)
        finally:
            turns.meet("two", None, lambda _: None)

    with pytest.raises(ZeroDivisionError):
        turns.run([lambda: body(0), lambda: body(1)])
