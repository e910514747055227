"""Profiles: the measured costs of a model's operations, as ``profile.json``.

Concept: the runtime measures, this module stores; the command line and the planner read. A profile describes one model
on one kind of machine with one number of stages; it does not depend on the number of pipelines or micro-batches.

File (schema 1)::

    {"schema": 1, "steps": 20,
     "communication": {"latency": 1e-4, "bandwidth": 1e10},
     "stages": [{"forward": 0.010, "backward_input": 0.011, "backward_weight": 0.009, "reduce": 0.002,
                 "optimizer": 0.001, "activation_bytes": 25000000, "output_bytes": 1000000,
                 "waiting_bytes": 12000000}, ...]}

Contract: immutable values in seconds and bytes, validated; every error is one line that names the file and the remedy.

Must not know: how anything was measured, torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from os import PathLike
from typing import Any

from lightning_recycle.arguments import at_least, whole
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.files import write_atomically
from lightning_recycle.planning.costs import Costs
from lightning_recycle.planning.memory import Memory

__all__ = ["PROFILE_SCHEMA", "Profile", "StageProfile", "load_profile", "save_profile"]

PROFILE_SCHEMA = 1
"""Version of the file's format; a reader refuses newer ones."""


@dataclass(frozen=True, slots=True)
class StageProfile:
    """One stage: seconds of its operations on one micro-batch (F, B, W) or once per step (REDUCE, STEP), and bytes."""

    forward: float
    backward_input: float
    backward_weight: float
    reduce: float = 0.0
    optimizer: float = 0.0
    activation_bytes: int = 0
    """Held for one micro-batch from its F to its B; to its W where ``waiting_bytes`` is not known."""
    output_bytes: int = 0
    """Sent to the next stage for one micro-batch; its gradient is as large."""
    waiting_bytes: int | None = None
    """Held for one micro-batch from its B to its W; None if that was not measured."""

    def __post_init__(self) -> None:
        for item in fields(self):
            check = whole if item.name.endswith("_bytes") else at_least
            if item.name != "waiting_bytes" or self.waiting_bytes is not None:
                check("StageProfile", item.name, getattr(self, item.name))


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured model.

    Args:
        stages: the profile of each stage.
        latency: seconds for an empty message.
        bandwidth: bytes per second between neighbouring stages; 0 if unknown; messages then cost the latency.
        steps: number of measured steps.
    """

    stages: tuple[StageProfile, ...]
    latency: float = 0.0
    bandwidth: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages:
            raise ConfigurationError("Profile(stages=()): give at least one stage.")
        at_least("Profile", "latency", self.latency)
        at_least("Profile", "bandwidth", self.bandwidth)
        whole("Profile", "steps", self.steps)

    def costs(self) -> Costs:
        """The planner's costs, in seconds. A message counts as the largest between any two stages."""
        message = max((stage.output_bytes for stage in self.stages[:-1]), default=0)
        transfer = message / self.bandwidth if self.bandwidth else 0.0
        return Costs(
            forward=tuple(stage.forward for stage in self.stages),
            backward_input=tuple(stage.backward_input for stage in self.stages),
            backward_weight=tuple(stage.backward_weight for stage in self.stages),
            reduce=tuple(stage.reduce for stage in self.stages),
            optimizer=tuple(stage.optimizer for stage in self.stages),
            communication=self.latency + transfer if len(self.stages) > 1 else 0.0,
        )

    def memory(self, activation_memory: float) -> Memory:
        """The memory of a plan with ``activation_memory`` bytes of each worker left free for micro-batches."""
        return Memory(
            capacity=(activation_memory,) * len(self.stages),
            fixed=(0.0,) * len(self.stages),
            after_forward=tuple(stage.activation_bytes for stage in self.stages),
            after_backward=tuple(
                stage.activation_bytes if stage.waiting_bytes is None else stage.waiting_bytes for stage in self.stages
            ),
        )


def save_profile(path: str | PathLike[str], profile: Profile) -> None:
    """Write ``profile.json``, atomically.

    Raises:
        ConfigurationError: when the file cannot be written.
    """
    data = {
        "schema": PROFILE_SCHEMA,
        "steps": profile.steps,
        "communication": {"latency": profile.latency, "bandwidth": profile.bandwidth},
        "stages": [asdict(stage) for stage in profile.stages],
    }
    try:
        write_atomically(path, (json.dumps(data, indent=2, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise ConfigurationError(f"cannot write the profile to {path}: {error.strerror or error}.") from error


def load_profile(path: str | PathLike[str]) -> Profile:
    """Read ``profile.json``.

    Raises:
        ConfigurationError: when it cannot be read, is damaged, or of a newer schema.
    """
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except OSError as error:
        raise ConfigurationError(f"cannot read the profile {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"the profile {path} is damaged, it is not JSON ({error}): measure again.") from error
    schema = data.get("schema") if isinstance(data, Mapping) else None
    if schema != PROFILE_SCHEMA:
        raise ConfigurationError(
            f"the profile {path} has schema {schema!r}, this version reads {PROFILE_SCHEMA}: "
            "measure again, or update lightning-recycle."
        )
    try:
        return _profile(data)
    except ConfigurationError as error:
        raise ConfigurationError(f"the profile {path} is damaged: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"the profile {path} is damaged ({error!r}): measure again.") from error


def _profile(data: Mapping[str, Any]) -> Profile:
    communication = data["communication"]
    return Profile(
        stages=tuple(StageProfile(**stage) for stage in data["stages"]),
        latency=communication["latency"],
        bandwidth=communication["bandwidth"],
        steps=data["steps"],
    )
