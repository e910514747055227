"""What tests ask of a planner in the background and the run has no use for."""

from lightning_recycle.control.plans.plan_provider import PlanningQueue


def is_idle(planner: PlanningQueue) -> bool:
    """Whether all that was begun is done."""
    return not planner._jobs
