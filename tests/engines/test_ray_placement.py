"""Where the workers of a grid go, over plain data."""

from itertools import islice

import pytest

from lightning_recycle.launch.ray_workers import Node, nodes_with_room, pipeline_nodes, replacement_node, room

CPU = {"CPU": 1.0}


def nodes(**cpus: float) -> list[Node]:
    return [Node(name, {"CPU": amount}) for name, amount in cpus.items()]


def test_room_is_what_the_scarcest_resource_allows():
    node = Node("n", {"CPU": 8.0, "GPU": 2.0})
    assert room(node, CPU) == 8
    assert room(node, {"CPU": 1.0, "GPU": 1.0}) == 2
    assert room(node, {"CPU": 1.0, "TPU": 1.0}) == 0
    assert room(Node("n", {"CPU": 0.3}), {"CPU": 0.1}) == 3
    assert room(node, {"CPU": 0.0}) > 1000


def test_each_pipeline_has_a_node_of_its_own():
    assert pipeline_nodes(nodes(a=2, b=2, c=2), CPU, 2, 2) == [("a", "a"), ("b", "b")]


def test_a_large_node_does_not_get_two_pipelines_while_there_are_others():
    assert pipeline_nodes(nodes(a=8, b=2), CPU, 2, 2) == [("b", "b"), ("a", "a")]


def test_a_pipeline_that_no_node_has_room_for_gets_several_of_its_own():
    assert pipeline_nodes(nodes(a=1, b=1, c=1, d=1), CPU, 2, 2) == [("a", "b"), ("c", "d")]
    assert pipeline_nodes(nodes(a=3, b=3, c=3, d=3), CPU, 2, 4) == [("a", "a", "a", "b"), ("c", "c", "c", "d")]


def test_what_fits_nowhere_by_itself_goes_anywhere():
    assert pipeline_nodes(nodes(a=4), CPU, 2, 2) == [("a", "a"), None]
    assert pipeline_nodes([], CPU, 2, 2) == [None, None]


@pytest.mark.parametrize("cpus", [{"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 1, "c": 1, "d": 1}, {"a": 4, "b": 4}])
def test_no_node_has_two_replicas_of_a_stage(cpus):
    found = pipeline_nodes(nodes(**cpus), CPU, 2, 2)
    assert found[0] is not None
    assert found[1] is not None
    assert not set(found[0]) & set(found[1])


def test_further_positions_go_where_most_room_is_left():
    pairs = {"CPU": 2.0}  # two members each
    assert pipeline_nodes(nodes(a=4, b=6), pairs, 3, 1) == [("a",), ("b",), None]
    assert list(islice(nodes_with_room(nodes(a=4, b=6), pairs, ["a", "b"]), 4)) == ["b", "a", "b", None]
    assert list(islice(nodes_with_room([], pairs, []), 2)) == [None, None]


def test_a_stand_in_avoids_the_nodes_of_the_others():
    assert replacement_node(nodes(a=2, b=0, c=1), CPU, ["a"]) == "c"
    assert replacement_node(nodes(a=2, b=0), CPU, ["a"]) is None
    assert replacement_node(nodes(a=1, b=3), CPU, []) == "b"
