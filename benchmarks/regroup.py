"""How long many workers take to connect again after one is killed: real groups of Gloo, no model.

    python benchmarks/regroup.py                     # 8, 16, 32 and 64 workers, in pipelines of four stages
    python benchmarks/regroup.py --workers 64 --connect all

Each worker is a process, forked from one that has torch, with the real client and communicator; the coordinator is the
real one. A worker in the middle of the grid is killed. Given are the seconds from its death until the others have
agreed on a new generation, and until the last of them has told that it is connected, and the processor time of a worker
for that; with the connections that its plan needs, or with connections to all others.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import statistics
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from lightning_recycle.control.client import ControlClient, Interrupted
from lightning_recycle.control.coordinator.coordinator import Coordinator, CoordinatorOptions
from lightning_recycle.control.coordinator.standalone import allow_descriptors
from lightning_recycle.control.options import RecoveryOptions
from lightning_recycle.control.plans.run_planner import RunPlanner
from lightning_recycle.control.protocol.messages import Milestone, Reached
from lightning_recycle.control.protocol.recovery import WorkerStatus
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.problem import Technique
from lightning_recycle.runtime.comm.communicator import CommunicationError, Communicator

_STAGES = 4
_PATIENCE = 300.0  # seconds
_HOST = "127.0.0.1"


def work(grid: Grid, rank: int, address: tuple[str, int], key: bytes, to_all: bool, told: Connection) -> None:
    """One worker, which regroups until it is killed; tells the processor time of its newest regroup."""
    torch.set_num_threads(1)
    client = ControlClient(rank, address, key, heartbeat_interval=10.0)
    communicator = Communicator(rank, _HOST, torch.device("cpu"), client, client.key_for("links"))
    client.on_interrupt = communicator.abort
    stage = grid.worker(rank).stage
    while True:
        client.await_announcement(_PATIENCE)
        began = time.process_time()
        try:
            client.enter_generation()
            resume = client.report(WorkerStatus(stage, 0, False))
            assert resume.program is not None
            neighbours = resume.roster if to_all else resume.program.neighbours
            peers = [other for other in resume.roster if grid.worker(other).stage == stage]
            communicator.configure(resume.generation, neighbours, peers)
        except (CommunicationError, Interrupted):
            continue
        client.send(Reached(rank, resume.generation, Milestone.CONNECTED))
        told.send((resume.generation, time.process_time() - began, len(os.listdir("/proc/self/fd"))))


def measure(workers: int, to_all: bool) -> dict[str, float]:
    """What one failure cost."""
    grid = Grid(workers // _STAGES, _STAGES, 2)
    planner = RunPlanner(grid, "heuristic", Technique())
    planner.prepare()
    victim = grid.num_workers // 2 + 1
    planner.plan(frozenset({grid.worker(victim)}), {})  # as if made ahead
    patient = dict.fromkeys(("heartbeat_timeout", "report_timeout", "last_holder_timeout"), _PATIENCE)
    coordinator = Coordinator(
        grid,
        planner,
        CoordinatorOptions(**patient, recovery=RecoveryOptions(rebalance="never", start_timeout=_PATIENCE)),
    )
    coordinator._plans.plan_ahead = lambda: None  # type: ignore[method-assign] # takes processor time
    context, processes, pipes = get_context("fork"), [], []
    for rank in range(workers):
        mine, theirs = context.Pipe()
        arguments: Any = (grid, rank, coordinator.address, coordinator.authkey, to_all, theirs)
        processes.append(context.Process(target=work, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    coordinator.start({})
    try:
        _await(coordinator, "regrouped", 1)
        killed = time.time()
        os.kill(processes[victim].pid or 0, signal.SIGKILL)
        _await(coordinator, "regrouped", 2)
        last = {event.kind: event.time for event in coordinator.history}
        spent, descriptors = [], []
        for rank, pipe in enumerate(pipes):
            while rank != victim and pipe.poll(1.0):
                generation, seconds, count = pipe.recv()
                if generation > 0:
                    spent.append(seconds)
                    descriptors.append(count)
                    break
        return {
            "agreed": last["resumed"] - killed,
            "connected": last["regrouped"] - killed,
            "processor": statistics.median(spent),
            "descriptors": statistics.median(descriptors),
            "generations": coordinator.history[-1].generation,
        }
    finally:
        for process in processes:
            process.kill()
        coordinator.close()


def _await(coordinator: Coordinator, kind: str, count: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while sum(event.kind == kind for event in coordinator.history) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {kind!r} within {_PATIENCE:g} s: {coordinator.history}")
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--connect", choices=("needed", "all"), nargs="+", default=["needed", "all"])
    options = parser.parse_args()
    logging.getLogger("lightning_recycle").setLevel(logging.ERROR)
    allow_descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    print(f"{os.cpu_count()} processors; seconds from the death of a worker")
    names = ("agreed", "connected", "processor", "descriptors", "generations")
    print(f"{'workers':>8}{'connect':>9}" + "".join(f"{name:>13}" for name in names))
    for workers in options.workers:
        for connect in options.connect:
            found = measure(workers, connect == "all")
            print(f"{workers:>8}{connect:>9}" + "".join(f"{found[name]:>13.3f}" for name in names), flush=True)


if __name__ == "__main__":
    main()
