"""Run request of a script, for workers that were not started by a launching process."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_recycle.callbacks import HeartbeatCallback, PlanMonitor
from lightning_recycle.control.protocol.messages import RunRequest
from lightning_recycle.session.configuration import Options, RunSetup

__all__ = ["run_request_of"]


def run_request_of(trainer: pl.Trainer, options: Options, setup: RunSetup, heartbeat: HeartbeatCallback) -> RunRequest:
    """The run that the script of ``trainer`` asks for; the coordinator refuses what it cannot do."""
    assert trainer.state.fn is not None
    drift = PlanMonitor.options_of(trainer)
    named = isinstance(options.planner, str)
    return RunRequest(
        entry=str(trainer.state.fn.value),
        grid=setup.grid,
        microbatches_given=options.num_microbatches is not None,
        decoupled=options.decoupled,
        staggered=setup.staggered,
        planner=str(options.planner) if named else "heuristic",
        in_flight_limit=options.in_flight_limit,
        memory=options.memory,
        recompute=options.activation_checkpointing == "auto",
        adapt=options.adapt,
        timeout=float(heartbeat.timeout),
        last_holder_timeout=float(heartbeat.last_holder_timeout),
        coordinator_timeout=float(heartbeat.coordinator_timeout),
        start_timeout=float(options.start_timeout),
        machine_error_retries=options.machine_error_retries,
        monitor=None if drift is None else (float(drift.threshold), drift.window, drift.horizon_steps),
        on_corruption=options.on_corruption,
        check_every=options.check_every,
        verify=float(options.verify),
        needs_launcher=tuple(_needs_launcher(options)),
    )


def _needs_launcher(options: Options) -> list[str]:
    """The options that only a launching process can carry out: it starts workers, plans for them, reads files."""
    wanted = {
        "normalize=True": options.normalize,
        "on_stage_lost='restart'": options.on_stage_lost == "restart",
        "plan_library=...": options.plan_library is not None,
        "profile=...": options.profile is not None,
        "planner=<an object>": not isinstance(options.planner, str),
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]
