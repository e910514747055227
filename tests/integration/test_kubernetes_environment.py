"""What the manifests of examples/kubernetes say, done by hand on two nodes."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Machine, await_line, await_listening, with_a_cable
from outside_worker import error
from support.scripts import COORDINATOR
from support.training import TOLERANCE

from lightning_recycle.control.client import EXIT_LEFT

sys.path.append(str(Path(__file__).parents[1] / "engines"))
from manifests import container, environment, of_kind

HERE = Path(__file__).parent
STEPS = 30
KEY = "a secret of 16 bytes or more"
pytestmark = pytest.mark.long


class Names:
    """The names that the processes of some machines can resolve, as in a cluster's DNS."""

    def __init__(self, *machines: Machine) -> None:
        self._files = [Path("/etc/netns", machine.name, "hosts") for machine in machines]

    def __enter__(self) -> "Names":
        for file in self._files:
            file.parent.mkdir(parents=True)
            file.write_text("127.0.0.1 localhost\n")
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            shutil.rmtree(file.parent)
        with contextlib.suppress(OSError):  # others may use it
            self._files[0].parent.parent.rmdir()

    def add(self, name: str, address: str) -> None:
        for file in self._files:  # the same file, which ``ip netns exec`` has mounted
            with file.open("a") as hosts:
                hosts.write(f"{address} {name}\n")


@pytest.fixture
def nodes() -> Iterator[tuple[Machine, Machine, Names]]:
    a, b = Machine("a", "10.77.21.1"), Machine("b", "10.77.21.2")
    with with_a_cable(a, b), Names(a, b) as names:
        yield a, b, names


def pod(node: Machine, output: Path) -> "subprocess.Popen[str]":
    """A worker with the environment of its container."""
    variables = environment("workers", {"spec.nodeName": node.name, "status.podIP": node.address}, KEY)
    script = [sys.executable, str(HERE / "outside_worker.py"), str(STEPS), "0.2", str(output), "await"]
    return node.start(*script, **variables)


def status_of(node: Machine, probe: str) -> int:
    """What a probe of the coordinator's container gets on its node."""
    get = container("coordinator")[probe]["httpGet"]
    (port,) = (port["containerPort"] for port in container("coordinator")["ports"] if port["name"] == get["port"])
    url = f"http://{node.address}:{port}{get['path']}"
    script = f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=60).status)"
    return int(node.start(sys.executable, "-c", script).communicate(timeout=120)[0])


def test_pods_that_are_deleted_and_a_node_that_is_lost_change_nothing(nodes, tmp_path):
    a, b, names = nodes
    output = tmp_path / "trained.pt"
    mine, others = [pod(a, output) for _ in range(2)], [pod(b, output) for _ in range(2)]
    for worker in (*mine, *others):
        await_line(worker, "begins", 1)  # they look for a name that nobody knows yet
    (volume,) = container("coordinator")["volumeMounts"]
    (tmp_path / "state").mkdir()
    _, *given = container("coordinator")["command"]
    options = [option.replace(volume["mountPath"], str(tmp_path / "state")) for option in given]
    patient = ["--timeout", "60"]  # nobody is to be given up because the machine of the tests is busy
    command = [*COORDINATOR, *options, *patient]
    served = a.start(*command, **environment("coordinator", {}, KEY))
    await_listening(served)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert status_of(a, probe) == 200  # from the node, as the kubelet asks
    (service,) = of_kind("Service")
    names.add(service["metadata"]["name"], a.address)
    await_line(mine[0], "step", 3)
    spare = pod(a, output)
    mine[1].terminate()  # its pod is deleted
    said = mine[1].communicate(timeout=300)[0]
    assert mine[1].returncode == EXIT_LEFT, said
    await_line(spare, "step")  # it has the place; without it the next loss would be that of a whole stage
    await_line(mine[0], "step", 9)
    b.kill()  # the node is lost, and its pods come up elsewhere
    late = [pod(a, output) for _ in range(2)]
    said = mine[0].communicate(timeout=300)[0]
    assert mine[0].returncode == 0, said
    for worker in (spare, *late):
        output_of = worker.communicate(timeout=300)[0]
        assert worker.returncode == 0, output_of
    assert served.wait(60) == 0
    assert error(output, STEPS) < TOLERANCE
