"""``ReCycleStrategy(engine="ray")``: the workers of a launching process, as actors of a Ray cluster.

To the launcher and the coordinator they are what local processes are: something that is started, ends, and can be
killed. The Trainer, model and data travel through Ray's object store; all of the user's script travels by value, as
``__main__`` is Ray's own program there.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning_recycle.control.coordinator.coordinator import Coordinator
from lightning_recycle.engines import ray_cluster
from lightning_recycle.engines.ray_actors import describe_process, environment_of_worker
from lightning_recycle.engines.ray_cluster import Seat, Seats
from lightning_recycle.engines.ray_placement import room
from lightning_recycle.errors import WorkerStartError
from lightning_recycle.launch.worker_group import Members
from lightning_recycle.launch.worker_payload import dump, load, not_sent
from lightning_recycle.pickling import MainModule
from lightning_recycle.planning.grid import Grid

__all__ = ["RayWorkerGroup", "RayWorkerProcess", "free_slots"]

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5  # between two looks at the nodes of the cluster
_ROOM_SECONDS = 10.0  # for the resources of workers that have ended to be free again
_TRAVELS = ("RECYCLE_", "PL_")  # beginnings of the variables that workers have from the launching process
_STAYS = ("RECYCLE_LISTEN", "RECYCLE_KEY", "RECYCLE_KEY_FILE", "RECYCLE_COORDINATOR", "RECYCLE_NODE", "RECYCLE_HOST")


class RayPayload:
    """A value for all workers, in Ray's object store.

    Args:
        value: the value.

    Raises:
        ConfigurationError: if it cannot be pickled.
    """

    logs = None  # Ray passes on what workers print

    def __init__(self, value: Any) -> None:
        file = io.BytesIO()
        try:
            dump(value, MainModule(imported=False), file)
        except Exception as error:
            raise not_sent(error) from error
        self._data = ray_cluster.import_ray().put(file.getvalue())

    def load(self) -> Any:
        """The value, in a worker; may be called once."""
        return load(ray_cluster.import_ray().get(self._data))


class TrainerActor:
    """One worker."""

    def introduce(self) -> tuple[str, int]:
        return describe_process()

    def run(self, target: Callable[[Any], None], argument: Any, environment: Mapping[str, str]) -> Any:
        """Runs ``target(argument)``; returns the status that a process would have ended with."""
        os.environ.update({**environment, **environment_of_worker()})
        place = replace(argument.place, device=0, host=os.environ["RECYCLE_HOST"])
        try:
            target(replace(argument, place=place))
        except SystemExit as error:  # Ray would take it for the wish to end the actor
            return error.code
        return None


class RayWorkerProcess:
    """An actor that runs a worker.

    Attributes:
        sentinel: a descriptor that becomes readable when the worker ends, and not before.
    """

    def __init__(self, actor: Any, seat: Seat, introduction: Any, call: Any) -> None:
        self.seat, self.introduction = seat, introduction
        self._actor, self._call = actor, call
        self.sentinel, self._ending = os.pipe()
        self._ended = threading.Event()
        self._end: str | None = None
        self._released = False
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

    def describe_exit(self, timeout: float) -> str | None:
        """How the worker ended, or None if it is alive after ``timeout`` seconds."""
        return self._end if self._ended.wait(timeout) else None

    def kill(self) -> None:
        ray_cluster.import_ray().kill(self._actor, no_restart=True)

    def release(self) -> None:
        """Lets the group forget it once it has ended."""
        self._released = True

    @property
    def is_over(self) -> bool:
        """Whether it was released and has ended."""
        return self._released and self._ended.is_set()

    def close(self) -> None:
        """Frees its descriptor; it must have ended, and may not be used any more."""
        os.close(self.sentinel)


class RayWorkerGroup:
    """All workers that one run has on Ray; see :class:`~lightning_recycle.launch.worker_group.WorkerGroup`.

    A replacement counts as started when Ray has found room for it, however long that takes.

    Args:
        target: the function of a worker; takes one argument.
        payload: the value for every worker.
        grid: the grid of the run.
        resources: resources that Ray reserves for each worker.
        start_timeout: seconds in which Ray must have room for all workers.

    Raises:
        ConfigurationError: if the payload cannot be pickled, or Ray is not installed.
        WorkerStartError: if Ray has no room for the workers in time.
    """

    def __init__(
        self,
        target: Callable[[Any], None],
        payload: Any,
        grid: Grid,
        resources: Mapping[str, float],
        start_timeout: float,
    ) -> None:
        self._ray = ray_cluster.connect()
        self.host = ray_cluster.node_address()
        self.payload = RayPayload(payload)
        self._target, self._resources = target, resources
        self._name = uuid.uuid4().hex[:12]
        self._environment = {k: v for k, v in os.environ.items() if k.startswith(_TRAVELS) and k not in _STAYS}
        self._members = Members[RayWorkerProcess]()
        self._started = 0
        self._seats = Seats(grid, resources)
        try:
            if not self._seats.await_room(start_timeout):
                raise WorkerStartError(
                    f"Ray had no room for {grid.num_workers} workers with {dict(resources)} each within"
                    f" {start_timeout:g} s (start_timeout); the cluster has {self._ray.cluster_resources()}, of which"
                    f" {self._ray.available_resources()} are free."
                )
        except BaseException:
            self._seats.close()
            raise

    def start(self, argument: Any, name: str) -> RayWorkerProcess:
        """Starts a worker; callable from any thread. One that joins a training is waited for, until Ray has room.

        Raises:
            WorkerStartError: if the run is over.
        """
        worker = self._request(argument, name)
        while argument.joining:
            if self._members.closed.is_set():
                worker.kill()
                raise WorkerStartError("The run is over.")
            if self._has_lost_its_seat(worker):
                worker.kill()
                worker.release()
                worker = self._request(argument, name)
            if self._ray.wait([worker.introduction], timeout=_POLL_SECONDS)[0]:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.get(worker.introduction)
                    break
                if not self._has_lost_its_seat(worker):
                    break  # it has ended, as the coordinator will see
        return worker

    def _request(self, argument: Any, name: str) -> RayWorkerProcess:
        with self._members.lock:
            if self._members.closed.is_set():
                raise WorkerStartError("The run is over.")
            self._members.forget_over()
            living = self._members.living()
            used = [self._node_of(worker) for worker in living]
            seat = self._seats.take(
                [worker.seat for worker in living], ray_cluster.draining_nodes(), [node for node in used if node]
            )
            self._started += 1
            actor = ray_cluster.start_actor(
                TrainerActor, f"recycle-{self._name}-{self._started}", self._resources, seat.group, seat.bundle
            )
            call = actor.run.remote(self._target, argument, self._environment)
            worker = RayWorkerProcess(actor, seat, actor.introduce.remote(), call)
            self._members.add(worker)
        log.debug("%s is actor recycle-%s-%d.", name, self._name, self._started)
        return worker

    def _node_of(self, worker: RayWorkerProcess) -> str | None:
        if not self._ray.wait([worker.introduction], timeout=0.0)[0]:
            return None
        with contextlib.suppress(self._ray.exceptions.RayError):  # it is about to be seen as ended
            node, _ = self._ray.get(worker.introduction)
            return str(node)
        return None

    def _has_lost_its_seat(self, worker: RayWorkerProcess) -> bool:
        with self._members.lock:
            living = self._members.living()
            present = [other.seat for other in living if self._node_of(other) is not None]
            self._seats.review([other.seat for other in living], present)
            return not self._seats.has(worker.seat)

    def attend(self, coordinator: Coordinator) -> None:
        """Lets the workers of a node that is about to go leave at a step boundary."""

        def watch() -> None:
            told: frozenset[str] = frozenset()
            while not self._members.closed.wait(_POLL_SECONDS):
                try:
                    going = ray_cluster.draining_nodes()
                except Exception as error:  # the head of the cluster is gone for a moment; the training needs it not
                    log.debug("Ray could not be asked for draining nodes: %s", error)
                    continue
                for node in going - told:
                    coordinator.ask_to_leave(node)
                told = going

        threading.Thread(target=watch, name="recycle-draining-nodes", daemon=True).start()

    def end(self, patience: float) -> None:
        """Waits ``patience`` seconds for all workers to end, then kills the rest."""
        self._members.end(patience)

    def __enter__(self) -> RayWorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self._members.close()
        self._seats.close()


def free_slots(needs: Mapping[str, float], wanted: int) -> int:
    """How many workers that need so much of each resource the cluster has room for now, ``wanted`` at most."""
    deadline = time.monotonic() + _ROOM_SECONDS
    while True:
        found = min(wanted, sum(room(node, needs) for node in ray_cluster.schedulable_nodes()))
        if found == wanted or time.monotonic() > deadline:
            return found
        time.sleep(_POLL_SECONDS)
