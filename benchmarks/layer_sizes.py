"""How much of the ideal whole blocks allow, and blocks whose attention and MLP are layers of their own.

    .venv/bin/python benchmarks/layer_sizes.py               # what loads allow, and what plans reach; two hours
    .venv/bin/python benchmarks/layer_sizes.py --bounds      # what loads allow; seconds

Three models on 32 GPUs, 1 to 12 of them lost, batches of 128 and 1,024: throughput over (live GPUs x bubble-free rate),
mean and least. *By load*: no schedule of any layout with one cut for all pipelines is faster. *Reached*: planned
schedules, by the policy ``Auto``, of whole layers and with layers that stages share, as in a run. With a batch of 128
the planner has the effort that it has in a run; with 1,024 an eighth of that, as elsewhere in the simulator.
"""

from __future__ import annotations

import argparse
import statistics

from rich.console import Console
from rich.table import Table
from same_schedule import MODELS, ideal

from lightning_recycle.planning.layouts.cuts import Stages, fastest, shares
from lightning_recycle.simulation import Auto, TrainingModel, get_model
from lightning_recycle.simulation.step_times import layer_costs

LOST = range(1, 13)
EFFORT = {128: 800_000, 1024: 100_000}  # operations that the planner plays


def cut_in(name: str, batch: int, layers_per_block: int) -> TrainingModel:
    """The model with that batch and as fast as with the usual one."""
    usual = get_model(name)
    return get_model(
        name, throughput=None, efficiency=usual.efficiency, global_batch=batch, layers_per_block=layers_per_block
    )


def by_load(model: TrainingModel) -> list[float]:
    """What the best cut for all pipelines reaches if nobody ever waits."""
    work = layer_costs(model).work(decoupled=True)
    table = shares(model.grid.global_microbatches, (1.0,) * model.pipelines)
    options = [[(count, table[count]) for count in range(1, model.pipelines + 1)]] * model.stages
    found = []
    for lost in LOST:
        workers = model.grid.num_workers - lost
        best = fastest(Stages(work, (0.0,) * len(work), options, workers))
        assert best is not None
        found.append(model.grid.global_microbatches * sum(work) / workers / best.bottleneck)
    return found


def shown(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f} {min(values):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bounds", action="store_true", help="only what loads allow")
    bounds = parser.parse_args().bounds
    table = Table(title="Fraction of ideal, mean and least over 1 to 12 of 32 lost", title_justify="left", box=None)
    for name in ("model", "batch", "layers", "by load", *(() if bounds else ("whole", "shared"))):
        table.add_column(name, no_wrap=True)
    for name in MODELS:
        for batch in (128, 1024):
            for parts, label in ((1, "blocks"), (2, "attention, MLP")):
                model = cut_in(name, batch, parts)
                cells = [shown(by_load(model))]
                if not bounds:
                    ways = ({"shares": False}, {})
                    cells += [
                        shown(ideal(model, Auto(checkpoint="memory", effort=EFFORT[batch], **way))) for way in ways
                    ]
                table.add_row(name, str(batch), label, *cells)
                print(name, batch, label, *cells, flush=True)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
