"""Real Ray clusters on this machine. Those of several nodes run in ``make test-ray``, which asks for their marker."""

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.waiting import PATIENCE


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("ray") is None:
        skip = pytest.mark.skip(reason="ray is not installed (pip install '.[ray]')")
        for item in items:
            if item.path.parent.name == "raylets":
                item.add_marker(skip)
    if "ray_cluster" not in config.getoption("markexpr"):
        left = [item for item in items if item.get_closest_marker("ray_cluster")]
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)


class LocalCluster:
    """A head without room for workers, and nodes that come and go."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": 100 << 20, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self._joined: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, num_cpus: int = 2) -> Any:
        """A new node, which is alive."""
        return self._cluster.add_node(num_cpus=num_cpus, object_store_memory=100 << 20)

    def join(self, num_cpus: int = 2) -> None:
        """A new node, from any thread: Ray starts those of :meth:`add` in the main thread only."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--address", self.address]
        options = ["--num-cpus", str(num_cpus), "--object-store-memory", str(100 << 20)]
        self._joined.append(subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL))

    def demand(self) -> int:
        """How many workers wait for room, as an autoscaler sees it."""
        status = importlib.import_module("ray.autoscaler.v2.sdk").get_cluster_status(self.address)
        demands = status.resource_demands.ray_task_actor_demand
        return sum(int(request.count) for demand in demands for request in demand.bundles_by_count)

    def drain(self, *nodes: str) -> None:
        """Announces the end of nodes, as an autoscaler or a cloud does."""
        words = ["drain-node", "--address", self.address, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        words += ["--reason-message", "preempted", "--deadline-remaining-seconds", "60"]
        command = [sys.executable, "-m", "ray.scripts.scripts", *words, "--node-id"]
        for process in [subprocess.Popen([*command, node]) for node in nodes]:
            assert process.wait(PATIENCE) == 0

    def kill_raylet(self, node: Any) -> None:
        """Kills the raylet of a node with SIGKILL; its workers end because of that."""
        node.kill_raylet()

    def close(self) -> None:
        import ray

        ray.shutdown()
        for process in self._joined:
            process.terminate()
            process.wait(30)
        self._cluster.shutdown()


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    import ray

    made = LocalCluster()
    try:
        ray.init(address=made.address, logging_level="warning")
        yield made
    finally:
        made.close()
