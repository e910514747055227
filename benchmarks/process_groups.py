"""Connecting, messages and aborts of torch's own NCCL process groups, beside which ``gpu.py`` measures this package's.

    python benchmarks/process_groups.py                              # a worker per CUDA device
    NCCL_MULTI_RANK_GPU_ENABLE=1 python benchmarks/process_groups.py --workers 3     # on one device; NCCL 2.30
    python benchmarks/process_groups.py --device cpu --workers 3     # over Gloo, to see that the code runs

A group of two per directed pair of neighbours in a ring and a group of all, connected eagerly and without blocking. The
last worker is killed while the others are in a sum; they abort all groups at the same time, each from a thread of its
own, and connect again without it, if they are two or more. Printed are the seconds of both connections and of the
abort, the device's memory that was taken meanwhile, and a tensor's way to the next worker, by size; or the error.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from harness import console, describe_machine
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore
from torch.distributed.distributed_c10d import AllreduceOptions

SIZES = tuple(2**n for n in range(12, 29, 4))
ROUNDS = 20
SECONDS = 120.0
"""After so long a worker that has not reported is an error."""


def new_group(store: Store, rank: int, size: int, device: torch.device) -> Any:
    """A connected group; over Gloo, which has no abort worth measuring, for the processor."""
    if device.type == "cpu":
        return ProcessGroupGloo(store, rank, size, timedelta(seconds=SECONDS))
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options.config.blocking = 0  # others cannot be aborted while they connect
    group = ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def total(group: Any, device: torch.device) -> float:
    """The sum of a one of each member: connects what is not connected yet."""
    one = torch.ones(1, device=device)
    group.allreduce([one], AllreduceOptions()).wait()
    return float(one)


def connected(store: Store, rank: int, ranks: Sequence[int], device: torch.device) -> dict[Any, Any]:
    """Name -> group of this worker, of all and of its neighbours, each of which has summed."""
    ring = sorted({pair for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True) for pair in ((a, b), (b, a))})
    wanted = {"all": tuple(ranks), **{pair: pair for pair in ring if rank in pair and pair[0] != pair[1]}}
    made = {
        name: new_group(PrefixStore(f"{len(ranks)} {name}", store), members.index(rank), len(members), device)
        for name, members in wanted.items()
    }
    for name, group in made.items():  # the same order on all
        if (found := total(group, device)) != len(wanted[name]):
            raise RuntimeError(f"the group of {wanted[name]} sums to {found}")
    return made


def message_seconds(made: dict[Any, Any], rank: int, device: torch.device) -> dict[int, float]:
    """Size -> seconds of one way between workers 0 and 1."""
    found = {}
    for size in SIZES if device.type == "cuda" else SIZES[:3]:
        value, seconds = torch.zeros(size, dtype=torch.uint8, device=device), []
        for _ in range(ROUNDS):
            wait(device)
            began = time.perf_counter()
            for sender in (0, 1):
                pair = made[sender, 1 - sender]
                work = pair.send([value], 1, 0) if rank == sender else pair.recv([value], 0, 0)
                work.wait()
                wait(device)
            seconds.append((time.perf_counter() - began) / 2)
        found[size] = statistics.median(seconds[ROUNDS // 4 :])
    return found


def abort(made: dict[Any, Any]) -> None:
    """All groups at the same time: each waits for the device, and so for the others' kernels."""
    threads = [threading.Thread(target=group.abort, daemon=True) for group in made.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def worker(rank: int, count: int, port: int, kind: str, parent: Connection) -> None:
    """Reports (what, value) pairs in order; the last worker ends itself."""
    try:
        device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")
        if kind == "cuda":
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)  # its context is no part of the groups' memory
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=SECONDS))
        free = torch.cuda.mem_get_info(device)[0] if kind == "cuda" else 0
        began = time.perf_counter()
        made = connected(store, rank, range(count), device)
        parent.send(("connected, s", time.perf_counter() - began))
        parent.send(("memory, MiB", (free - torch.cuda.mem_get_info(device)[0]) / 2**20 if kind == "cuda" else 0.0))
        parent.send(("messages", message_seconds(made, rank, device) if rank < 2 else {}))
        parent.recv()  # all are here
        if rank == count - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "cuda":  # over Gloo the loss of a connection ends it
            made["all"].allreduce([torch.ones(2**20, device=device)], AllreduceOptions())
        parent.recv()  # it is dead
        began = time.perf_counter()
        abort(made)
        parent.send(("aborted, s", time.perf_counter() - began))
        if count == 2:
            return
        began = time.perf_counter()
        connected(store, rank, range(count - 1), device)
        parent.send(("connected again, s", time.perf_counter() - began))
    except Exception as error:
        parent.send(("error", f"{type(error).__name__}: {error}"))


def reported(parents: Sequence[Connection], name: str) -> list[Any]:
    """What each worker reports as ``name``."""
    values = []
    for rank, parent in enumerate(parents):
        if not parent.poll(SECONDS):
            raise SystemExit(f"worker {rank}: no {name!r} within {SECONDS:.0f} s")
        what, value = parent.recv()
        if what != name:
            raise SystemExit(f"worker {rank}, before {name!r}: {what}: {value}")
        values.append(value)
        if isinstance(value, float):
            console.print(f"worker {rank}: {what}: {value:.3f}", highlight=False)
    return values


def measure(count: int, kind: str) -> None:
    """Prints the figures of ``count`` workers."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives any worker
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(count)]
    processes = [
        context.Process(target=worker, args=(rank, count, store.port, kind, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    ours = [pipe for pipe, _ in pipes]
    try:
        reported(ours, "connected, s")
        reported(ours, "memory, MiB")
        for size, seconds in reported(ours, "messages")[0].items():
            console.print(
                f"{size:>13,} bytes: {1e6 * seconds:9.1f} us {size / seconds / 1e9:7.2f} GB/s", highlight=False
            )
        for parent in ours:
            parent.send("go")
        processes[-1].join()
        time.sleep(0.5)  # the others are in the sum
        for parent in ours[:-1]:
            parent.send("abort")
        reported(ours[:-1], "aborted, s")
        if count > 2:
            reported(ours[:-1], "connected again, s")
    finally:
        for process in processes:
            process.kill()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, or says that there is no device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--workers", type=int, help="two or more; by default one per device")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("Nothing was measured: there is no CUDA device.")
        return
    count = options.workers or (torch.cuda.device_count() if options.device == "cuda" else 3)
    if count < 2:
        parser.error("one worker has no group; several on one device: --workers 3, with NCCL_MULTI_RANK_GPU_ENABLE=1")
    backend = ".".join(map(str, torch.cuda.nccl.version())) if options.device == "cuda" else ""
    console.print(f"torch {torch.__version__}, {f'NCCL {backend}' if backend else 'Gloo: NOT figures of a GPU'}")
    measure(count, options.device)
    console.print(describe_machine(), highlight=False)


if __name__ == "__main__":
    main()
