"""The announcement of a generation, as it reaches the executor and its communicator."""

import socket
import threading
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch
from support.thread_client import ThreadClient
from torch import nn

from lightning_recycle.control import client as client_module
from lightning_recycle.control.network.connection import FrameBuffer, MessageConnection
from lightning_recycle.control.protocol.messages import TO_WORKERS, Regroup
from lightning_recycle.planning.grid import Grid, Worker
from lightning_recycle.runtime.commit_reports import CommitRules
from lightning_recycle.runtime.executor import Executor
from lightning_recycle.runtime.gradients import GradientBuffers
from lightning_recycle.runtime.stage_bundle import StageBundle, StageTies
from lightning_recycle.runtime.step_runner import StepRunner


class Recorder:
    """In the place of a communicator: remembers which generations were aborted."""

    def __init__(self) -> None:
        self.aborted: list[int] = []
        self.called = threading.Event()
        self.parts, self.mesh = (0, 1), None
        self.device = torch.device("cpu")

    def abort(self, generation: int, in_hook: Collection[int] = ()) -> None:
        self.aborted.append(generation)
        self.called.set()


class HeldBack(threading.Condition):
    """Stops the receiver thread after it has told the main thread of an announcement, until that has acted on it."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        if threading.current_thread().name == "recycle-receive":
            self.entered.wait(1.0)


def test_a_receiver_thread_that_is_late_does_not_abort_the_generation_that_has_just_begun(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(client_module, "connect", lambda *_: MessageConnection(ours, FrameBuffer(TO_WORKERS)))
    client = ThreadClient(0, ("", 0), b"", heartbeat_interval=60.0)
    client._changed = held = HeldBack()
    communicator: Any = Recorder()
    stage: Any = SimpleNamespace(clear=lambda: None, differentiates_itself=True)
    parameters = [nn.Parameter(torch.zeros(1))]
    gradients = GradientBuffers(parameters, torch.device("cpu"))
    host: Any = SimpleNamespace(recomputing=None)
    bundle = StageBundle(stage, parameters, gradients, StageTies())
    Executor(StepRunner(Worker(0, 0), Grid(1, 1, 1), client, communicator, bundle, host, CommitRules()))

    coordinator = MessageConnection(theirs, FrameBuffer(()))
    coordinator.send(Regroup(0, (0,)))
    client.await_announcement(10.0)
    client.enter_generation()
    held.entered.set()
    assert communicator.called.wait(10.0)
    client.leave()
    coordinator.close()
    assert max(communicator.aborted) < client.generation, "the new generation's connections are shut down"
