"""Where the workers of a grid go, over plain data."""

from __future__ import annotations

import pytest

from lightning_recycle.engines.ray_placement import Node, Staffing, homes, room, staffing, stand_in

CPU = {"CPU": 1.0}


def nodes(**cpus: float) -> list[Node]:
    return [Node(name, {"CPU": amount}) for name, amount in cpus.items()]


def test_room_is_what_the_scarcest_resource_allows() -> None:
    node = Node("n", {"CPU": 8.0, "GPU": 2.0})
    assert room(node, CPU) == 8
    assert room(node, {"CPU": 1.0, "GPU": 1.0}) == 2
    assert room(node, {"CPU": 1.0, "TPU": 1.0}) == 0
    assert room(Node("n", {"CPU": 0.3}), {"CPU": 0.1}) == 3
    assert room(node, {"CPU": 0.0}) > 1000


def test_each_pipeline_has_a_node_of_its_own() -> None:
    assert homes(nodes(a=2, b=2, c=2), CPU, 2, 2) == [("a", "a"), ("b", "b")]


def test_a_large_node_does_not_get_two_pipelines_while_there_are_others() -> None:
    assert homes(nodes(a=8, b=2), CPU, 2, 2) == [("b", "b"), ("a", "a")]


def test_a_pipeline_that_no_node_has_room_for_gets_several_of_its_own() -> None:
    assert homes(nodes(a=1, b=1, c=1, d=1), CPU, 2, 2) == [("a", "b"), ("c", "d")]
    assert homes(nodes(a=3, b=3, c=3, d=3), CPU, 2, 4) == [("a", "a", "a", "b"), ("c", "c", "c", "d")]


def test_what_fits_nowhere_by_itself_goes_anywhere() -> None:
    assert homes(nodes(a=4), CPU, 2, 2) == [("a", "a"), None]
    assert homes([], CPU, 2, 2) == [None, None]


@pytest.mark.parametrize("cpus", [{"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 1, "c": 1, "d": 1}, {"a": 4, "b": 4}])
def test_no_node_has_two_replicas_of_a_stage(cpus: dict[str, float]) -> None:
    found = homes(nodes(**cpus), CPU, 2, 2)
    assert found[0] is not None
    assert found[1] is not None
    assert not set(found[0]) & set(found[1])


def test_a_stand_in_avoids_the_nodes_of_the_others() -> None:
    assert stand_in(nodes(a=2, b=0, c=1), CPU, ["a"]) == "c"
    assert stand_in(nodes(a=2, b=0), CPU, ["a"]) is None
    assert stand_in(nodes(a=1, b=3), CPU, []) == "b"


# ---------------------------------------------------------------------- how many


A, B, C, D = ("n1", 1), ("n1", 2), ("n2", 1), ("n2", 2)
FULL = {0: A, 1: B, 2: C, 3: D}
WORKERS = {10: A, 11: B, 12: C, 13: D}
NOBODY = dict.fromkeys(range(4))


def decide(positions=FULL, workers=WORKERS, placed=(10, 11, 12, 13), going=()) -> Staffing:  # type: ignore[no-untyped-def]
    return staffing(positions, workers, placed, going)


def todo(request: int = 0, leave: tuple[str, ...] = (), end: tuple[int, ...] = ()) -> Staffing:
    return Staffing(request, frozenset(leave), frozenset(end))


def test_a_run_begins_with_a_worker_for_each_position() -> None:
    assert decide(NOBODY, {}, ()) == todo(request=4)
    assert decide(NOBODY, dict.fromkeys(range(4)), ()) == todo()  # on their way
    assert decide(NOBODY, WORKERS, ()) == todo()  # there, and not placed yet


def test_a_full_grid_needs_nothing() -> None:
    assert decide() == todo()


def test_a_dead_worker_is_asked_for_once() -> None:
    left = {10: A, 12: C, 13: D}
    assert decide({**FULL, 1: None}, left) == todo(request=1)
    assert decide({**FULL, 1: None}, {**left, 14: None}) == todo()


def test_a_dead_worker_that_the_run_still_counts_on_is_not_replaced_yet() -> None:
    assert decide(FULL, {10: A, 12: C, 13: D}) == todo()


def test_a_worker_that_was_given_up_is_ended_and_replaced() -> None:
    assert decide({**FULL, 1: None}) == todo(request=1, end=(11,))
    assert decide({**FULL, 1: ("n3", 7)}, {**WORKERS, 14: ("n3", 7)}) == todo(end=(11,))


def test_who_waits_as_a_spare_is_left_alone() -> None:
    assert decide(FULL, {**WORKERS, 14: ("n3", 7)}) == todo()


def test_workers_of_a_machine_that_goes_leave_and_are_replaced_before() -> None:
    assert decide(going=("n1",)) == todo(request=2, leave=("n1",))
    assert decide(workers={**WORKERS, 14: None}, going=("n1",)) == todo(request=1, leave=("n1",))
    assert decide(workers={**WORKERS, 14: None, 15: ("n3", 5)}, going=("n1",)) == todo(leave=("n1",))


def test_a_spare_of_a_machine_that_goes_is_of_no_use() -> None:
    assert decide({**FULL, 1: None}, {10: A, 12: C, 13: D, 14: ("n9", 1)}, going=("n9",)) == todo(request=1, end=(14,))


def test_between_two_runs_of_a_script_nobody_is_given_up() -> None:
    assert decide(NOBODY, WORKERS, placed=()) == todo()
