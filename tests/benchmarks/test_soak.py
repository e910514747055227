import pytest
from soak import measure

pytestmark = pytest.mark.long


@pytest.mark.long
def test_processes_are_measured_while_they_train():
    samples, events = measure(steps=100, mtbf=1e6, seed=1, interval=0.1)
    assert events["step"] == 100
    workers = [sample.worker for sample in samples if sample.worker is not None]
    assert workers
    for held in (workers, [sample.launcher for sample in samples]):  # a process that begins or ends has less
        assert max(each.memory for each in held) > 50
        assert max(each.descriptors for each in held) > 3
