import pytest
from silent_corruption import TARGETS, cases, false_alarms, places


def test_devices_that_err_are_found_and_nobody_else() -> None:
    assert cases(2 * len(TARGETS))
    assert false_alarms(10)


def test_the_table_of_places_has_all_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    places()
    printed = capsys.readouterr().out
    assert printed.count("1F1B") == printed.count("decoupled") == 4
