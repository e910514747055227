"""Forwards without a backward: evaluations, and self(x) in hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lightning_recycle.control.protocol.member import Interrupted
from lightning_recycle.data.steps import StepHandle
from lightning_recycle.planning.grid import Microbatch, OpKind
from lightning_recycle.planning.program import Task
from lightning_recycle.runtime.comm.transports import Channel
from lightning_recycle.runtime.executor.executor_callbacks import RecordOutput
from lightning_recycle.runtime.executor.step_runner import StepRunner


class Forwards:
    """The forwards of one worker, each an attempt that leaves nothing but its result."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._client, self._messages = runner.client, runner.communicator.messages
        self._is_last = runner.worker.stage == runner.grid.stages - 1
        self._part, self._parts = runner.communicator.parts
        self._beyond = runner.grid.global_microbatches * self._parts  # tag of messages that belong to no micro-batch

    def run_batch(
        self, handle: StepHandle, split: Callable[[Any], tuple[Any, Any]], record: RecordOutput
    ) -> dict[int, bytes]:
        """Runs the forwards of this worker's program, but for empty micro-batches.

        Workers that compute parts of a micro-batch run all or none of them: the layers exchange parameters. One whose
        own part has no samples runs another's, and drops the result.
        """
        loader, version = handle.loader, self._runner.version
        sizes: dict[Task, int] = {}
        reads: dict[Task, Microbatch] = {}
        for task in self._runner.program:
            if task.op.kind is OpKind.FORWARD and task.op.microbatch is not None:
                sizes[task] = loader.num_samples(handle, task.op.microbatch)
                for part in self._alternatives(task.op.microbatch):
                    if loader.num_samples(handle, part):
                        reads[task] = part
                        break
        forwards = list(reads)
        incoming = {
            task: self._messages.post_receive(Channel.ACTIVATIONS, task.source, task.index)
            for task in forwards
            if task.source is not None
        }
        recorded: dict[int, bytes] = {}
        for task in forwards:
            if self._client.interrupted:
                raise Interrupted
            self._client.doing(version, f"evaluation {task.label}")
            inputs = target = None
            if task.op.stage == 0 or self._is_last:
                inputs, target = split(loader.fetch(handle, reads[task]))
            if task.source is not None:
                with self._client.waiting(f"rank {task.source}"):
                    inputs = self._messages.receive(incoming[task])
            output = self._runner.stage.evaluate(version, task.index, inputs, target)
            if self._is_last:
                made = record(output, target, sizes[task])
                if sizes[task]:
                    recorded[task.index] = made
            if task.destination is not None:
                self._messages.send(Channel.ACTIVATIONS, output, task.destination, task.index)
        self._messages.end_step()
        self._runner.stage.clear()
        return recorded

    def _alternatives(self, microbatch: Microbatch) -> Iterator[Microbatch]:
        """``microbatch``, then those of the other workers of its position."""
        first = microbatch.pipeline - self._part
        for shift in range(self._parts):
            yield replace(microbatch, pipeline=first + (self._part + shift) % self._parts)

    @property
    def leads_last(self) -> bool:
        """Whether this worker speaks for the last stage."""
        return self._is_last and self._runner.stage_leaders[self._runner.worker.stage] == self._client.rank

    def run_value(self, value: Any, draw: int) -> Any:
        """Runs this stage on ``value``, if this worker speaks for it, and passes it on."""
        stage, leads = self._runner.worker.stage, self._runner.stage_leaders
        if leads[stage] != self._client.rank:
            return None
        inputs = value
        if stage > 0:
            incoming = self._messages.post_receive(Channel.ACTIVATIONS, leads[stage - 1], self._beyond)
            with self._client.waiting(f"rank {leads[stage - 1]}"):
                inputs = self._messages.receive(incoming)
        output = self._runner.stage.run(self._runner.version, draw, inputs, value)
        if not self._is_last:
            self._messages.send(Channel.ACTIVATIONS, output, leads[stage + 1], self._beyond)
        self._runner.stage.clear()
        return output
