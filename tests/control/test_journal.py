"""What a coordinator writes down: the last whole line counts, and of two coordinators only the newer one can write."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_recycle.control.coordinator.journal import Journal, Process, SupersededError, default_path
from lightning_recycle.control.protocol.coordinator_restart import Kept, Over
from lightning_recycle.control.protocol.fault_attribution import Remembered
from lightning_recycle.control.protocol.messages import AfterStep, Answer, StopReason
from lightning_recycle.errors import ConfigurationError

KEY = b"the key of this test"
KEPT = Kept(
    3,
    (0, 1, 3),
    leader=1,
    joining=(3,),
    causes={2: "it died"},
    has_resumed=True,
    raised=(Remembered(0, 2, 0, (5, "F(0)"), 5),),
    disturbances=1,
    stop_point=7,
    stop_agreed=True,
    after_step=AfterStep.STOP,
)
HOLDERS = {rank: Process(f"token {rank}", 100 + rank, "a node", "a space", rank) for rank in (0, 1, 3)}


def test_the_next_coordinator_knows_what_the_one_before_wrote(tmp_path: Path) -> None:
    first = Journal(tmp_path / "state", KEY)
    assert (first.kept, first.epoch) == (None, 0)
    first.write(KEPT, {**HOLDERS, 2: Process("of a lost one", 1, "")})
    second = Journal(tmp_path / "state", KEY)
    assert (second.kept, second.epoch, second.run) == (KEPT, 1, first.run)
    assert second.processes == HOLDERS


def test_how_a_run_ended_is_known(tmp_path: Path) -> None:
    over = replace(KEPT, over=Over(StopReason.FINISHED, "", Answer(9, {0: True, 1: True, 3: False}, 1)))
    Journal(tmp_path / "state", KEY).write(over, HOLDERS)
    second = Journal(tmp_path / "state", KEY)
    assert second.kept == over
    second.begin((0,))
    third = Journal(tmp_path / "state", KEY)
    assert (third.kept, third.statuses) == (None, (0,))
    assert third.run != Journal(tmp_path / "other", KEY).run


@pytest.mark.parametrize("cut", [1, 8, 9, 40, 200])
def test_a_torn_last_line_does_not_count(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "state"
    first = Journal(path, KEY)
    first.write(KEPT, HOLDERS)
    before = path.read_bytes()
    first.write(replace(KEPT, generation=4), HOLDERS)
    path.write_bytes(path.read_bytes()[: len(before) + cut])
    second = Journal(path, KEY)
    assert second.kept == KEPT
    second.write(replace(KEPT, generation=5), HOLDERS)
    assert Journal(path, KEY).kept == replace(KEPT, generation=5)


def test_what_was_written_for_another_run_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    Journal(path, KEY).write(KEPT, HOLDERS)
    assert Journal(path, b"another key of a run").kept is None


def test_bytes_that_are_no_journal_are_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(os.urandom(5000))
    assert Journal(path, KEY).kept is None


def test_the_older_of_two_coordinators_can_write_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state"
    old = Journal(path, KEY)
    old.write(KEPT, HOLDERS)
    old.check()
    new = Journal(path, KEY)
    for attempt in (
        old.check,
        lambda: old.begin(()),
        lambda: old.write(replace(KEPT, generation=9), HOLDERS),
    ):
        with pytest.raises(SupersededError, match="another coordinator of this run"):
            attempt()
    new.write(replace(KEPT, generation=4), HOLDERS)


def test_a_file_that_a_cleaner_removed_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "state"
    path.parent.mkdir()
    journal = Journal(path, KEY)
    journal.write(KEPT, HOLDERS)
    path.unlink()
    path.parent.rmdir()
    journal.check()
    assert [found.name for found in path.parent.iterdir()] == ["state"]
    path.unlink()
    journal.write(replace(KEPT, generation=4), HOLDERS)
    path.unlink()
    journal.check()
    newer = Journal(path, KEY)
    assert (newer.kept, newer.epoch, newer.run) == (replace(KEPT, generation=4), 1, journal.run)
    with pytest.raises(SupersededError):
        journal.check()


def test_of_two_coordinators_the_one_whose_file_was_removed_gives_way(tmp_path: Path) -> None:
    path = tmp_path / "state"
    old = Journal(path, KEY)
    path.unlink()
    new = Journal(path, KEY)
    with pytest.raises(SupersededError):
        old.check()
    new.check()


def test_the_default_place_is_not_one_of_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_path(("host", 1)).parent == tmp_path / "state" / "lightning_recycle"


def test_neither_the_key_nor_anybody_elses_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    Journal(path, KEY).write(KEPT, HOLDERS)
    assert KEY not in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))  # no folder can be made there
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert default_path(("::1", 29400)).name == f"coordinator-{socket.gethostname()}-__1-29400.log"
    monkeypatch.setattr("os.getuid", lambda: 12345)
    (tmp_path / "lightning-recycle-12345").mkdir()
    with pytest.raises(ConfigurationError, match="belongs to somebody else"):
        default_path(("localhost", 29400))


def test_a_full_disk_leaves_nothing_that_could_be_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    journal = Journal(path, KEY)
    journal.write(KEPT, HOLDERS)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        journal.write(replace(KEPT, generation=4), HOLDERS)
    journal.write(replace(KEPT, generation=5), HOLDERS)  # the run goes on
    assert Journal(path, KEY).kept is None
