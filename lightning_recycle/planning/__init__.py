"""Planning: from a grid, its costs and its failures to a schedule; without torch.

>>> from lightning_recycle.planning import Costs, Grid, Problem, Worker, plan
>>> problem = Problem(Grid(3, 4, 6), Costs.uniform(4), failed=frozenset({Worker(1, 2)}))
>>> plan(problem).period
27.0
"""

from lightning_recycle.planning.costs import Costs, Memory, Profile, StageProfile, load_profile, save_profile
from lightning_recycle.planning.exact_planner import ExactPlanner
from lightning_recycle.planning.failure_distribution import normalize, normalized_failures, normalized_problem, roles
from lightning_recycle.planning.grid import Grid, Microbatch, Op, OpKind, ScheduledOp, Worker
from lightning_recycle.planning.heuristic_planner import HeuristicPlanner, heuristic
from lightning_recycle.planning.layer_cuts import LayerCosts, even_cuts
from lightning_recycle.planning.layouts import FailureRecord, LayoutPlan, plan_layout
from lightning_recycle.planning.list_scheduling import one_f_one_b
from lightning_recycle.planning.plan_library import PlanLibrary, load_plan, plan_to_json, read_plan, save_plan
from lightning_recycle.planning.planner import Planner, available_planners, get_planner, plan, register_planner, solve
from lightning_recycle.planning.problem import Problem, Technique, distribution_of, lower_bound, makespan_lower_bound
from lightning_recycle.planning.routing import reroute
from lightning_recycle.planning.schedule import PlanResult, Schedule
from lightning_recycle.planning.timing import retime
from lightning_recycle.planning.validation import InvalidScheduleError, validate

__all__ = [
    "Costs",
    "ExactPlanner",
    "FailureRecord",
    "Grid",
    "HeuristicPlanner",
    "InvalidScheduleError",
    "LayerCosts",
    "LayoutPlan",
    "Memory",
    "Microbatch",
    "Op",
    "OpKind",
    "PlanLibrary",
    "PlanResult",
    "Planner",
    "Problem",
    "Profile",
    "Schedule",
    "ScheduledOp",
    "StageProfile",
    "Technique",
    "Worker",
    "available_planners",
    "distribution_of",
    "even_cuts",
    "get_planner",
    "heuristic",
    "load_plan",
    "load_profile",
    "lower_bound",
    "makespan_lower_bound",
    "normalize",
    "normalized_failures",
    "normalized_problem",
    "one_f_one_b",
    "plan",
    "plan_layout",
    "plan_to_json",
    "read_plan",
    "register_planner",
    "reroute",
    "retime",
    "roles",
    "save_plan",
    "save_profile",
    "solve",
    "validate",
]
