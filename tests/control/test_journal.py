"""Journal of a coordinator: what the next one knows, and that there is only one at a time."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.waiting import next_line

from lightning_recycle.control import journal as journal_module
from lightning_recycle.control.journal import Journal, JournaledState, Over, default_path
from lightning_recycle.control.protocol.messages import AfterStep, Answer, Process, StopReason
from lightning_recycle.control.protocol.state import Faults, Remembered, Roster, StopRound
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.processes import process_space

KEY = b"the key of this test"
KEPT = JournaledState(
    3,
    Roster(frozenset({0, 1, 3}), leader=1, joining=frozenset({3}), dismissed={2: (4, 5)}, causes={2: "it died"}),
    has_resumed=True,
    faults=Faults(2, (Remembered(0, 2, 0, (5, "F(0)"), 5),), disturbances=1),
    stop_round=StopRound(7, is_over=True, agreed=True),
    after_step=AfterStep.STOP,
    cuts=(0, 1.5, 4),
)
HOLDERS = {rank: Process(f"token {rank}", 100 + rank, "a node", "a space", rank) for rank in (0, 1, 3)}


def test_the_next_coordinator_knows_what_the_one_before_wrote(tmp_path: Path) -> None:
    first = Journal(tmp_path / "state", KEY)
    assert (first.kept, first.is_continued) == (None, False)
    first.write(KEPT, {**HOLDERS, 2: Process("of a lost one", 1, "")})
    second = Journal(tmp_path / "state", KEY)
    assert (second.kept, second.is_continued, second.run) == (KEPT, True, first.run)
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


@pytest.mark.parametrize("lives", [False, True])
def test_the_file_stays_only_while_a_worker_lives_that_could_go_on(tmp_path: Path, lives: bool) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    pids = {0: ended.pid, 1: ended.pid, 3: os.getpid() if lives else ended.pid}
    journal = Journal(tmp_path / "state", KEY)
    journal.write(KEPT, {rank: Process("token", pid, "a node", process_space()) for rank, pid in pids.items()})
    journal.leave()
    assert (tmp_path / "state").exists() == lives


def test_a_file_that_was_removed_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "state"
    journal = Journal(path, KEY)
    path.unlink()
    journal.write(KEPT, HOLDERS)
    assert (Journal(path, KEY).kept, Journal(path, KEY).run) == (KEPT, journal.run)


def test_what_was_written_for_another_run_or_is_no_journal_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    Journal(path, KEY).write(KEPT, HOLDERS)
    assert Journal(path, b"another key of a run").kept is None
    path.write_bytes(os.urandom(5000))
    assert Journal(path, KEY).kept is None


_HOLDER = """
import sys, time
from pathlib import Path
from lightning_recycle.control.journal import Journal
Journal(Path(sys.argv[1]), b"the key of this test")
print("has it", flush=True)
time.sleep(600)
"""


def test_a_second_coordinator_is_refused_while_the_first_one_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(path)], stdout=subprocess.PIPE)
    try:
        next_line(holder)
        holder.send_signal(signal.SIGSTOP)  # it may wake up at any time
        with monkeypatch.context() as patch:
            patch.setattr(journal_module, "_LOCK_SECONDS", 0.1)
            with pytest.raises(ConfigurationError, match="another coordinator has this file, and lives"):
                Journal(path, KEY)
    finally:
        holder.kill()
        holder.communicate()
    assert Journal(path, KEY).is_continued


def test_the_default_place_is_the_users_folder_for_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    expected = tmp_path / "lightning_recycle" / f"coordinator-{socket.gethostname()}-__1-29400.json"
    assert default_path(("::1", 29400)) == expected
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))  # no folder can be made there
    with pytest.raises(ConfigurationError, match="Give --state another file, or --state none"):
        default_path(("localhost", 29400))


def test_the_key_is_not_in_the_file_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    Journal(path, KEY).write(KEPT, HOLDERS)
    assert KEY not in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_leaves_nothing_that_could_be_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    journal = Journal(path, KEY)
    journal.write(KEPT, HOLDERS)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        journal.write(replace(KEPT, generation=4), HOLDERS)
    journal.write(replace(KEPT, generation=5), HOLDERS)  # the run goes on
    assert [found.name for found in tmp_path.iterdir()] == ["state.lock"]
    assert Journal(path, KEY).kept is None
