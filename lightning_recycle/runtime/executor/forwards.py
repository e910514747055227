"""Forwards without a backward: evaluations, and self(x) in hooks.

Concept: both are attempts. A failure ends one with :class:`Interrupted` or :class:`CommunicationError`, wherever it is;
the executor then recovers and makes another one. Nothing of an attempt remains but what it returns.

Must not know: what an attempt is for, or how often it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_recycle.control.client import ControlClient, Interrupted
from lightning_recycle.data.steps import StepHandle
from lightning_recycle.planning.grid import Grid, OpKind, Worker
from lightning_recycle.planning.program import Task
from lightning_recycle.runtime.comm.communicator import Channel, Communicator
from lightning_recycle.runtime.executor.executor_callbacks import RecordOutput
from lightning_recycle.runtime.stage.stage import Stage

__all__ = ["Forwards"]


class Forwards:
    """The forwards of one worker.

    Args:
        worker: the worker's position.
        grid: the grid of the run.
        client: the connection to the coordinator.
        communicator: the connection to the other workers.
        stage: the layers of this stage.
    """

    def __init__(
        self, worker: Worker, grid: Grid, client: ControlClient, communicator: Communicator, stage: Stage
    ) -> None:
        self._worker = worker
        self._client = client
        self._communicator = communicator
        self._stage = stage
        self._is_last = worker.stage == grid.stages - 1
        self._beyond = grid.global_microbatches  # the tag of messages that belong to no micro-batch

    def run_batch(
        self,
        program: Sequence[Task],
        handle: StepHandle,
        version: int,
        split: Callable[[Any], tuple[Any, Any]],
        record: RecordOutput,
    ) -> dict[int, bytes]:
        """Runs the forwards of ``program``; micro-batches without samples are skipped.

        Args:
            program: the worker's part of the schedule.
            handle: the batch.
            version: of the parameters, for the randomness.
            split: turns a collated micro-batch into (input, target) on the device.
            record: called on the last stage with (output, target, number of samples) of each micro-batch.

        Returns:
            What ``record`` returned, by global micro-batch.
        """
        loader = handle.loader
        sizes = {
            task.index: loader.num_samples(handle, task.op.microbatch)
            for task in program
            if task.op.kind is OpKind.FORWARD and task.op.microbatch is not None
        }
        forwards = [task for task in program if task.op.kind is OpKind.FORWARD and sizes[task.index]]
        incoming = {
            task: self._communicator.messages.post_receive(Channel.ACTIVATIONS, task.source, task.index)
            for task in forwards
            if task.source is not None
        }
        recorded: dict[int, bytes] = {}
        for task in forwards:
            if self._client.interrupted:
                raise Interrupted
            self._client.doing(version, f"evaluation {task.label}")
            inputs = target = None
            assert task.op.microbatch is not None
            if task.op.stage == 0 or self._is_last:
                inputs, target = split(loader.fetch(handle, task.op.microbatch))
            if task.source is not None:
                with self._client.waiting(f"rank {task.source}"):
                    inputs = self._communicator.messages.receive(incoming[task])
            output = self._stage.evaluate(version, task.index, inputs, target)
            if self._is_last:
                recorded[task.index] = record(output, target, sizes[task.index])
            if task.destination is not None:
                self._communicator.messages.send(Channel.ACTIVATIONS, output, task.destination, task.index)
        self._communicator.messages.end_step()
        return recorded

    def leads_last(self, leads: Mapping[int, int]) -> bool:
        """Whether this worker speaks for the last stage; ``leads``: the rank that speaks for each stage."""
        return self._is_last and leads[self._worker.stage] == self._client.rank

    def run_value(self, value: Any, leads: Mapping[int, int], version: int, draw: int) -> Any:
        """Runs this stage on ``value``, if this worker speaks for it, and passes the output on.

        Args:
            value: input of the first layer; several are a tuple. It is also the target where layers take one.
            leads: the rank that speaks for each stage.
            version: of the parameters, for the randomness.
            draw: tells the randomness of this call from that of others in the same version, and of micro-batches.

        Returns:
            The output of the stage; None if another worker speaks for it.
        """
        stage = self._worker.stage
        if leads[stage] != self._client.rank:
            return None
        inputs = value
        if stage > 0:
            incoming = self._communicator.messages.post_receive(Channel.ACTIVATIONS, leads[stage - 1], self._beyond)
            with self._client.waiting(f"rank {leads[stage - 1]}"):
                inputs = self._communicator.messages.receive(incoming)
        output = self._stage.run(version, draw, inputs, value)
        if not self._is_last:
            self._communicator.messages.send(Channel.ACTIVATIONS, output, leads[stage + 1], self._beyond)
        return output
