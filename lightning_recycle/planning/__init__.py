"""Planning: from a grid, its costs and its failures to a schedule. Pure Python, no torch, imports in milliseconds.

>>> from lightning_recycle.planning import Costs, Grid, Problem, Worker, plan
>>> problem = Problem(Grid(3, 4, 6), Costs.uniform(4), failed=frozenset({Worker(1, 2)}))
>>> plan(problem).period
27.0
"""

from lightning_recycle.planning.bounds import lower_bound, makespan_lower_bound
from lightning_recycle.planning.grid import Grid, Microbatch, Worker
from lightning_recycle.planning.heuristic import HeuristicPlanner, heuristic
from lightning_recycle.planning.one_f_one_b import one_f_one_b
from lightning_recycle.planning.ops import Op, OpKind, ScheduledOp
from lightning_recycle.planning.planner import Planner, available_planners, get_planner, plan, register_planner
from lightning_recycle.planning.problem import Costs, Problem, Technique
from lightning_recycle.planning.routing import reroute
from lightning_recycle.planning.schedule import PLAN_SCHEMA, Schedule
from lightning_recycle.planning.timing import retime
from lightning_recycle.planning.validation import InvalidScheduleError, validate

__all__ = [
    "PLAN_SCHEMA",
    "Costs",
    "Grid",
    "HeuristicPlanner",
    "InvalidScheduleError",
    "Microbatch",
    "Op",
    "OpKind",
    "Planner",
    "Problem",
    "Schedule",
    "ScheduledOp",
    "Technique",
    "Worker",
    "available_planners",
    "get_planner",
    "heuristic",
    "lower_bound",
    "makespan_lower_bound",
    "one_f_one_b",
    "plan",
    "register_planner",
    "reroute",
    "retime",
    "validate",
]
