"""Workers on a cluster of five raylets, 2 x 2: what dies, is drained or comes leaves no trace in the weights."""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from raylets.ray_training import STEPS, Signs, expected, from_driver
from support.models import Divided, Regression
from support.training import difference
from support.waiting import PATIENCE, wait_for

from lightning_recycle import Event

pytestmark = [pytest.mark.ray_cluster, pytest.mark.timeout(1200)]


class Signed:
    """What workers tell of themselves."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def workers(self) -> dict[int, tuple[int, int, int, str]]:
        """By rank its newest process: (incarnation, process id, step, node)."""
        found: dict[int, tuple[int, int, int, str]] = {}
        for path in self.directory.iterdir():
            if path.name[0].isdigit():
                rank, incarnation, pid = map(int, path.name.split("."))
                step, node = path.read_text().split()
                found[rank] = max(found.get(rank, (-1, 0, 0, "")), (incarnation, pid, int(step), node))
        return found

    def all_train(self, count: int) -> bool:
        found = self.workers()
        return len(found) == count and all(step >= 5 for _, _, step, _ in found.values())

    def alive(self) -> int:
        """How many of them are processes."""
        return sum(Path(f"/proc/{pid}").exists() for _, pid, _, _ in self.workers().values())

    def are_together(self) -> bool:
        """Whether the newest process of each rank is in the same step."""
        return len({step for _, _, step, _ in self.workers().values()}) == 1

    def replaced(self, *ranks: int) -> bool:
        return all(self.workers()[rank][0] > 0 for rank in ranks)


def fit_while(
    signs: Path,
    disturb: Callable[[Signed], None],
    workers: int = 4,
    kind: type[Regression] = Regression,
    **options: Any,
) -> list[Event]:
    """Trains, and meanwhile, once so many workers train, does something to it; returns what happened.

    The weights must be those of an undisturbed training, and each step be committed once.
    """
    signed, failures = Signed(signs), []

    def work() -> None:
        try:
            if wait_for(partial(signed.all_train, workers), PATIENCE):
                disturb(signed)
        except BaseException as error:  # raised below
            failures.append(error)
        finally:
            (signs / "enough").touch()

    thread = threading.Thread(target=work)
    thread.start()
    model = kind().double()
    trainer = from_driver(model, [Signs(str(signs))], **options)
    thread.join()
    if failures:
        raise failures[0]
    history: list[Event] = trainer.strategy.history
    print([(e.kind, e.step, e.worker, e.seconds) for e in history if e.kind not in ("step", "chosen", "replanned")])
    assert difference(model.state_dict(), expected()) < 1e-10
    assert [event.step for event in history if event.kind == "step"] == list(range(STEPS))
    return history


def kinds(history: list[Event], kind: str) -> list[Event]:
    return [event for event in history if event.kind == kind]


def nothing_is_left() -> bool:
    import ray

    return bool(ray.cluster_resources()["CPU"] == ray.available_resources().get("CPU"))


def test_a_killed_actor_is_replaced_where_it_was(cluster, tmp_path):
    for _ in range(4):
        cluster.add()
    nodes: dict[int, str] = {}

    def kill(signed: Signed) -> None:
        nodes.update({rank: worker[3] for rank, worker in signed.workers().items()})
        os.kill(signed.workers()[1][1], signal.SIGKILL)
        assert wait_for(lambda: signed.replaced(1), 240)
        os.kill(signed.workers()[2][1], signal.SIGKILL)
        assert wait_for(lambda: signed.replaced(2), 240)

    history = fit_while(tmp_path, kill)
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]  # a node's loss costs one replica of each stage
    failed = [event.worker for event in kinds(history, "failure")]
    assert failed == [(0, 1), (1, 0)]
    assert [event.worker for event in kinds(history, "rejoined")] == failed
    assert {event.host for event in history if event.worker == (0, 1)} == {nodes[1]}
    assert wait_for(nothing_is_left, 20)


def test_workers_of_a_killed_raylet_come_back_elsewhere(cluster, tmp_path):
    nodes = {node.node_id: node for node in (cluster.add() for _ in range(4))}

    def kill(signed: Signed) -> None:
        cluster.kill_raylet(nodes[signed.workers()[0][3]])
        assert wait_for(lambda: signed.replaced(0, 1), 240)

    history = fit_while(tmp_path, kill)
    assert sorted(event.worker for event in kinds(history, "failure")) == [(0, 0), (0, 1)]
    assert sorted(event.worker for event in kinds(history, "rejoined")) == [(0, 0), (0, 1)]
    assert wait_for(nothing_is_left, 20)


def test_workers_that_no_node_has_room_for_come_when_a_node_does(cluster, tmp_path):
    nodes = {node.node_id: node for node in (cluster.add() for _ in range(2))}

    def kill(signed: Signed) -> None:
        cluster.kill_raylet(nodes[signed.workers()[2][3]])
        cluster.join()
        assert wait_for(lambda: signed.replaced(2, 3), 240)

    history = fit_while(tmp_path, kill)
    assert sorted(event.worker for event in kinds(history, "rejoined")) == [(1, 0), (1, 1)]


def test_a_run_begins_on_the_nodes_that_there_are_and_follows_the_cluster(cluster, tmp_path):
    """From two nodes to four and to one: nothing starts again, nothing is redone, and the batch stays."""
    for _ in range(2):
        cluster.add(1)

    def resize(signed: Signed) -> None:
        assert wait_for(lambda: cluster.demand() == 2, PATIENCE)
        for count in (3, 4):  # raylets that start at once on one machine may choose the same socket
            cluster.join(1)
            assert wait_for(partial(signed.all_train, count), PATIENCE)
        _, *going = {worker[3] for worker in signed.workers().values()}
        cluster.drain(*going)
        assert wait_for(lambda: signed.alive() == 1, PATIENCE)
        assert wait_for(lambda: cluster.demand() == 3, PATIENCE)

    numbers = {"num_pipelines": 2, "min_pipelines": 1, "max_pipelines": 4}
    history = fit_while(tmp_path, resize, workers=2, stages=1, **numbers)
    assert [kinds(history, kind) for kind in ("failure", "redone", "restarting", "stage_lost")] == [[], [], [], []]
    assert len(kinds(history, "rejoined")) == 2
    assert len(kinds(history, "left")) == 3
    assert wait_for(nothing_is_left, PATIENCE)


def test_workers_of_a_drained_node_leave_without_a_redone_step(cluster, tmp_path):
    for _ in range(4):
        cluster.add()
    drained: list[str] = []

    def drain(signed: Signed) -> None:
        drained.append(signed.workers()[0][3])
        cluster.drain(drained[0])
        assert wait_for(lambda: signed.replaced(0, 1), 240)
        assert drained[0] not in {worker[3] for worker in signed.workers().values()}

    history = fit_while(tmp_path, drain)
    assert sorted(event.worker for event in kinds(history, "left")) == [(0, 0), (0, 1)]
    assert not kinds(history, "failure")
    assert not kinds(history, "redone")
    assert sorted(event.worker for event in kinds(history, "rejoined")) == [(0, 0), (0, 1)]


def test_members_of_a_position_share_a_node_and_leave_and_come_together(cluster, tmp_path):
    nodes = {node.node_id: node for node in (cluster.add() for _ in range(3))}
    found: list[dict[int, str]] = []

    def take_homes(signed: Signed) -> None:
        found.append({rank: worker[3] for rank, worker in signed.workers().items()})

    def kill(signed: Signed) -> None:
        take_homes(signed)
        os.kill(signed.workers()[1][1], signal.SIGKILL)
        assert wait_for(lambda: signed.replaced(1) and signed.are_together(), PATIENCE)
        take_homes(signed)
        cluster.kill_raylet(nodes[found[-1][2]])
        assert wait_for(lambda: signed.replaced(2, 3) and signed.are_together(), PATIENCE)
        take_homes(signed)

    history = fit_while(tmp_path, kill, kind=Divided, stages=1, members=2)
    assert all(there[0] == there[1] != there[2] == there[3] for there in found), found
    assert found[0] == found[1] != found[2]
    assert {event.worker for event in kinds(history, "rejoined")} == {(0, 0), (1, 0)}
    assert wait_for(nothing_is_left, PATIENCE)
