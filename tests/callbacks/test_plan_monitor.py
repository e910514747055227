"""The callback that keeps the plan up to date: what it refuses, and where its options go."""

import pytest

from lightning_recycle import ConfigurationError
from lightning_recycle.callbacks import PlanMonitor


@pytest.mark.parametrize(("options", "says"), [
    ({"threshold": 0.0}, r"PlanMonitor\(threshold=0\.0\).*0\.05"),
    ({"threshold": 1}, "fraction of a step"),
    ({"threshold": float("nan")}, "threshold=nan"),
    ({"threshold": True}, "threshold=True"),
    ({"window": 2}, r"window=2.*at least 3"),
    ({"window": 5.0}, r"window=5\.0"),
    ({"horizon_steps": 0}, r"horizon_steps=0.*at least 1"),
], ids=str)  # fmt: skip
def test_what_cannot_work_is_refused(options, says):
    with pytest.raises(ConfigurationError, match=says):
        PlanMonitor(**options)
