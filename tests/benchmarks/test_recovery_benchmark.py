import random

import pytest
from overhead import MICROBATCHES, PIPELINES, STAGES, Size
from recovery import random_fault, run

from lightning_recycle.callbacks import FaultInjectionCallback
from lightning_recycle.planning import Grid
from lightning_recycle.planning.grid import Positions

SIZE = Size("test", width=16, blocks=1, heads=2, context=8, batch_size=4, steps_per_turn=1)


def test_random_faults_fit_the_grid_and_depend_on_the_seed_only():
    faults = [random_fault(random.Random(seed)) for seed in range(50)]
    FaultInjectionCallback(faults).check(Positions(Grid(PIPELINES, STAGES, MICROBATCHES)))
    assert faults == [random_fault(random.Random(seed)) for seed in range(50)]
    assert {(f.pipeline, f.stage) for f in faults} == {(d, s) for d in range(PIPELINES) for s in range(STAGES)}


@pytest.mark.long
def test_a_kill_is_taken_apart():
    recovery = run(SIZE, random_fault(random.Random(3)))
    parts = (recovery.detect, recovery.agree, recovery.regroup, recovery.redo)
    assert all(part > 0 for part in parts)
    assert recovery.total == sum(parts)
    assert recovery.step_after > 0
