"""``ReCycleStrategy(engine="ray")``: workers as actors of a Ray cluster.

Trainer, model and data travel through Ray's object store; the user's script travels by value, as ``__main__`` is Ray's
own program there.

The loss of one node costs at most one replica of each stage. A pipeline gets a node of its own where one has room for
all of its positions, else several nodes without other pipelines, else any room. A replacement goes to the node of its
predecessor, unless that is gone or about to go; then to an unused one, else wherever Ray has room. The members of a
position go to the same node.

The one module that touches Ray's private state. Ray is imported when the first run needs it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from lightning_recycle.arguments import install_command
from lightning_recycle.control.coordinator.coordinator import Coordinator
from lightning_recycle.control.options import WorkerProcess
from lightning_recycle.errors import ConfigurationError, WorkerStartError
from lightning_recycle.launch.worker_group import WorkerGroup
from lightning_recycle.launch.worker_payload import dump, load
from lightning_recycle.pickling import MainModule
from lightning_recycle.planning.grid import Positions, Worker

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5  # between two looks at the nodes of the cluster
_ROOM_SECONDS = 10.0  # for the resources of workers that have ended to be free again
_TRAVELS = ("RECYCLE_", "PL_")  # beginnings of the variables that workers have from the launching process
_LAST_CALL_SECONDS = 5.0  # without a further worker, until a run begins that has enough
_HOME_SECONDS = 30.0  # for a replacement to start on its node; then it may be anywhere
_STAYS = ("RECYCLE_LISTEN", "RECYCLE_KEY", "RECYCLE_KEY_FILE", "RECYCLE_COORDINATOR", "RECYCLE_NODE", "RECYCLE_HOST")


@dataclass(frozen=True)
class Node:
    """A node that takes workers: its id, and the free amount of each resource."""

    name: str
    free: Mapping[str, float]


def needs_of_worker(accelerator: str | None, given: Mapping[str, float] | None) -> dict[str, float]:
    """Resources that are reserved for a worker, unless ``given`` says otherwise."""
    return {"CPU": 1.0, **({} if accelerator is None else {accelerator: 1.0}), **(given or {})}


def room(node: Node, needs: Mapping[str, float]) -> int:
    """Number of workers with these needs that fit into ``node``."""
    fits = (int(node.free.get(name, 0.0) / amount + 1e-9) for name, amount in needs.items() if amount > 0)
    return min(fits, default=1_000_000)


def pipeline_nodes(
    nodes: Sequence[Node], needs: Mapping[str, float], pipelines: int, stages: int
) -> list[tuple[str, ...] | None]:
    """For each pipeline the node of each of its workers; None for any room."""
    left = {node.name: room(node, needs) for node in nodes}
    chosen: list[tuple[str, ...] | None] = []
    for _ in range(pipelines):
        home = _pipeline_node(left, stages)
        for name in home or ():
            left.pop(name, None)
        chosen.append(home)
    return chosen


def _pipeline_node(left: Mapping[str, int], stages: int) -> tuple[str, ...] | None:
    """The smallest node with room for ``stages`` workers, else as few as possible."""
    whole = [name for name in left if left[name] >= stages]
    if whole:
        return (min(whole, key=lambda name: left[name]),) * stages
    home: list[str] = []
    for name in sorted(left, key=lambda name: -left[name]):
        home += [name] * min(left[name], stages - len(home))
    return tuple(home) if len(home) == stages else None


def nodes_with_room(nodes: Sequence[Node], needs: Mapping[str, float], taken: Iterable[str]) -> Iterator[str | None]:
    """Nodes of further positions: each the one with most room left, or None."""
    room_left = Counter({node.name: room(node, needs) for node in nodes})
    room_left.subtract(taken)
    while True:
        name = max(sorted(room_left), key=room_left.__getitem__, default=None)
        if name is None or room_left[name] < 1:
            name = None
        else:
            room_left[name] -= 1
        yield name


def replacement_node(nodes: Sequence[Node], needs: Mapping[str, float], used: Collection[str]) -> str | None:
    """A node with room for a worker, none of the ``used`` ones; None if none."""
    fitting = [node for node in nodes if node.name not in used and room(node, needs) > 0]
    return max(fitting, key=lambda node: room(node, needs)).name if fitting else None


# ---------------------------------------------------------------------- the cluster


def import_ray() -> Any:
    """The package ``ray``; ConfigurationError if it is not installed."""
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigurationError(f"Ray is not installed here: {install_command('ray')}, on every node.") from error


def connect() -> Any:
    """The package ``ray``, connected to its cluster, RAY_ADDRESS's, or a local one.

    Raises ConfigurationError if it is missing, or connected as a client from outside of the cluster.
    """
    ray = import_ray()
    if not ray.is_initialized():
        ray.init()
    if ray.util.client.ray.is_connected():
        raise ConfigurationError(
            "This process is connected to Ray as a client (ray://...), and a run lives as long as its connection does:"
            " submit the script to the cluster instead (ray job submit -- python script.py)."
        )
    return ray


def schedulable_nodes() -> list[Node]:
    """The nodes that take new workers, with their free resources."""
    state = importlib.import_module("ray._private.state")
    free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    return [Node(name, free.get(name, {})) for name in sorted(staying_nodes())]


def alive_nodes() -> frozenset[str]:
    """The ids of the nodes that Ray takes for alive."""
    return frozenset(node["NodeID"] for node in import_ray().nodes() if node["Alive"])


def draining_nodes() -> frozenset[str]:
    """The ids of nodes about to go: drained, given back, or announced by the cloud."""
    return frozenset(importlib.import_module("ray._private.state").state.get_draining_nodes())


def staying_nodes() -> frozenset[str]:
    """The ids of the alive nodes that are not about to go."""
    return alive_nodes() - draining_nodes()


def start_actor(kind: type[Any], name: str, needs: Mapping[str, float], node: str | None, waits: bool) -> Any:
    """An actor of class ``kind`` that lives once, on ``node`` or any.

    If ``waits``, it waits for room on that node, and fails if that is gone; else it goes elsewhere.
    """
    amounts = dict(needs)
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    options = (
        import_ray()
        .remote(kind)
        .options(
            num_cpus=amounts.pop("CPU", 0),
            num_gpus=amounts.pop("GPU", 0),
            memory=amounts.pop("memory", None),
            resources=amounts,
            max_restarts=0,
            name=name,
            scheduling_strategy="DEFAULT"
            if node is None
            else strategies.NodeAffinitySchedulingStrategy(node, soft=not waits, _spill_on_unavailable=not waits),
        )
    )
    return options.remote()


def node_address() -> str:
    """The address at which other nodes reach this one."""
    address: str = import_ray().util.get_node_ip_address()
    return address


# ---------------------------------------------------------------------- workers


class RayPayload:
    """A value for all workers, in Ray's object store.

    Raises ConfigurationError if it cannot be pickled.
    """

    logs = None  # Ray passes on what workers print

    def __init__(self, value: Any) -> None:
        file, main = io.BytesIO(), MainModule(imported=False)
        dump(value, main, file)
        self._data = import_ray().put(file.getvalue())

    def load(self) -> Any:
        return load(import_ray().get(self._data))


class TrainerActor:
    """Ray actor in which a worker runs."""

    def node(self) -> str:
        return str(import_ray().get_runtime_context().get_node_id())

    def run(self, target: Callable[[Any], None], argument: Any, environment: Mapping[str, str]) -> Any:
        """Runs ``target(argument)``; returns a process's exit status.

        Its device is the first visible one: Ray shows it only its assigned ones.
        """
        for variable in ("RECYCLE_LISTEN", "RECYCLE_KEY_FILE"):
            os.environ.pop(variable, None)  # of another run; an actor is replaced, and never joins again
        host = node_address()
        own = {"RECYCLE_NODE": self.node(), "RECYCLE_HOST": host, "LOCAL_RANK": "0"}
        os.environ.update({**environment, **own})
        place = replace(argument.place, device=0, host=host)
        try:
            target(replace(argument, place=place))
        except SystemExit as error:  # Ray would take it for the wish to end the actor
            return error.code
        return None


class RayWorkerProcess(WorkerProcess):
    """An actor that runs a worker; ``node``: reference to its node's id."""

    def __init__(self, rank: int, actor: Any, node: Any, call: Any) -> None:
        self.rank, self.node = rank, node
        self._actor, self._call = actor, call
        self.sentinel, self._ending = os.pipe()
        self._ended = threading.Event()
        self._end: str | None = None
        call.future().add_done_callback(self._on_end)

    def _on_end(self, future: Any) -> None:
        error = future.exception()
        if error is None:
            status = future.result()
            self._end = f"it exited with code {0 if status is None else status}"
        else:
            self._end = f"its actor ended: {str(error).partition(chr(10))[0]}"
        os.close(self._ending)
        self._ended.set()

    @override
    def describe_exit(self, timeout: float) -> str | None:
        return self._end if self._ended.wait(timeout) else None

    @override
    def kill(self) -> None:
        import_ray().kill(self._actor, no_restart=True)

    @override
    def close(self) -> None:
        os.close(self.sentinel)


class RayWorkerGroup(WorkerGroup):
    """The workers that one run has on Ray.

    A replacement counts as started when Ray has found room for it, however long that takes. The first workers need room
    within ``start_timeout`` seconds, at least ``least`` of each stage; the others are then requested again, to join.
    The members of a position have one node if one has room for them. Raises ConfigurationError if the payload cannot be
    pickled, or Ray is not installed.
    """

    def __init__(
        self,
        target: Callable[[Any], None],
        payload: Any,
        positions: Positions,
        resources: Mapping[str, float],
        start_timeout: float,
        least: int,
    ) -> None:
        super().__init__()
        self._ray = connect()
        self.host = node_address()
        self.payload = RayPayload(payload)
        self._target, self._positions, self._resources = target, positions, resources
        self._start_timeout = start_timeout
        self._name = uuid.uuid4().hex[:12]
        self._environment = {k: v for k, v in os.environ.items() if k.startswith(_TRAVELS) and k not in _STAYS}
        self._started, self._least = 0, least
        self._nodes: dict[int, str | None] = {}  # by rank the node of its newest worker, as far as it is known
        self._placing = threading.Lock()
        self._needs = {name: positions.members * amount for name, amount in resources.items()}  # of a position
        grid, nodes = positions.grid, schedulable_nodes()
        homes = pipeline_nodes(nodes, self._needs, grid.lanes, grid.stages)
        others = nodes_with_room(nodes, self._needs, [node for home in homes for node in home or ()])
        for pipeline, home in enumerate(homes):
            for stage in range(grid.stages):
                node = next(others) if home is None else home[stage]
                self._nodes.update(dict.fromkeys(positions.ranks(Worker(pipeline, stage)), node))
        if None in homes and len(alive_nodes()) > 1:
            log.warning(
                "%d of %d pipelines have no node of their own with room for them now: Ray places these wherever it"
                " finds room, and the loss of one node may cost several replicas of a stage.",
                homes.count(None),
                len(homes),
            )
        if positions.members > 1 and None in self._nodes.values():
            log.warning(
                "No node has room now for all %d processes of %d of the positions (%s): Ray may place them on several"
                " nodes, and then the collectives of their layers cross the network.",
                positions.members,
                list(self._nodes.values()).count(None) // positions.members,
                self._needs,
            )

    @override
    def start(self, argument: Any, name: str) -> RayWorkerProcess:
        """Starts a worker; callable from any thread.

        A replacement is awaited until Ray has room; with the last of the first workers, all of these. Raises
        WorkerStartError if the run is over, or Ray has no room for the first workers in time.
        """
        rank = argument.place.rank
        if not argument.joining:
            worker = self._request(argument, name, self._nodes[rank], waits=False)
            if self._started == self._positions.num_workers:
                self._await_room()
            return worker
        node = self._node_of_replacement(rank)
        worker = self._request(argument, name, node, waits=True)
        wanted_since = time.monotonic()
        while True:
            has_started = self._has_started(worker)  # or has failed, if its node is gone
            is_gone = node is not None and node not in staying_nodes()
            if has_started and not is_gone:
                return worker
            if self.closed.is_set():
                worker.kill()
                raise WorkerStartError("The run is over.")
            if is_gone or (node is not None and time.monotonic() - wanted_since > _HOME_SECONDS):
                log.info("%s has found no room on its node; it goes to another one.", name)
                worker.kill()
                worker.release()
                node = self._node_of_replacement(rank) if is_gone else None
                worker = self._request(argument, name, node, waits=True)

    def _request(self, argument: Any, name: str, node: str | None, *, waits: bool) -> RayWorkerProcess:
        with self.lock:
            if self.closed.is_set():
                raise WorkerStartError("The run is over.")
            self._started += 1
            actor = start_actor(TrainerActor, f"recycle-{self._name}-{self._started}", self._resources, node, waits)
            place = actor.node.remote()  # before the call that lasts: an actor does one thing after the other
            call = actor.run.remote(self._target, argument, self._environment)
            worker = RayWorkerProcess(argument.place.rank, actor, place, call)
            self.add(worker)
        log.debug("%s is actor recycle-%s-%d.", name, self._name, self._started)
        return worker

    def _await_room(self) -> None:
        """Waits until the first workers have started or ended, or enough of them."""
        deadline = time.monotonic() + self._start_timeout
        waiting, since = self.living(), time.monotonic()
        while waiting:
            self._has_started(waiting[0])  # waits for a moment
            left = [worker for worker in waiting if not self._has_started(worker, seconds=0.0)]
            if len(left) < len(waiting):
                waiting, since = left, time.monotonic()
                continue
            missing = Counter(self._positions.column(worker.rank) for worker in waiting)
            is_enough = max(missing.values()) <= self._positions.grid.lanes - self._least
            if is_enough and time.monotonic() - since > _LAST_CALL_SECONDS:
                self.without_room = frozenset(worker.rank for worker in waiting)
                for worker in waiting:
                    worker.kill()
                    worker.release()
                return
            if time.monotonic() > deadline:
                raise WorkerStartError(
                    f"Ray had no room for {self._positions.num_workers} workers with {dict(self._resources)} each"
                    f" within {self._start_timeout:g} s (start_timeout); the cluster has"
                    f" {self._ray.cluster_resources()}, of"
                    f" which {self._ray.available_resources()} are free."
                )

    def _has_started(self, worker: RayWorkerProcess, seconds: float = _POLL_SECONDS) -> bool:
        if not self._ray.wait([worker.node], timeout=seconds)[0]:
            return False
        with contextlib.suppress(self._ray.exceptions.RayError):  # it has ended
            self._nodes[worker.rank] = str(self._ray.get(worker.node))
        return True

    def _node_of_replacement(self, rank: int) -> str | None:
        """The predecessor's node, a sibling's, or one with room; None if none."""
        with self._placing:  # the members of a position are replaced at the same time
            siblings, stays = self._positions.siblings(rank), staying_nodes()
            for node in (self._nodes[rank], *(self._nodes[sibling] for sibling in sorted(siblings))):
                if node in stays:
                    break
            else:
                used = {node for other, node in self._nodes.items() if node and other not in {rank, *siblings}}
                nodes = schedulable_nodes()
                node = replacement_node(nodes, self._needs, used)
                if node is None and siblings:
                    node = replacement_node(nodes, self._needs, ())
            self._nodes[rank] = node
            return node

    @override
    def attend(self, coordinator: Coordinator) -> None:
        """Lets the workers of a node that is about to go leave at a step boundary."""

        def watch() -> None:
            asked: frozenset[str] = frozenset()
            while not self.closed.wait(_POLL_SECONDS):
                try:
                    going = draining_nodes()
                except Exception as error:  # the head of the cluster is gone for a moment; the training needs it not
                    log.debug("Ray could not be asked for draining nodes: %s", error)
                    continue
                for node in going - asked:
                    coordinator.ask_to_leave(node)
                asked = going

        threading.Thread(target=watch, name="recycle-draining-nodes", daemon=True).start()


def free_slots(needs: Mapping[str, float], wanted: int) -> int:
    """Number of positions, up to ``wanted``, that the cluster has room for now."""
    deadline = time.monotonic() + _ROOM_SECONDS
    while True:
        found = min(wanted, sum(room(node, needs) for node in schedulable_nodes()))
        if found == wanted or time.monotonic() > deadline:
            return found
        time.sleep(_POLL_SECONDS)
