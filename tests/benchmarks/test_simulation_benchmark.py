"""The benchmark of the simulator can be started, and names all of its sections."""

import simulation


def test_every_section_is_named_where_users_look() -> None:
    usage = simulation.__doc__ or ""
    assert [name for name in simulation.SECTIONS if name not in usage] == []
