"""On which nodes the workers of a launching process are asked for, with an imitation of Ray."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_recycle.errors import WorkerStartError
from lightning_recycle.launch import ray_workers
from lightning_recycle.launch.ray_workers import Node, RayWorkerGroup, RayWorkerProcess
from lightning_recycle.planning.grid import Grid, Positions


class Reference:
    """A value that may not be there yet."""

    def __init__(self, value: Any, ready: bool = True) -> None:
        self.value, self.ready, self._future = value, ready, Future[Any]()

    def future(self) -> Future[Any]:
        return self._future


class Cluster:
    """Nodes with room for so many workers each, and what was asked of them: (node, whether the actor waits for it)."""

    def __init__(self, **room: float) -> None:
        self.room, self.draining = dict(room), set[str]()
        self.asked: list[tuple[str | None, bool]] = []
        self.waiting: list[tuple[str | None, Reference]] = []
        self.killed: list[str | None] = []
        self.calls: list[str] = []  # of methods of actors, which do one thing after the other
        self.exceptions = SimpleNamespace(RayError=LookupError)

    def wait(self, references: list[Reference], timeout: float) -> tuple[list[Reference], list[Reference]]:
        ready = [reference for reference in references if reference.ready]
        if not ready:
            threading.Event().wait(min(timeout, 0.01))
        return ready, [reference for reference in references if not reference.ready]

    def get(self, reference: Reference) -> Any:
        if reference.value is None:
            raise LookupError("the actor has never started")
        return reference.value

    def put(self, value: bytes) -> bytes:
        return value

    def kill(self, actor: Any, no_restart: bool) -> None:
        self.killed.append(actor.wanted)
        if not actor.call.future().done():
            actor.call.future().set_result(None)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": sum(self.room.values())}

    available_resources = cluster_resources

    def nodes(self) -> list[Node]:
        return [Node(name, {"CPU": free}) for name, free in self.room.items() if name not in self.draining]

    def lose(self, node: str) -> None:
        """A node ends, and with it what waits for room there."""
        del self.room[node]
        for wanted, started in self.waiting:
            if wanted == node:
                started.ready = True

    def start_actor(self, kind: type, name: str, needs: Any, node: str | None, waits: bool) -> Any:
        self.asked.append((node, waits))
        free = [name for name, left in self.room.items() if left >= 1 and name not in self.draining]
        at = node if node in free else None if waits and node is not None else next(iter(free), None)
        if at is not None:
            self.room[at] -= 1
        call = Reference(None, ready=False)
        started = Reference(at, ready=at is not None)
        self.waiting.append((node, started))

        def method(name: str, reference: Reference) -> Any:
            return SimpleNamespace(remote=lambda *_: self.calls.append(name) or reference)

        actor = SimpleNamespace(node=method("node", started), run=method("run", call))
        actor.wanted, actor.call = node, call
        return actor


def start(group: RayWorkerGroup, rank: int, joining: bool = False) -> RayWorkerProcess:
    argument: Any = SimpleNamespace(place=SimpleNamespace(rank=rank), joining=joining)
    return group.start(argument, f"recycle-worker-{rank}")


@pytest.fixture
def imitate(monkeypatch) -> Any:
    """Makes a cluster, and the group of a run of 2 x 2 positions on it."""
    groups: list[RayWorkerGroup] = []

    def make(
        start_timeout: float = 30.0, members: int = 1, least: int = 2, **room: float
    ) -> tuple[Cluster, RayWorkerGroup]:
        cluster = Cluster(**room)
        monkeypatch.setattr(ray_workers, "connect", lambda: cluster)
        monkeypatch.setattr(ray_workers, "import_ray", lambda: cluster)
        monkeypatch.setattr(ray_workers, "node_address", lambda: "127.0.0.1")
        monkeypatch.setattr(ray_workers, "schedulable_nodes", cluster.nodes)
        monkeypatch.setattr(ray_workers, "alive_nodes", lambda: frozenset(cluster.room))
        monkeypatch.setattr(ray_workers, "draining_nodes", lambda: frozenset(cluster.draining))
        monkeypatch.setattr(ray_workers, "start_actor", cluster.start_actor)
        positions = Positions(Grid(2, 2, 2), members)
        groups.append(RayWorkerGroup(print, None, positions, {"CPU": 1.0}, start_timeout, least))
        return cluster, groups[-1]

    yield make
    for group in groups:
        with group:
            pass


def test_each_pipeline_starts_on_its_node_or_wherever_there_is_room_by_then(imitate):
    cluster, group = imitate(a=2, b=2)
    for rank in range(4):
        start(group, rank)
    assert cluster.asked == [("a", False), ("a", False), ("b", False), ("b", False)]
    assert cluster.calls == 4 * ["node", "run"], "where it is must be known before its training is over"


def test_the_members_of_a_position_start_on_one_node_and_are_replaced_on_one(imitate):
    cluster, group = imitate(members=2, a=3, b=3, c=2, d=3)
    workers = [start(group, rank) for rank in range(8)]
    asked = [node for node, _ in cluster.asked]
    assert asked[::2] == asked[1::2], "a node with room for three takes one position"
    assert len(set(asked)) == 4
    lost = workers[4].rank, workers[5].rank
    cluster.room = {"e": 2.0, "f": 1.0, **{name: 0.0 for name in cluster.room if name != asked[4]}}
    for rank in lost:
        start(group, rank, joining=True)
    assert cluster.asked[8:] == [("e", True), ("e", True)]


def test_members_share_a_node_also_where_other_positions_are(imitate):
    cluster, group = imitate(members=2, a=6, b=2)
    for rank in range(8):
        start(group, rank)
    assert [node for node, _ in cluster.asked] == [*6 * "a", *2 * "b"]
    cluster.room = {"a": 2.0}
    for rank in (7, 6):
        start(group, rank, joining=True)
    assert cluster.asked[8:] == [("a", True), ("a", True)]


def test_members_without_a_node_for_all_of_them_are_spread_with_a_warning(imitate, caplog):
    imitate(members=2, a=4, b=2, c=1, d=1)
    assert "for all 2 processes of 1 of the positions ({'CPU': 2.0})" in caplog.text


def test_with_room_for_enough_the_others_are_asked_for_again_to_join(imitate, monkeypatch):
    monkeypatch.setattr(ray_workers, "_LAST_CALL_SECONDS", 0.1)
    cluster, group = imitate(least=1, a=2, b=1)
    workers = [start(group, rank) for rank in range(4)]
    assert group.without_room == {3}
    assert workers[3].describe_exit(1.0) is not None
    assert [worker.describe_exit(0.0) for worker in workers[:3]] == 3 * [None]
    cluster.room["c"] = 1
    assert start(group, 3, joining=True).describe_exit(0.0) is None


def test_a_stage_without_enough_workers_is_waited_for(imitate, monkeypatch):
    monkeypatch.setattr(ray_workers, "_LAST_CALL_SECONDS", 0.01)
    _, group = imitate(start_timeout=0.3, least=1, a=1)
    with pytest.raises(WorkerStartError, match="no room for 4 workers"):
        [start(group, rank) for rank in range(4)]


def test_without_room_for_all_the_start_ends_with_what_was_wanted(imitate):
    _, group = imitate(start_timeout=0.1, a=2, b=1)
    with pytest.raises(WorkerStartError, match=r"no room for 4 workers with {'CPU': 1.0} each within 0.1 s"):
        [start(group, rank) for rank in range(4)]


@pytest.mark.parametrize(
    ("event", "node"), [("killed", "a"), ("draining", "c"), ("gone", "c"), ("gone, and no room", None)]
)
def test_a_replacement_goes_where_the_worker_was_or_beside_nobody(imitate, event, node):
    cluster, group = imitate(a=2, b=2, c=1.5)
    workers = [start(group, rank) for rank in range(4)]
    workers[1].kill()
    if event == "killed":
        cluster.room["a"] += 1
    elif event == "draining":
        cluster.draining.add("a")
    else:
        del cluster.room["a"]
    if event == "gone, and no room":
        cluster.room |= {"c": 0.0, "b": 1.0}  # beside the workers of the other pipeline
    start(group, 1, joining=True)
    assert cluster.asked[4:] == [(node, True)]


def test_a_replacement_whose_node_has_no_room_any_more_goes_elsewhere(imitate, monkeypatch):
    monkeypatch.setattr(ray_workers, "_HOME_SECONDS", 0.05)
    cluster, group = imitate(a=2, b=2, c=1)
    workers = [start(group, rank) for rank in range(4)]
    workers[1].kill()  # and somebody else takes its place
    start(group, 1, joining=True)
    assert cluster.asked[4:] == [("a", True), (None, True)]
    assert cluster.killed == ["a", "a"]


def test_a_replacement_whose_node_goes_while_it_waits_is_placed_anew(imitate):
    cluster, group = imitate(members=2, a=2, b=2, c=2, d=2, e=2, f=0)
    workers = [start(group, rank) for rank in range(8)]
    home = cluster.asked[0][0]
    workers[0].kill()  # its node has no room
    threading.Timer(0.1, cluster.lose, (home,)).start()
    start(group, 0, joining=True)
    start(group, 1, joining=True)
    assert cluster.asked[8:] == [(home, True), ("e", True), ("e", True)]


def test_who_waits_for_room_is_given_up_when_the_run_ends(imitate):
    _, group = imitate(a=2, b=2)
    workers = [start(group, rank) for rank in range(4)]
    workers[1].kill()
    threading.Timer(0.1, group.end).start()
    with pytest.raises(WorkerStartError, match="The run is over"):
        start(group, 1, joining=True)
