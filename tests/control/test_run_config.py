"""What a run is to be: the coordinator's command line, and for the rest the script of its workers."""

import contextlib
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest
from control_plane import KEY, listening, together
from support.thread_client import ThreadClient
from support.waiting import PATIENCE, wait_for

from lightning_recycle.arguments import shared_options
from lightning_recycle.control.coordinator import standalone
from lightning_recycle.control.coordinator.admission import Reception
from lightning_recycle.control.options import GROUPS, RecoveryOptions, Settings, VerificationOptions, difference, settle
from lightning_recycle.control.plans.drift import DriftOptions
from lightning_recycle.control.protocol.messages import RunRequest
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning.grid import Grid

WANTS = RunRequest("fit", Grid(2, 2, 6), microbatches_given=True)
OTHERS: dict[str, Any] = {
    "planning.planner": "cbc", "planning.split_backward": False, "planning.staggered": False,
    "planning.memory": "3 micro-batches", "planning.activation_checkpointing": "never", "recovery.rebalance": "never",
    "recovery.start_timeout": 30.0, "recovery.min_pipelines": 1, "recovery.machine_error_retries": 0,
    "verification.on_corruption": "raise", "verification.checksum_every": 7, "verification.verify": 0.01,
    "heartbeat.timeout": 2.0, "heartbeat.last_holder_timeout": 60.0, "heartbeat.coordinator_timeout": 20.0,
    "monitor.threshold": 0.1, "monitor.window": 10, "monitor.horizon_steps": 100,
}  # fmt: skip
"""Another value of everything that a script may want, besides the grid and the entry point."""


def wanting(**changes: Any) -> RunRequest:
    """A request with changed settings, whose names have "__" for the dot."""
    return replace(WANTS, settings={name.replace("__", "."): value for name, value in changes.items()})


def test_every_option_that_workers_must_agree_on_has_another_value_here():
    shared = [(name, item.name) for name, (kind, _) in GROUPS.items() for item in shared_options(kind)]
    assert list(OTHERS) == [f"{group}.{name}" for group, name in shared]


def test_the_script_says_what_the_command_line_leaves_open():
    wants = replace(WANTS, settings={**OTHERS, "planning.planner": "heuristic"})
    terms = settle({}, wants)
    assert terms.wants == wants
    assert terms.overruled == ()
    options = terms.options()
    assert (options.heartbeat.timeout, options.heartbeat.last_holder_timeout) == (2.0, 60.0)
    assert options.heartbeat.coordinator_timeout == 20.0
    expected = RecoveryOptions(rebalance="never", start_timeout=30.0, min_pipelines=1, machine_error_retries=0)
    assert options.recovery == expected
    assert options.verification == VerificationOptions("raise", 7, 0.01)
    assert options.drift == DriftOptions(0.1, 10, 100)


@pytest.mark.parametrize(("options", "wants", "refused", "remedy"), [
    (["--started=2", "--invitation=Join.", "--alone"], WANTS, True, "--nproc-per-node 4, {}. Join."),
    (["--started=2", "--invitation=Join."], WANTS, False, "--nproc-per-node 4, {}. Join."),
    (["--started=2"], WANTS, False, "srun --ntasks=4, {}."),
    (["--started=2", "--alone"], wanting(recovery__min_pipelines=1), False, ""),
    (["--started=4", "--alone"], WANTS, False, ""),
    ([], WANTS, False, ""),
])  # fmt: skip
def test_too_few_workers_of_recycle_run_are_refused_where_no_others_can_join(options, wants, refused, remedy, caplog):
    parsed = standalone._parser().parse_args(["--listen", "h:1", *options])
    expected = "The script needs 4 workers, and recycle-run has started 2: give " if remedy else ""
    expected += remedy.format("or the script fewer devices")
    with pytest.raises(ConfigurationError) if refused else contextlib.nullcontext() as caught:
        standalone._check_started(parsed, settle({}, wants))
    assert (str(caught.value) if refused else caplog.text.strip()).endswith(expected)
    assert bool(caplog.messages) == (bool(remedy) and not refused)


def test_the_command_line_counts_and_a_contradiction_is_said():
    given: Settings = {"heartbeat.timeout": 7.0, "planning.staggered": False, "planning.planner": "heuristic"}
    terms = settle(given, wanting(heartbeat__timeout=2.0))
    assert terms.options().heartbeat.timeout == 7.0
    assert not terms.planning.technique.staggered
    said = " ".join(terms.overruled)
    assert "HeartbeatCallback(timeout=...) is 2.0 in the script, and 7.0 by the command line" in said
    assert "staggered" in said
    assert "planner" not in said


@pytest.mark.parametrize(("given", "wants", "words"), [
    ({"recovery.min_pipelines": 3}, WANTS, "the run has 2 pipelines: give at most that many"),
    ({}, wanting(planning__memory="much"), "memory='much'"),
    ({}, wanting(planning__planner="crystal ball"), "crystal ball"),
    ({}, wanting(heartbeat__timeout=float("nan")), r"timeout=nan\): give a number of seconds"),
    ({}, wanting(planning__memory="0 micro-batches"), "memory='0 micro-batches'"),
    ({}, wanting(planning__partition="count"), "no setting 'planning.partition'"),
    ({"verification.on_corruption": "forgive"}, WANTS, "on_corruption='forgive'"),
    ({"verification.verify": 2.0}, WANTS, "verify=2.0"),
    ({}, wanting(verification__checksum_every=-1), "checksum_every=-1"),
    ({}, replace(WANTS, grid=Grid(10**9, 10**9, 1)), "more than"),
    ({}, replace(WANTS, needs_launcher=("PlanningOptions(profile='auto')",)),
     r"\(profile='auto'\) needs a launching process"),
    ({}, None, "says nothing of its run"),
])  # fmt: skip
def test_what_cannot_be_is_an_error_that_says_why(given, wants, words):
    with pytest.raises(ConfigurationError, match=words):
        settle(given, wants)


CUDA, CPU = (replace(WANTS, device=device) for device in ("cuda", "cpu"))
OPEN = replace(WANTS, grid=Grid(2, 2, 4), microbatches_given=False)


@pytest.mark.parametrize(("given", "first", "other", "why"), [
    ({}, WANTS, WANTS, None),
    ({}, WANTS, None, None),
    ({}, CUDA, CUDA, None),
    ({}, CUDA, CPU, "This worker computes on 'cpu', the run on 'cuda'"),
    ({}, WANTS, CPU, None),  # nobody says on what the run computes
    ({}, WANTS, OPEN, None),  # it takes the micro-batches of the run
    ({}, WANTS, replace(OPEN, microbatches_given=True), "start all workers with the same script"),
    ({}, WANTS, replace(WANTS, grid=Grid(4, 1, 6)), "start all workers with the same script"),
    ({"heartbeat.timeout": 7.0}, WANTS, wanting(heartbeat__timeout=2.0), None),
    *(({}, WANTS, replace(WANTS, settings={name: value}), f"{value!r} in this script")
      for name, value in OTHERS.items()),
])  # fmt: skip
def test_a_worker_that_wants_something_else_than_the_run_is_told_what(given, first, other, why):
    unfit = difference(given, settle(given, first), other)
    if why is None:
        assert unfit is None
    else:
        assert why in unfit.why
        assert not unfit.late


def test_a_worker_that_is_elsewhere_in_its_script_is_late():
    assert difference({}, settle({}, WANTS), replace(WANTS, entry="validate")).late


# ---------------------------------------------------------------------- the command


def client(address: tuple[str, int], wants: RunRequest | None) -> ThreadClient:
    return ThreadClient(None, address, KEY.encode(), 0.05, wants=wants)


def test_the_first_worker_says_what_the_run_is_and_others_that_differ_are_refused():
    with listening("--runs", "1") as (process, address):
        other = replace(WANTS, grid=Grid(1, 1, 6))
        clients = [client(address, WANTS) for _ in range(3)]
        assert sorted(found.rank for found in together(*(c.await_assignment for c in clients))) == [0, 1, 2]
        refused = client(address, other)
        with pytest.raises(ConfigurationError, match="start all workers with the same script"):
            refused.await_assignment()
        clients.append(client(address, WANTS))
        assert clients[-1].await_assignment().grid == Grid(2, 2, 6)
        assert process.poll() is None
        for found in [*clients, refused]:
            found.leave()
        process.kill()
        assert all(found.exited.wait(PATIENCE) for found in clients)


def test_a_run_whose_workers_all_went_before_it_began_was_none():
    """Somebody started the wrong script, or with wrong options, and starts the right one now."""
    with listening("--runs", "1") as (process, address):
        wrong = client(address, replace(WANTS, grid=Grid(2, 1, 6)))
        assert wrong.await_assignment().rank == 0
        wrong.leave()
        wrong._connection.close()
        assert wrong.exited.wait(PATIENCE)
        assert wait_for(lambda: _takes(address), PATIENCE)
        assert process.poll() is None


def _takes(address: tuple[str, int]) -> bool:
    right = client(address, WANTS)
    try:
        return right.await_assignment().grid == WANTS.grid
    except ConfigurationError:  # the other run has not been given up yet
        return False
    finally:
        right.leave()
        right._connection.close()


def test_after_the_last_run_who_comes_too_late_is_told_that_it_finished():
    reception = Reception(("127.0.0.1", 0), KEY.encode(), workers=4)
    reception.listener.start()
    reception.is_over = True
    threading.Thread(target=reception.await_first, daemon=True).start()
    late = client(reception.listener.address, WANTS)
    assert late.exited.wait(PATIENCE)
    assert late.exit_code == 0


def test_a_run_that_has_not_finished_is_not_said_to_have():
    """Some worker may end well without having trained at all."""
    with listening() as (process, address):
        process.send_signal(signal.SIGUSR1)
        found = client(address, WANTS)
        assert found.await_assignment().rank == 0
        found.leave()
