"""Draws running_example.svg: the schedules of design terms, three pipelines of four stages with one worker dead."""

from pathlib import Path

from lightning_recycle.planning import Costs, Grid, Problem, Technique, Worker, one_f_one_b, plan
from lightning_recycle.visualize import save_gantt

GRID, COSTS = Grid(3, 4, 6), Costs.uniform(4)
DEAD = frozenset({Worker(1, 2)})

if __name__ == "__main__":
    fault_free = one_f_one_b(Problem(GRID, COSTS, technique=Technique(split_backward=False, staggered=False)))
    rerouted = plan(Problem(GRID, COSTS, DEAD, Technique(split_backward=True, staggered=False)))
    save_gantt(
        Path(__file__).with_suffix(".svg"),
        [fault_free, rerouted],
        titles=[
            f"Fault-free 1F1B: {fault_free.period:g} slots",
            f"Worker (1, 2) dead, micro-batches re-routed, backward split: {rerouted.period:g} slots",
        ],
    )
