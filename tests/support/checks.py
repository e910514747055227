"""Which computations workers check in a step."""

from lightning_recycle.planning.program import WorkerChecks
from support.models import GLOBAL_MICROBATCHES


def checked_microbatch(step: int, pipelines: int) -> int:
    """The number of the micro-batch that each worker is checked on in ``step``, with ``verify=1.0`` and nobody lost."""
    count = GLOBAL_MICROBATCHES // pipelines
    drawn = WorkerChecks((0, 1), 1, (), (0,) * count).drawn(step)
    assert drawn is not None
    return drawn
