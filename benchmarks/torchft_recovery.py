"""The same failures under torchft: from the signal to the survivor's next committed step. Used by ``recovery.py``.

    TORCHFT/bin/python benchmarks/torchft_recovery.py            # ten of each that recovers in seconds, twelve minutes
    TORCHFT/bin/python benchmarks/torchft_recovery.py --quick    # two of those only, two minutes

Run by an interpreter of its own, which has torchft and nothing of this project; made like this (Python 3.11, Linux
x86-64; torchft-nightly 2026.10.26 with torch 2.13.0+cpu)::

    python3 -m venv TORCHFT
    TORCHFT/bin/pip install numpy torch==2.13.0  # the CPU build
    TORCHFT/bin/pip install --no-deps --pre torchft-nightly
    TORCHFT/bin/pip install "opentelemetry-api>=1.39" "opentelemetry-sdk>=1.39" \
        "opentelemetry-exporter-otlp-proto-http>=1.39"

Two replicas on CPU with Gloo, each the whole model (as large as ``make demo``'s GPT, written in plain torch), one
process and one torch thread each, the lighthouse in the parent. Ten steps after the first one that both committed,
somewhere within a step, one replica gets the signal. The time ends at the survivor's first commit after it with itself
as the only participant: a step that both had reduced before does not count. The settings:

- default: the lighthouse's heartbeat timeout (5 s) and the manager's timeouts (60 s) as they are;
- heartbeat 1 s: the lighthouse's heartbeat timeout is 1 s;
- all 1 s: the timeouts of manager and process group, which bound every collective, are 1 s as well.

The faults: "kill" is SIGKILL and "hang" SIGSTOP, sent by the parent. A "deadlock" is made by the replica itself (upon
SIGUSR1 its main thread waits for a lock for ever) while torchft's own threads send heartbeats on. Every wait is
bounded: where no commit came within ``limit`` seconds, that is the result.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TextIO

SEED = 20_261_120
WIDTH, BLOCKS, HEADS, CONTEXT, BATCH, VOCABULARY = 128, 4, 4, 128, 8, 256  # conf/model/gpt_tiny.yaml
STEPS_BEFORE = 10
START_LIMIT = 120.0  # seconds for both replicas to commit so many steps together
MAX_STEPS = 100_000  # a replica that nobody ends gives up
SETTINGS: dict[str, dict[str, float]] = {
    "default": {},
    "heartbeat 1 s": {"heartbeat": 1.0},
    "all 1 s": {"heartbeat": 1.0, "timeout": 1.0},
}


@dataclass(frozen=True)
class Case:
    """A failure under a setting.

    Args:
        fault: "kill", "hang" or "deadlock".
        setting: see :data:`SETTINGS`.
        limit: seconds that a recovery is waited for.
        repeats: at most so many runs; what takes a minute each is not run ten times.
    """

    fault: str
    setting: str
    limit: float = 30.0
    repeats: int = 10


CASES = (
    Case("kill", "default"),
    Case("kill", "heartbeat 1 s"),
    Case("kill", "all 1 s"),
    Case("hang", "default", limit=90.0, repeats=2),
    Case("hang", "heartbeat 1 s", limit=90.0, repeats=2),
    Case("hang", "all 1 s"),
    Case("deadlock", "all 1 s", limit=60.0, repeats=1),
)


# ---------------------------------------------------------------------- a replica


def _run_replica(number: int, lighthouse: str, timeout: float) -> None:
    """Trains until it is killed; a line of JSON on standard output for each committed step."""
    # The same file is parent and replica, and only this one needs torch.
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(VOCABULARY, WIDTH)
            self.position = nn.Embedding(CONTEXT, WIDTH)
            block = nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(block, BLOCKS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.token(tokens) + self.position(torch.arange(CONTEXT))
            logits: torch.Tensor = self.head(self.blocks(x, mask=self.mask, is_causal=True))
            return logits

    def stay(*_: Any) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    signal.signal(signal.SIGUSR1, stay)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = Model()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    bound = timedelta(seconds=timeout)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=bound),
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            inner.load_state_dict(state["optimizer"]),
        ),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=bound,
        replica_id=f"replica{number}",
        lighthouse_addr=lighthouse,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    generator = torch.Generator().manual_seed(SEED + number)
    for _ in range(MAX_STEPS):
        text = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
        before = manager.current_step()
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if manager.current_step() > before:
            line = {"step": before, "time": time.time(), "participants": manager.num_participants()}
            print(json.dumps(line), flush=True)


# ---------------------------------------------------------------------- a run


class _Replica:
    """A replica's process and the commits that it tells of."""

    def __init__(self, number: int, lighthouse: str, timeout: float) -> None:
        command = [sys.executable, __file__, "--replica", str(number), lighthouse, str(timeout)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.stderr: list[str] = []
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.commits: queue.Queue[dict[str, Any]] = queue.Queue()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        for target, stream in ((self._read, self.process.stdout), (self._read_errors, self.process.stderr)):
            threading.Thread(target=target, args=(stream,), daemon=True).start()

    def _read(self, stream: TextIO) -> None:
        for line in stream:
            if line.startswith("{"):
                self.commits.put(json.loads(line))

    def _read_errors(self, stream: TextIO) -> None:
        for line in stream:
            self.stderr = [*self.stderr[-30:], line]

    def await_commit(self, wanted: Callable[[dict[str, Any]], bool], limit: float) -> dict[str, Any] | None:
        """The next commit that is ``wanted``, or None after ``limit`` seconds."""
        deadline = time.monotonic() + limit
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                commit = self.commits.get(timeout=min(left, 1.0))
                if wanted(commit):
                    return commit
                continue
            if self.process.poll() is not None:
                raise RuntimeError(f"A replica ended with {self.process.returncode}:\n{''.join(self.stderr)}")
        return None

    def end(self) -> None:
        self.process.kill()  # also ends one that is stopped
        self.process.wait()


def measure(case: Case, draw: random.Random) -> tuple[float | None, float]:
    """Runs two replicas and makes one of them fail.

    Returns:
        Seconds from the signal to the survivor's next committed step of its own (None: not within the limit), and the
        median of a step of both before.

    Raises:
        RuntimeError: if a replica ends by itself, or they do not begin.
    """
    from torchft.coordination import LighthouseServer

    setting = SETTINGS[case.setting]
    options: dict[str, int] = {}
    if "heartbeat" in setting:
        options["heartbeat_timeout_ms"] = round(1000 * setting["heartbeat"])
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **options)
    address = lighthouse.address().replace("[::]", "127.0.0.1")
    timeout = setting.get("timeout", 60.0)
    replicas: list[_Replica] = []
    try:
        for number in range(2):
            replicas.append(_Replica(number, address, timeout))
        survivor, victim = replicas
        times: list[float] = []

        def warm(commit: dict[str, Any]) -> bool:
            times.append(commit["time"]) if commit["participants"] == 2 else times.clear()
            return len(times) > STEPS_BEFORE

        if survivor.await_commit(warm, START_LIMIT) is None:
            raise RuntimeError(f"The replicas did not train together:\n{''.join(survivor.stderr)}")
        step = statistics.median(b - a for a, b in itertools.pairwise(times))
        time.sleep(draw.random() * step)
        signals = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "deadlock": signal.SIGUSR1}
        sent = time.time()
        victim.process.send_signal(signals[case.fault])

        def alone(commit: dict[str, Any]) -> bool:
            return bool(commit["time"] > sent and commit["participants"] == 1)

        commit = survivor.await_commit(alone, case.limit)
        return None if commit is None else commit["time"] - sent, step
    finally:
        for replica in replicas:
            replica.end()
        lighthouse.shutdown()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two of each, without those that take a minute each")
    parser.add_argument("--repeats", type=int, default=10, help="of each case that recovers in seconds")
    parser.add_argument("--seed", type=int, default=SEED, help="of the moments of the signals")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each run, for recovery.py")
    parser.add_argument("--replica", nargs=3, metavar=("NUMBER", "LIGHTHOUSE", "TIMEOUT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.replica is not None:
        number, lighthouse, timeout = options.replica
        _run_replica(int(number), lighthouse, float(timeout))
        return
    from importlib.metadata import version

    # The lighthouse writes about every quorum to file descriptor 2; errors of this process are still to be seen.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    if not options.json:
        print(f"torchft-nightly {version('torchft-nightly')}, torch {version('torch')}; seconds")
    draw = random.Random(options.seed)
    for case in CASES:
        if options.quick and case.repeats < 10:
            continue
        repeats = min(case.repeats, 2 if options.quick else options.repeats)
        runs = []
        for _ in range(repeats):
            try:
                runs.append(measure(case, draw))
            except RuntimeError as error:  # tells of a run that did not begin; the others count
                print(f"{case}: {error}", file=sys.stderr)
        if not runs:
            continue
        if options.json:
            for seconds, step in runs:
                line = {"fault": case.fault, "setting": case.setting, "limit": case.limit, "seconds": seconds}
                print(json.dumps({**line, "step": step, "version": version("torchft-nightly")}), flush=True)
        else:
            shown = ", ".join(f"not within {case.limit:g} s" if s is None else f"{s:.2f}" for s, _ in runs)
            step = statistics.median(step for _, step in runs)
            print(f"{case.fault:9} {case.setting:14} {shown} (a step before: {step:.3f})", flush=True)


if __name__ == "__main__":
    main()
