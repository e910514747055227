"""Analytic lower bounds of period and makespan: what no schedule can beat.

Concept: consider one stage alone. Its busiest worker must do its share of the micro-batches (*load*), cannot begin
before the first micro-batch has come through the earlier stages (*head*), has nothing but forwards to do until the
first gradient comes back from the later stages (*round trip*), and after its last work the iteration needs at least a
*tail*.

Contract: valid for every schedule that the validator accepts, whatever the routing; exact in many cases (without
memory limit it is tight for the decoupled running example), never above the optimum.

Must not know: any scheduler.
"""

from __future__ import annotations

from lightning_recycle.planning.problem import Problem

__all__ = ["lower_bound", "makespan_lower_bound"]


def lower_bound(problem: Problem) -> float:
    """A lower bound of the period, in the unit of the costs."""
    if not problem.technique.staggered:
        return makespan_lower_bound(problem)
    costs = problem.costs
    return max(
        _span(problem, stage) + costs.reduce[stage] + costs.optimizer[stage] for stage in range(problem.grid.stages)
    )


def makespan_lower_bound(problem: Problem) -> float:
    """A lower bound of the makespan of one iteration, in the unit of the costs."""
    costs, comm = problem.costs, problem.costs.communication
    best = 0.0
    for stage in range(problem.grid.stages):
        head = sum(costs.forward[:stage]) + stage * comm
        span = _span(problem, stage)
        to_first_stage = sum(costs.backward_input[:stage]) + stage * comm
        if problem.technique.decoupled:
            # The last operation may be a W, but the last B comes with all F and B done, and stage 0 still needs its W.
            deferrable = _share(problem, stage) * costs.backward_weight[stage]
            to_end = span - deferrable + to_first_stage + (costs.backward_weight[0] if stage else deferrable)
        else:
            to_end = span + to_first_stage + sum(costs.backward_weight[:stage])
        best = max(
            best,
            head + to_end + costs.reduce[0] + costs.optimizer[0],
            head + span + costs.reduce[stage] + costs.optimizer[stage],
        )
    return best


def _share(problem: Problem, stage: int) -> int:
    """Micro-batches of the busiest worker of ``stage``, at best."""
    return -(-problem.grid.global_microbatches // len(problem.live_workers(stage)))


def _span(problem: Problem, stage: int) -> float:
    """At least from the first F to the last W or BW of the busiest worker of ``stage``."""
    costs, share = problem.costs, _share(problem, stage)
    forward, backward, weight = costs.forward[stage], costs.backward_input[stage], costs.backward_weight[stage]
    later = range(stage + 1, problem.grid.stages)
    round_trip = sum(costs.forward[s] + costs.backward_input[s] for s in later) + 2 * len(later) * costs.communication
    if not problem.technique.decoupled:
        round_trip += sum(costs.backward_weight[s] for s in later)
    window = share if problem.in_flight_limit is None else min(share, problem.in_flight_limit[stage])
    # Until the first gradient returns a worker can only run forwards, no more than fit into memory.
    idle = max(0.0, round_trip - (window - 1) * forward)
    load = share * (forward + backward + weight)
    # Each micro-batch is held at least for its own work and the round trip; at most `window` are held at once.
    held = share * (forward + round_trip + backward + weight) / window
    return max(load + idle, held)
