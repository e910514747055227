"""A model with measured stages: their durations are given, not derived from floating-point operations.

Concept: measured durations, from the profile of a real run or the settings of an emulation, replace the calibrated
costs. The transformer only provides the bytes: state to copy, activations to hold.

Contract: as :class:`TrainingModel`. The stages cannot be cut differently, because their parts were not measured.

Must not know: how anything was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import Costs
from lightning_recycle.simulation.training_model import TrainingModel

__all__ = ["MeasuredModel"]


@dataclass(frozen=True)
class MeasuredModel(TrainingModel):
    """A training model with known durations. Takes the arguments of ``TrainingModel`` except a calibration, and:

    Args:
        stage_costs: costs of the fault-free stages, in seconds, e.g. ``load_profile("profile.json").costs()``.

    Raises:
        ConfigurationError: as for ``TrainingModel``, and when the costs are not those of its stages, or all zero.
    """

    stage_costs: Costs = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.throughput is not None:
            raise ConfigurationError(
                f"MeasuredModel(throughput={self.throughput!r}): measured stages need no calibration; leave it out."
            )
        super().__post_init__()
        if self.stage_costs.stages != self.stages:
            raise ConfigurationError(
                f"MeasuredModel(stage_costs): {self.name} has {self.stages} stages, the costs have "
                f"{self.stage_costs.stages}."
            )
        if sum(self.sample_seconds) <= 0:
            raise ConfigurationError("MeasuredModel(stage_costs): F, B and W take no time at all; give seconds.")

    @property
    def sample_seconds(self) -> tuple[float, float, float]:
        """(F, B, W) of one sample through all stages."""
        costs = self.stage_costs
        forward, backward, weight = (
            sum(part) / self.microbatch for part in (costs.forward, costs.backward_input, costs.backward_weight)
        )
        return forward, backward, weight

    @property
    def useful_gpu_seconds(self) -> float:
        """GPU-seconds of F, B and W of one global batch, without the forwards that run again with ``recompute``."""
        again = self.sample_seconds[0] if self.recompute else 0.0
        return self.global_batch * (sum(self.sample_seconds) - again) * self.tensor_parallel

    def costs(self, units: Sequence[int] | None = None, pipelines: int | None = None) -> Costs:
        """The measured durations, for any number of ``pipelines``.

        Raises:
            ConfigurationError: for ``units`` other than those of the fault-free split.
        """
        if units is not None and tuple(units) != self.even():
            raise ConfigurationError(
                f"{self.name}: the measured stages say nothing about stages of {tuple(units)} "
                "units: use a policy that leaves the layers where they are, such as Recycle."
            )
        return self.stage_costs
