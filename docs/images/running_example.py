"""Draws running_example.svg: three pipelines of four stages, without failures and with one worker dead."""

from pathlib import Path

from lightning_recycle.planning import Costs, Grid, Problem, Technique, Worker, one_f_one_b, plan
from lightning_recycle.visualize import save_gantt

GRID, COSTS = Grid(3, 4, 6), Costs.uniform(4)
DEAD = frozenset({Worker(1, 2)})

if __name__ == "__main__":
    usual = one_f_one_b(Problem(GRID, COSTS, technique=Technique(split_backward=False, staggered=False)))
    fault_free, rerouted = plan(Problem(GRID, COSTS)), plan(Problem(GRID, COSTS, DEAD))
    save_gantt(
        Path(__file__).with_suffix(".svg"),
        [fault_free, rerouted],
        titles=[
            f"Without failures: a step every {fault_free.period:g} slots (with the usual 1F1B: {usual.period:g})",
            f"Worker (1, 2) dead, its micro-batches re-routed: a step every {rerouted.period:g} slots",
        ],
    )
