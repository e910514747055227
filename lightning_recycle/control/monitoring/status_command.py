"""``recycle-status``: a run in the terminal.

    recycle-status                    # the runs of this user on this machine
    recycle-status 4242               # of the process with this id
    recycle-status 10.0.0.1:8265      # of the coordinator with --http 10.0.0.1:8265
    recycle-status --watch            # again every second, until the run is over
    recycle-status --json | jq .step

Exit status: 0, or 1 if there is no such run, or 2 for bad options. Needs neither torch nor Lightning.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_recycle.arguments import SECONDS, command_parser, exit_without_reader, flag_value
from lightning_recycle.control.network.addresses_and_keys import connect_to, sockets
from lightning_recycle.errors import ConfigurationError, counted

_SECONDS = 5.0  # for an answer
_MOST_BYTES = 64 << 20
_MOST_COLUMNS = 1000  # where the output is not a terminal
_MOST_ROWS = 64  # of positions; beyond, those that train are one row
_COLORS = {"live": "green", "starting": "blue", "joining": "cyan", "suspected": "yellow", "lost": "red"}
_PHASES = {"training": "green", "starting": "blue", "recovering": "red", "joining": "cyan", "over": "dim"}


class NoRun(Exception):
    """There is nothing to show; the message says why."""


class Idle(NoRun):
    """No run is going on there: its workers are starting, or it has ended."""


class Busy(NoRun):
    """The process does not answer in time."""


@dataclass(frozen=True)
class _Target:
    """Target of a question: the socket of a run of this machine, or an address."""

    path: Path | None = None
    address: tuple[str, int] = ("", 0)

    def __str__(self) -> str:
        if self.path is not None:
            return f"process {self.path.name.partition('-')[0]}"
        return f"http://{self.address[0]}:{self.address[1]}/"

    def ask(self) -> dict[str, Any]:
        """The status; raises NoRun if there is no answer."""
        connection = http.client.HTTPConnection(*self.address, timeout=_SECONDS)
        try:
            if self.path is not None:
                connection = http.client.HTTPConnection("localhost", timeout=_SECONDS)
                connection.sock = connect_to(self.path)
            connection.request("GET", "/status")
            response = connection.getresponse()
            content = response.read(_MOST_BYTES)
        except FileNotFoundError as error:
            raise NoRun(f"{self}: its run has just ended.") from error
        except TimeoutError as error:
            raise Busy(f"{self} does not answer: {error or type(error).__name__}") from error
        except (OSError, http.client.HTTPException) as error:
            hint = ": was the run started with --http or RECYCLE_HTTP?" if self.path is None else ""
            reason = getattr(error, "strerror", None) or error or type(error).__name__
            raise NoRun(f"{self} does not answer ({reason}){hint}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise Idle(f"{self}: {_printable(content.decode(errors='replace').strip())}")
        try:
            found = json.loads(content)
            assert found["schema"] >= 1
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise NoRun(f"{self} is not a coordinator: it answers something else.") from error
        if found["schema"] > 1:
            raise NoRun(f"{self} runs a newer version ({found.get('version')}): use the recycle-status of that one.")
        return dict(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        seconds = None if options.watch is None else _seconds(options.watch)
        targets = _targets(options.address)
        if seconds is not None and not targets:
            print("recycle-status: waiting for a run of this user on this machine", file=sys.stderr)
            while not (targets := _targets(None)):
                time.sleep(seconds)
        if seconds is not None and len(targets) > 1:
            ids = ", ".join(target.path.name.partition("-")[0] for target in targets if target.path is not None)
            raise ConfigurationError(f"--watch shows one run, and there are {len(targets)}: give one of the ids {ids}.")
        if not targets:
            raise NoRun(
                "no run of this user on this machine. For a coordinator elsewhere, with --http HOST:PORT, give"
                " its address: recycle-status HOST:PORT."
            )
        as_json = options.json
        status = _show_each(targets, as_json) if seconds is None else _watch(targets[0], seconds, as_json)
        sys.stdout.flush()
        return status
    except (NoRun, ConfigurationError) as error:
        print(f"recycle-status: {error}", file=sys.stderr)
        return 1 if isinstance(error, NoRun) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        exit_without_reader()


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "recycle-status",
        "Show the state of a run: workers, plan, steps, failures.",
        "recycle-status",
        "recycle-status 10.0.0.1:8080 --watch",
        "recycle-status 10.0.0.1:8080 --json",
        statuses={0: "a run is shown", 1: "none is: there is no such run, it has not begun, or it does not answer"},
    )
    parser.add_argument(
        "address",
        nargs="?",
        metavar="ADDRESS",
        help="host:port of a coordinator's --http, or the id of a launching process or coordinator of this machine",
    )
    parser.add_argument("--json", action="store_true", help="the whole status as one line of JSON")
    parser.add_argument(
        "--watch",
        nargs="?",
        const="1",
        metavar="SECONDS",
        help="repeat until the run is over, every second by default",
    )
    return parser


def _seconds(text: str) -> float:
    if ":" in text:
        raise ConfigurationError(f"--watch {text}: give the address before it: recycle-status {text} --watch.")
    if any(path.name.partition("-")[0] == text for path in sockets()):
        raise ConfigurationError(f"--watch {text}: give the process before it: recycle-status {text} --watch.")
    return float(flag_value("--watch", text, SECONDS))


def _targets(address: str | None) -> list[_Target]:
    if address is None:
        return [_Target(path) for path in sockets()]
    if address.isdigit():
        found = [_Target(path) for path in sockets() if path.name.partition("-")[0] == address]
        if not found:
            port = f" For a port, give localhost:{address}." if int(address) <= 65535 else ""
            raise NoRun(f"no run in process {address} on this machine.{port}")
        return found
    if address.startswith("/"):
        return [_Target(Path(address))]
    host, colon, port = address.removeprefix("http://").rstrip("/").rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"{address!r} is not an address: give host:port, or a process id of this machine.")
    return [_Target(address=(host.strip("[]") or "localhost", int(port)))]


# ---------------------------------------------------------------------- what is printed


def _show_each(targets: Sequence[_Target], as_json: bool) -> int:
    """Shows the runs that answer, one below the other; returns the exit status."""
    shown = 0
    for target in targets:
        try:
            status = target.ask()
        except NoRun as error:  # it ended meanwhile, or is between two runs
            print(f"recycle-status: {error}", file=sys.stderr)
            continue
        if len(targets) > 1 and not as_json:
            print(f"process {status['coordinator']['pid']}")
        _show(status, as_json)
        shown += 1
    return 0 if shown else 1


def _show(status: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(status), flush=True)
        return
    _print(_render(status))


def _print(renderable: Any) -> None:
    """Prints to the terminal; to a pipe or a file, in lines of any length."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(renderable)
        return
    unfolded = Console(width=_MOST_COLUMNS)
    with unfolded.capture() as captured:
        unfolded.print(renderable)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def _watch(target: _Target, seconds: float, as_json: bool) -> int:
    from rich.console import Console
    from rich.live import Live

    status, console = _await_status(target, seconds, (Idle, Busy)), Console()
    with contextlib.ExitStack() as stack:
        live: Live | None = None
        if console.is_terminal and not as_json:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        while True:
            if live is None:
                _show(status, as_json)
            else:
                live.update(_render(status), refresh=True)
            time.sleep(seconds)
            try:
                status = _await_status(target, seconds, (Busy,))
            except NoRun:
                break
            if live is None and not as_json:
                print()
    if not as_json:
        print("The run is over.")
    return 0


def _await_status(target: _Target, seconds: float, passing: tuple[type[NoRun], ...]) -> dict[str, Any]:
    """The status; asks again every ``seconds`` after errors of ``passing``."""
    is_told = False
    while True:
        try:
            return target.ask()
        except passing as error:
            if not is_told:
                print(f"recycle-status: {str(error).rstrip('.')}; asking again", file=sys.stderr)
            is_told = True
        time.sleep(seconds)


def _summary_line(status: Mapping[str, Any]) -> Any:
    """One line about the whole run."""
    from rich.text import Text

    head = Text()
    head.append(_printable(status["name"]) or "run", "bold")
    head.append(f"  {_grid(status)}  ")
    head.append(status["outcome"] or status["phase"], _PHASES.get(status["phase"], ""))
    head.append(f"  generation {status['generation']}  step {_step(status['step'])}")
    if status["loss"] is not None:
        head.append(f"  loss {status['loss']:.4g}")
    head.append(f"  {_workers(status)}  since {_duration(status['time'] - status['began'])}")
    return head


def _render(status: Mapping[str, Any]) -> Any:
    from rich.console import Group
    from rich.text import Text

    speed, plan, now = status["throughput"], status["plan"], status["time"]
    lines: list[Any] = [_summary_line(status)]
    if speed["steps_per_second"]:
        text = f"{speed['steps_per_second']:.4g} steps/s"
        if speed["samples_per_second"] is not None:
            text += f", {speed['samples_per_second']:,.4g} samples/s"
        if speed["predicted_step_seconds"]:
            text += f"; {1 / speed['predicted_step_seconds']:.4g} by the plan, without data, hooks and logging"
        lines.append(Text(f"speed   {text}"))
    if plan is not None:
        lines.append(Text(f"plan    {_printable(plan['found_by'])}, {', '.join(plan['techniques']) or 'plain'}"))
    if shares := list(_shares(status["worker_seconds"])):
        lines.append(Text("time    " + ", ".join(shares)))
    lines += [Text(), _positions(status)]
    if status["spares"]:
        lines.append(Text(f"{len(status['spares'])} spare: {', '.join(map(_process, status['spares']))}"))
    counts = status["counts"]
    if counts["failures"]:
        names = {"failures": "failure", "redone_steps": "redone step", "rejoined_workers": "replacement"}
        sums = [counted(counts[key], name) for key, name in names.items()]
        lines += [Text(), Text(f"{', '.join(sums)}; {status['recovery_seconds']:.1f} s to recover")]
    for failure in reversed(status["failures"][-3:]):
        who = f"worker {tuple(failure['worker'])}" if failure["worker"] else "a worker"
        text = f"{_duration(now - failure['time'])} ago: {who} ({_process(failure)}): {failure['details'].get('cause')}"
        lines.append(Text("  " + _printable(text), "red"))
    return Group(*lines)


def _positions(status: Mapping[str, Any]) -> Any:
    from rich.table import Table

    shows_members = any(row.get("member") for row in status["positions"])
    table = Table("worker", "state", "host", "pid", "process", "step", "memory", "doing", box=None, pad_edge=False)
    rows = status["positions"]
    hidden = 0
    if len(rows) > _MOST_ROWS:
        shown = [row for row in rows if row["state"] != "live"]
        hidden, rows = len(rows) - len(shown), shown
    for row in rows:
        name = f"({row['pipeline']}, {row['stage']})" + (f" member {row['member']}" if shows_members else "")
        leads = status["leader"] == [row["pipeline"], row["stage"]] and not row.get("member")
        state = row["state"]
        if row["since"] is not None:
            state += f" for {_duration(status['time'] - row['since'])}"
        doing = row["cause"] or row["activity"]
        if row["waiting_for"] and not row["cause"]:
            doing += f" (waits for {row['waiting_for']})"
        table.add_row(
            name + (" leads" if leads else ""),
            _text(state, _COLORS.get(row["state"], "dim")),
            _text(row["host"] or "-"),
            str(row["pid"] or "-"),
            f"#{row['incarnation']}",
            _step(row["step"]),
            _bytes(row["peak_bytes"]) if row.get("peak_bytes") else "-",
            _text(doing),
        )
    if hidden:
        table.add_row(f"{hidden:,} others", _text("live", "green"))
    return table


def _shares(seconds: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    sums = {cause: sum(by_phase.values()) for cause, by_phase in seconds.items()}
    if total := sum(sums.values()):
        for cause, spent in sums.items():
            if spent / total >= 0.0005:
                yield f"{cause} {100 * spent / total:.1f} %"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


def _step(step: int) -> str:
    """A step's number; a dash before the first step."""
    return f"{step:,}" if step >= 0 else "-"


def _grid(status: Mapping[str, Any]) -> str:
    grid = status["grid"]
    return f"{grid['pipelines']} x {grid['stages']} x {grid['microbatches']}"


def _workers(status: Mapping[str, Any]) -> str:
    count, states = len(status["positions"]), Counter(position["state"] for position in status["positions"])
    if status["phase"] == "starting":
        connected = sum(each["state"] == "starting" and each["pid"] is not None for each in status["positions"])
        return f"{connected} of {count} workers connected"
    joining = f" (+{states['joining']} joining)" if states["joining"] else ""
    return f"{states['live'] + states['suspected']} of {count}{joining} workers"


def _process(place: Mapping[str, Any]) -> str:
    return f"process {place['pid']} on {_printable(place['host'] or socket.gethostname())}"


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


def _printable(text: str) -> str:
    """``text`` of a worker without terminal control characters."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _text(text: str, style: str = "") -> Any:
    from rich.text import Text

    return Text(_printable(text), style)


if __name__ == "__main__":
    sys.exit(main())
