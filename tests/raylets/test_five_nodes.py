"""RayReCycle on a cluster of five raylets, 2 x 2: what dies, is drained or comes leaves no trace in the weights."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from raylets.conftest import LocalCluster
from raylets.ray_training import STEPS, expected, train
from support.training import difference
from support.waiting import wait_for

from lightning_recycle import RayReCycle
from lightning_recycle.launch.ray_recycle import RayResult

pytestmark = [pytest.mark.ray_cluster, pytest.mark.timeout(600)]


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

    def all_train(self) -> bool:
        found = self.workers()
        return len(found) == 4 and all(step >= 5 for _, _, step, _ in found.values())

    def replaced(self, *ranks: int) -> bool:
        return all(self.workers()[rank][0] > 0 for rank in ranks)


def fit_while(signs: Path, disturb: Callable[[Signed], None], **options: Any) -> RayResult:
    """Trains with RayReCycle, and meanwhile, once all workers train, does something to it."""
    signed = Signed(signs)
    with ThreadPoolExecutor() as pool:  # nodes are started from the main thread
        result = pool.submit(lambda: RayReCycle(2, 2, 6, **options).fit(train, {"signs": str(signs)}))
        try:
            assert wait_for(lambda: result.done() or signed.all_train(), 240)
            if not result.done():
                disturb(signed)
        finally:
            (signs / "enough").touch()
        return result.result(120)


def check(result: RayResult) -> None:
    """The weights are those of an undisturbed training, each step was committed once, and quickly after a failure."""
    assert difference(dict(result.state_dict), expected()) < 1e-10
    assert difference(result.returned["weights"], expected()) < 1e-10
    assert [event.step for event in result.history if event.kind == "step"] == list(range(STEPS))
    print(
        [
            (event.kind, event.step, event.worker, event.seconds)
            for event in result.history
            if event.kind not in ("step", "chosen", "replanned")
        ]
    )


def kinds(result: RayResult, kind: str) -> list[Any]:
    return [event for event in result.history if event.kind == kind]


def nothing_is_left() -> bool:
    import ray
    from ray.util.placement_group import placement_group_table

    resources = ray.cluster_resources()["CPU"] == ray.available_resources().get("CPU")
    return resources and all(group["state"] == "REMOVED" for group in placement_group_table().values())


def test_a_killed_actor_is_replaced_where_it_was(cluster: LocalCluster, tmp_path: Path) -> None:
    import ray

    for _ in range(4):
        cluster.add()
    nodes: dict[int, str] = {}

    def kill(signed: Signed) -> None:
        nodes.update({rank: worker[3] for rank, worker in signed.workers().items()})
        os.kill(signed.workers()[1][1], signal.SIGKILL)
        assert wait_for(lambda: signed.replaced(1), 240)
        ray.kill(ray.get_actor("recycle-killed-3"))
        assert wait_for(lambda: signed.replaced(2) or signed.replaced(3), 240)

    result = fit_while(tmp_path, kill, name="killed")
    check(result)
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]  # a node's loss costs one replica of each stage
    failed = [event.worker for event in kinds(result, "failure")]
    assert failed[0] == (0, 1)
    assert failed[1][0] == 1
    assert len(failed) == 2
    assert [event.worker for event in kinds(result, "rejoined")] == failed
    assert {event.host for event in result.history if event.worker == (0, 1)} == {nodes[1]}
    assert wait_for(nothing_is_left, 20)


def test_workers_of_a_killed_raylet_come_back_elsewhere(cluster: LocalCluster, tmp_path: Path) -> None:
    nodes = {node.node_id: node for node in (cluster.add() for _ in range(4))}

    def kill(signed: Signed) -> None:
        cluster.kill_raylet(nodes[signed.workers()[0][3]])
        assert wait_for(lambda: signed.replaced(0, 1), 240)

    result = fit_while(tmp_path, kill)
    check(result)
    assert sorted(event.worker for event in kinds(result, "failure")) == [(0, 0), (0, 1)]
    assert sorted(event.worker for event in kinds(result, "rejoined")) == [(0, 0), (0, 1)]
    assert wait_for(nothing_is_left, 20)


def test_workers_that_no_node_has_room_for_come_when_a_node_does(cluster: LocalCluster, tmp_path: Path) -> None:
    nodes = {node.node_id: node for node in (cluster.add() for _ in range(2))}

    def kill(signed: Signed) -> None:
        cluster.kill_raylet(nodes[signed.workers()[2][3]])
        cluster.add()
        assert wait_for(lambda: signed.replaced(2, 3), 240)

    result = fit_while(tmp_path, kill)
    check(result)
    assert sorted(event.worker for event in kinds(result, "rejoined")) == [(1, 0), (1, 1)]


def test_workers_of_a_drained_node_leave_without_a_redone_step(cluster: LocalCluster, tmp_path: Path) -> None:
    for _ in range(4):
        cluster.add()
    drained: list[str] = []

    def drain(signed: Signed) -> None:
        drained.append(signed.workers()[0][3])
        subprocess.run(
            [
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                "drain-node",
                *("--address", cluster.address),
                *("--node-id", drained[0]),
                *("--reason", "DRAIN_NODE_REASON_PREEMPTION"),
                *("--reason-message", "preempted"),
                *("--deadline-remaining-seconds", "60"),
            ],
            check=True,
            timeout=60,
        )
        assert wait_for(lambda: signed.replaced(0, 1), 240)
        assert drained[0] not in {worker[3] for worker in signed.workers().values()}

    result = fit_while(tmp_path, drain)
    check(result)
    assert sorted(event.worker for event in kinds(result, "left")) == [(0, 0), (0, 1)]
    assert not kinds(result, "failure")
    assert not kinds(result, "redone")
    assert sorted(event.worker for event in kinds(result, "rejoined")) == [(0, 0), (0, 1)]
