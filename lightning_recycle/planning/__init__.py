"""Planning: from a grid, its costs and its failures to a schedule; without torch.

>>> from lightning_recycle.planning import Costs, Grid, Problem, Worker, plan
>>> problem = Problem(Grid(3, 4, 6), Costs.uniform(4), failed=frozenset({Worker(1, 2)}))
>>> plan(problem).period
27.0
"""

from lightning_recycle.planning.costs import Costs as Costs
from lightning_recycle.planning.costs import Memory as Memory
from lightning_recycle.planning.costs import Profile as Profile
from lightning_recycle.planning.costs import StageProfile as StageProfile
from lightning_recycle.planning.costs import load_profile as load_profile
from lightning_recycle.planning.costs import save_profile as save_profile
from lightning_recycle.planning.exact_planner import ExactPlanner as ExactPlanner
from lightning_recycle.planning.failure_distribution import normalize as normalize
from lightning_recycle.planning.failure_distribution import normalized_failures as normalized_failures
from lightning_recycle.planning.failure_distribution import normalized_problem as normalized_problem
from lightning_recycle.planning.failure_distribution import roles as roles
from lightning_recycle.planning.grid import Grid as Grid
from lightning_recycle.planning.grid import Microbatch as Microbatch
from lightning_recycle.planning.grid import Op as Op
from lightning_recycle.planning.grid import OpKind as OpKind
from lightning_recycle.planning.grid import ScheduledOp as ScheduledOp
from lightning_recycle.planning.grid import Worker as Worker
from lightning_recycle.planning.heuristic_planner import HeuristicPlanner as HeuristicPlanner
from lightning_recycle.planning.heuristic_planner import heuristic as heuristic
from lightning_recycle.planning.layer_cuts import LayerCosts as LayerCosts
from lightning_recycle.planning.layer_cuts import even_cuts as even_cuts
from lightning_recycle.planning.layouts import FailureRecord as FailureRecord
from lightning_recycle.planning.layouts import LayoutPlan as LayoutPlan
from lightning_recycle.planning.layouts import plan_layout as plan_layout
from lightning_recycle.planning.list_scheduling import one_f_one_b as one_f_one_b
from lightning_recycle.planning.plan_library import PlanLibrary as PlanLibrary
from lightning_recycle.planning.plan_library import load_plan as load_plan
from lightning_recycle.planning.plan_library import plan_to_json as plan_to_json
from lightning_recycle.planning.plan_library import read_plan as read_plan
from lightning_recycle.planning.plan_library import save_plan as save_plan
from lightning_recycle.planning.planner import Planner as Planner
from lightning_recycle.planning.planner import available_planners as available_planners
from lightning_recycle.planning.planner import get_planner as get_planner
from lightning_recycle.planning.planner import plan as plan
from lightning_recycle.planning.planner import register_planner as register_planner
from lightning_recycle.planning.planner import solve as solve
from lightning_recycle.planning.problem import Problem as Problem
from lightning_recycle.planning.problem import Technique as Technique
from lightning_recycle.planning.problem import distribution_of as distribution_of
from lightning_recycle.planning.problem import lower_bound as lower_bound
from lightning_recycle.planning.problem import makespan_lower_bound as makespan_lower_bound
from lightning_recycle.planning.routing import reroute as reroute
from lightning_recycle.planning.schedule import PlanResult as PlanResult
from lightning_recycle.planning.schedule import Schedule as Schedule
from lightning_recycle.planning.timing import retime as retime
from lightning_recycle.planning.validation import InvalidScheduleError as InvalidScheduleError
from lightning_recycle.planning.validation import validate as validate
