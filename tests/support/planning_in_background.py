"""What tests ask of a planner in the background and the run has no use for."""

from lightning_recycle.control.plans.background_planner import BackgroundPlanner

__all__ = ["is_idle"]


def is_idle(planner: BackgroundPlanner) -> bool:
    """Whether all that was begun is done."""
    return not planner._jobs
