"""``RayReCycle``: a training script on Ray, one actor for each position of the grid.

    def train(config):
        run = ray_worker()
        trainer = L.Trainer(strategy=ReCycleStrategy(**run.strategy_arguments), max_steps=100, **run.trainer_arguments)
        trainer.fit(Model(config), loader)

    result = RayReCycle(num_pipelines=2, pipeline_parallel_size=2, num_microbatches=4).fit(train, {"lr": 0.1})

This module turns what came of the run (:mod:`~lightning_recycle.engines.ray_run`) into a result, or into the error that
ended it. What a worker is told is :class:`RayWorker`.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_recycle.arguments import is_integer, is_number
from lightning_recycle.control.joining.run_config import Overrides
from lightning_recycle.control.monitoring.history import Event
from lightning_recycle.control.payload import unpack
from lightning_recycle.control.protocol.messages import Setting
from lightning_recycle.control.protocol.state import Finished
from lightning_recycle.engines.ray_placement import needs_of_worker
from lightning_recycle.engines.ray_run import RayRun, RunEnd
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.launch.outcome import error_of
from lightning_recycle.launch.worker_results import LeaderResult, StageResult
from lightning_recycle.planning.grid import Grid
from lightning_recycle.planning.planner import get_planner

__all__ = ["RayReCycle", "RayResult", "RayWorker", "ray_worker"]

_TOLD = "_RECYCLE_RAY_RUN"  # a worker's variable with its run, as JSON


@dataclass(frozen=True)
class RayWorker:
    """Worker of a run on Ray, as the function of :meth:`RayReCycle.fit` sees it.

    Args:
        name: the name of the run.
        grid: the grid.
        storage_path: the folder of this run in the ``storage_path`` of ``RayReCycle``; None without one.
    """

    name: str
    grid: Grid
    storage_path: str | None

    @property
    def trainer_arguments(self) -> dict[str, Any]:
        """Arguments of a Trainer for this run: the number of workers, and its folder if it has one."""
        arguments: dict[str, Any] = {"devices": 1, "num_nodes": self.grid.num_workers}
        return arguments if self.storage_path is None else {**arguments, "default_root_dir": self.storage_path}

    @property
    def strategy_arguments(self) -> dict[str, Any]:
        """Arguments of a ReCycleStrategy with this grid."""
        return {"pipeline_parallel_size": self.grid.stages, "num_microbatches": self.grid.microbatches}


def ray_worker() -> RayWorker:
    """The worker of :class:`RayReCycle` that this process is.

    Raises:
        ConfigurationError: if it is none.
    """
    if _TOLD not in os.environ:
        raise ConfigurationError("ray_worker() is for the function that RayReCycle.fit runs in its workers.")
    told = json.loads(os.environ[_TOLD])
    return RayWorker(told["name"], Grid(*told["grid"]), told["storage_path"])


@dataclass(frozen=True)
class RayResult:
    """Result of a run on Ray.

    Args:
        returned: what the function returned: of the workers on which it returned anything but None, the one of the
            lowest rank.
        metrics: ``trainer.callback_metrics`` after the last call of the Trainer.
        checkpoint: the path of the checkpoint that the first ModelCheckpoint calls the best, else of its newest one;
            None without one.
        state_dict: the trained weights, under the names that they have on one device.
        history: what happened, in the order of the Trainer's calls. Where the coordinator was killed in one, it begins
            anew, with an event ``revived``.
    """

    returned: Any
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    checkpoint: str | None = None
    state_dict: Mapping[str, Tensor] = field(default_factory=dict)
    history: list[Event] = field(default_factory=list)


class RayReCycle:
    """Runs a function that trains with ``ReCycleStrategy`` on a Ray cluster; replaces workers that are lost.

    The function is called once in each of D * S actors, and makes its Trainer there, as the scripts of workers that a
    cluster manager starts do. Each pipeline is a placement group, on a node of its own where there is room. A lost
    worker is asked for again while the others train on, and joins when Ray has room for it. Workers of a node that Ray
    drains leave at a step boundary.

    Args:
        num_pipelines: D.
        pipeline_parallel_size: S.
        num_microbatches: M, per pipeline and step.
        resources_per_worker: reserved for a worker; by default one CPU, and with ``use_gpu`` one GPU.
        use_gpu: whether a worker has a GPU of its own.
        storage_path: a folder that all nodes reach, also as a URL that fsspec knows (``s3://...``). The run gets a
            folder in it, which :func:`ray_worker` tells the function.
        name: the name of the run, by default a new one. Its coordinator is the actor ``recycle-<name>``.
        planner, split_backward, staggered, start_timeout, machine_error_retries: as in
            :class:`~lightning_recycle.ReCycleStrategy`; what is given here counts, whatever the function's own
            strategy says, and by default that does.
        timeout, last_holder_timeout: likewise, and as in
            :class:`~lightning_recycle.callbacks.HeartbeatCallback`.
        max_replacements: how many workers may be replaced; None for any number.
        environment: further environment variables of the workers.

    Raises:
        ConfigurationError: for values that cannot work.
    """

    def __init__(
        self,
        num_pipelines: int,
        pipeline_parallel_size: int = 1,
        num_microbatches: int = 1,
        *,
        resources_per_worker: Mapping[str, float] | None = None,
        use_gpu: bool = False,
        storage_path: str | os.PathLike[str] | None = None,
        name: str | None = None,
        planner: str | None = None,
        split_backward: bool | None = None,
        staggered: bool | None = None,
        timeout: float | None = None,
        last_holder_timeout: float | None = None,
        start_timeout: float | None = None,
        machine_error_retries: int | None = None,
        max_replacements: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.grid = Grid(num_pipelines, pipeline_parallel_size, num_microbatches)
        self.resources_per_worker = needs_of_worker(use_gpu, resources_per_worker)
        for resource, amount in self.resources_per_worker.items():
            if not is_number(amount, 0.0):
                raise ConfigurationError(
                    f"RayReCycle(resources_per_worker={dict(self.resources_per_worker)!r}): {resource!r} needs a number"
                    " of at least 0."
                )
        if use_gpu and not self.resources_per_worker["GPU"]:
            raise ConfigurationError(
                "RayReCycle(use_gpu=True): a worker needs some of a GPU; leave GPU out of the resources."
            )
        for option, value in (
            ("timeout", timeout),
            ("last_holder_timeout", last_holder_timeout),
            ("start_timeout", start_timeout),
        ):
            if value is not None and not is_number(value, 0.0, above=True):
                raise ConfigurationError(f"RayReCycle({option}={value!r}): give a number of seconds, more than 0.")
        for option, count in (("machine_error_retries", machine_error_retries), ("max_replacements", max_replacements)):
            if count is not None and not is_integer(count, 0):
                raise ConfigurationError(f"RayReCycle({option}={count!r}): give an integer of at least 0.")
        if planner is not None:
            get_planner(planner)
        self.name = name
        # Lightning takes "file:///a/b" for the name of a relative path.
        self.storage_path = None if storage_path is None else os.fspath(storage_path).removeprefix("file://")
        self.max_replacements = max_replacements
        self._environment = dict(environment or {})
        settings: dict[str, Setting] = {
            "planning.planner": planner,
            "planning.split_backward": split_backward,
            "planning.staggered": staggered,
            "heartbeat.timeout": timeout,
            "heartbeat.last_holder_timeout": last_holder_timeout,
            "recovery.start_timeout": start_timeout,
            "recovery.machine_error_retries": machine_error_retries,
        }
        self._given = Overrides(
            self.grid.pipelines,
            self.grid.stages,
            self.grid.microbatches,
            {name: value for name, value in settings.items() if value is not None},
        )

    def fit(self, train_fn: Callable[[Any], Any], config: Any = None) -> RayResult:
        """Calls ``train_fn(config)`` in every worker, and waits for the end of that.

        Connects to Ray if that has not been done: to the cluster of this job, else to one of this machine.

        Raises:
            ConfigurationError: if Ray is not installed, the script's grid is another one, or workers' scripts differ.
            StageLostError: when all replicas of a stage are lost.
            Exception: the user's own exception, with the traceback of the worker that raised it.
        """
        name = self.name or uuid.uuid4().hex[:12]
        storage = None if self.storage_path is None else f"{self.storage_path.rstrip('/')}/{name}"
        grid = (self.grid.pipelines, self.grid.stages, self.grid.microbatches)
        told = json.dumps({"name": name, "grid": grid, "storage_path": storage})
        run = RayRun(
            name,
            self.grid,
            self.resources_per_worker,
            self._given,
            train_fn,
            config,
            {**self._environment, _TOLD: told},
            self.max_replacements,
        )
        return self._result(run.execute())

    def _result(self, end: RunEnd) -> RayResult:
        history = [event for _, events in end.outcomes for event in events]
        state: dict[str, Tensor] = {}
        extras: LeaderResult | None = None
        for outcome, events in end.outcomes:
            if not isinstance(outcome, Finished):
                raise error_of(outcome, self.grid, events)
            parts: list[StageResult] = []
            for rank in sorted(outcome.results):
                part, found = unpack(outcome.results.pop(rank))
                parts.append(part)
                extras = found or extras
            state = {name: value for part in parts for name, value in (part.state or {}).items()} or state
        if extras is None:
            return RayResult(end.returned, history=history)
        return RayResult(end.returned, _metrics(extras), _checkpoint(extras), state, history)


def _metrics(extras: LeaderResult) -> dict[str, Tensor]:
    metrics: dict[str, Tensor] = extras.trainer["_logger_connector"].get("_callback_metrics", {})
    return dict(metrics)


def _checkpoint(extras: LeaderResult) -> str | None:
    """The best checkpoint of the first callback that has one, by the states of the callbacks."""
    for state in extras.callbacks.values():
        for path in ("best_model_path", "last_model_path"):
            if isinstance(state, Mapping) and state.get(path):
                return str(state[path])
    return None
