"""What Lightning offers beside its Trainer is refused by name; the Tuner's refusals are tested in tests/parity."""

import pytest
from lightning.fabric import Fabric

from lightning_recycle import ReCycleStrategy


@pytest.mark.parametrize("strategy", ["recycle", ReCycleStrategy()])
def test_fabric(strategy):
    with pytest.raises(ValueError, match=r"invalid strategy name: `strategy='?(recycle|ReCycleStrategy)"):
        Fabric(accelerator="cpu", devices=2, strategy=strategy)
