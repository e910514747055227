"""Random outages and small models for the property tests of the simulator."""

from functools import lru_cache

from hypothesis import strategies as st

from lightning_recycle import simulation

DURATION = 2000.0
GRIDS = [(1, 2), (2, 2), (3, 2), (3, 4), (4, 3)]


@lru_cache
def small_model(pipelines: int, stages: int, **settings: float) -> simulation.TrainingModel:
    """A model whose steps take a few seconds."""
    speed = {"global_batch": pipelines * 4, "throughput": pipelines * 1.7, **settings}
    return simulation.TrainingModel("small", simulation.Transformer(6, 512, 8, 512), pipelines, stages, **speed)


def moments() -> st.SearchStrategy[float]:
    """Anywhere, or in bursts, so that failures and repairs meet within a step, a pause or a checkpoint."""
    bursts = st.builds(sum, st.tuples(st.sampled_from([0.0, 500.0, 530.0, 1500.0]), st.floats(0.0, 9.0)))
    return (st.floats(0.0, DURATION, allow_nan=False) | bursts).map(lambda time: round(time, 3))


def lengths() -> st.SearchStrategy[float | None]:
    """Short, long, or for good."""
    finite = st.floats(0.5, 800.0) | st.floats(0.5, 9.0)
    return st.none() | finite.map(lambda time: round(time, 3))


@st.composite
def outages(draw, nodes: int) -> list[simulation.Outage]:
    """Up to eight, each of some nodes."""
    found = []
    for _ in range(draw(st.integers(0, 8))):
        begin, length = draw(moments()), draw(lengths())
        hit = draw(st.lists(st.integers(0, nodes - 1), min_size=1, max_size=nodes, unique=True))
        found.append(simulation.Outage(begin, tuple(hit), None if length is None else begin + length))
    return found
