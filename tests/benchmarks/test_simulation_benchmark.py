"""The benchmark of the simulator can be started, names all of its sections, and computes the smallest."""

import simulation

from lightning_recycle.planning import Grid, Worker


def test_every_section_is_named_where_users_look():
    usage = simulation.__doc__ or ""
    assert [name for name in simulation.SECTIONS if name not in usage] == []


def test_the_ablation_of_the_running_example():
    assert simulation.ablation(Grid(3, 4, 6), Worker(1, 2), effort=0) == [27, 21, 36, 29, 27]
