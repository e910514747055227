"""A training that is looked at while it runs, as a user would: commands, a browser, Prometheus."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from support.models import GLOBAL_BATCH, Regression, dataset
from support.scripts import completed
from support.training import difference, failures, fit, plain_loop
from support.waiting import PATIENCE, wait_for

from lightning_recycle import ConfigurationError
from lightning_recycle.callbacks import Fault
from lightning_recycle.control.network.addresses_and_keys import free_port

LENGTH, KILL_AT, PAUSE_AT = 24, 4, 12
DATA = dataset(GLOBAL_BATCH * LENGTH)
MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"


class Until(L.Callback):
    """Waits at a step for a worker to be killed, and at a later one for ``sign``."""

    def __init__(self, sign: Path) -> None:
        self._sign = sign

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        killed = self._sign.with_name("killed")
        wait_for(lambda: trainer.global_step < KILL_AT or killed.exists() or self._sign.exists(), 200, pause=0.05)
        wait_for(lambda: trainer.global_step < PAUSE_AT or self._sign.exists(), 200, pause=0.05)


def trained_while(look: Callable[[], None], tmp_path: Path, **strategy: Any) -> tuple[Regression, Any]:
    """Trains while ``look`` runs in another thread."""
    sign, errors = tmp_path / "enough", []

    def run() -> None:
        try:
            look()
        except BaseException as error:
            errors.append(error)
        finally:
            sign.touch()

    thread = threading.Thread(target=run)
    thread.start()
    model = Regression().double()
    trainer = fit(model, 2, 2, max_steps=LENGTH, data=DATA, callbacks=[Until(sign)], strategy=strategy)
    thread.join(30)
    if errors:
        raise errors[0]
    return model, trainer


def status_of(*arguments: str) -> dict[str, Any]:
    """What ``recycle-status --json`` prints; nothing if there is no such run."""
    command = [sys.executable, "-m", "lightning_recycle.control.monitoring.status_command", "--json", *arguments]
    done = completed(command)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def mine() -> dict[str, Any]:
    return status_of(str(os.getpid()))


def position(status: dict[str, Any], pipeline: int, stage: int) -> dict[str, Any]:
    return next(p for p in status["positions"] if (p["pipeline"], p["stage"]) == (pipeline, stage))


@pytest.fixture
def port() -> int:
    return free_port("127.0.0.1")


def kill_from_outside(folder: Path) -> dict[str, Any]:
    """Kills the worker (1, 0) that the status names, and waits until the others have gone on."""
    before = wait_for(lambda: (found := mine()) and found["step"] >= 2 and found, 150)
    assert before, "the run was not seen"
    os.kill(position(before, 1, 0)["pid"], signal.SIGKILL)
    (folder / "killed").touch()
    after = wait_for(lambda: (found := mine()) and found["step"] >= PAUSE_AT - 1 and found, 100)
    assert after
    return dict(after)


def test_a_worker_that_is_killed_is_seen_and_the_result_is_that_of_an_undisturbed_run(tmp_path):
    seen: dict[str, Any] = {}
    model, run = trained_while(lambda: seen.update(kill_from_outside(tmp_path)), tmp_path)
    assert failures(run) == [(1, 0)]
    assert difference(model.state_dict(), plain_loop(Regression().double(), DATA, LENGTH)) < 1e-10
    lost = position(seen, 1, 0)
    assert (lost["state"], lost["cause"]) == ("lost", "it was killed by SIGKILL")
    assert [p["state"] for p in seen["positions"]].count("live") == 3
    assert {p["step"] for p in seen["positions"] if p["state"] == "live"} == {PAUSE_AT - 1}
    assert (seen["generation"], seen["counts"]["failures"]) == (1, 1)
    assert seen["failures"][0]["pid"] == lost["pid"]
    assert seen["plan"]["failed"] == [[1, 0]]
    spent = {cause: sum(parts.values()) for cause, parts in seen["worker_seconds"].items()}
    assert spent["useful"] > 0
    assert spent["failed"] > 0
    assert mine() == {}, "it is over"


class Cells(HTMLParser):
    """The workers, the kinds of events, and all text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: dict[str, str] = {}
        self.kinds: list[str] = []
        self.shown = ""
        self.labels: list[str] = []  # of charts
        self.requested: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        if "data-worker" in found:
            self.workers[found["data-worker"]] = found["data-state"]
        if "data-kind" in found:
            self.kinds.append(found["data-kind"])
        self.requested += [found[name] for name in ("src", "href") if name in found]

    def handle_data(self, data: str) -> None:
        self.shown += data
        if self.lasttag == "text":
            self.labels.append(data)


@pytest.mark.long
def test_the_page_shows_the_run_in_a_real_browser(tmp_path, port, monkeypatch):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    page = Cells()

    def look() -> None:
        kill_from_outside(tmp_path)
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        command += ["--virtual-time-budget=8000", "--dump-dom", f"http://127.0.0.1:{port}/"]
        done = completed(command, check=True)
        page.feed(done.stdout)

    monkeypatch.setenv("RECYCLE_HTTP", str(port))
    monkeypatch.setenv("RECYCLE_NODE", "<img src=x onerror=alert(1)>")  # what workers say of themselves
    trained_while(look, tmp_path)
    assert page.workers == {"0,0": "live", "0,1": "live", "1,0": "lost", "1,1": "live"}
    assert "failure" in page.kinds
    assert "it was killed by SIGKILL" in page.shown
    assert "collecting" in page.labels, "no step has ended since the page was opened"
    assert "0 steps/s" not in page.labels
    assert "<img src=x onerror=alert(1)>" in page.shown
    assert "x" not in page.requested
    assert all(not address.startswith(("http:", "https:", "//")) for address in page.requested)
    assert any(address.startswith("schedule.svg?plan=") for address in page.requested)


def test_a_wrong_address_is_an_error_before_anything_starts(monkeypatch):
    with pytest.raises(ConfigurationError, match=r"MonitoringOptions\(status='nowhere'\)"):
        fit(Regression().double(), 2, 2, strategy={"status": "nowhere"})
    with pytest.raises(ConfigurationError, match=r"MonitoringOptions\(status='192\.0\.2\.9:80'\): .* cannot listen at"):
        fit(Regression().double(), 2, 2, strategy={"status": "192.0.2.9:80"})
    monkeypatch.setenv("RECYCLE_HTTP", "nowhere")
    with pytest.raises(ConfigurationError, match="RECYCLE_HTTP='nowhere'"):
        fit(Regression().double(), 2, 2)
    monkeypatch.setenv("RECYCLE_LOG", "yaml")
    with pytest.raises(ConfigurationError, match="RECYCLE_LOG='yaml'"):
        fit(Regression().double(), 2, 2)


def test_a_run_that_is_not_to_be_seen_is_not_found(tmp_path):
    seen: list[Any] = []

    def look() -> None:
        wait_for(lambda: (tmp_path / "step").exists(), 150)
        seen.append(mine())

    class Tells(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            (tmp_path / "step").touch()

    thread = threading.Thread(target=look)
    thread.start()
    sign = tmp_path / "enough"
    sign.touch()
    fit(Regression().double(), 2, 2, callbacks=[Tells()], strategy={"status": False})
    thread.join(60)
    assert seen == [{}]


def disturbed() -> None:
    fit(Regression().double(), 2, 2, [Fault("kill", 1, 0, step=2)])


@pytest.mark.long
def test_every_line_of_a_run_is_json_if_that_is_wanted(tmp_path):
    environment = {**os.environ, "RECYCLE_LOG": "json", "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    script = "if __name__ == '__main__':\n    from test_seen_runs import disturbed\n    disturbed()"
    command = [sys.executable, "-c", script]
    done = completed(command, cwd=Path(__file__).parent, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]
    (failure,) = [line["event"] for line in lines if line["message"] == "failure"]
    assert failure["worker"] == [1, 0]
    assert [
        line
        for line in lines
        if line["logger"] == "lightning_recycle.control.monitoring.history" and "was lost" in line["message"]
    ]
    told = [line for line in lines if "`Trainer.fit` stopped" in line["message"]]
    assert [(line["rank"], line["generation"]) for line in told] == [(1, 1)]


# ---------------------------------------------------------------------- metrics


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\brecycle_\w+", expression))


def dashboards() -> set[str]:
    """The metrics that the dashboard and the alerts ask for."""
    asked: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                if key in ("expr", "query") and isinstance(item, str):
                    asked.update(names_in(item))
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(json.loads((MONITORING / "grafana.json").read_text()))
    return asked | names_in("\n".join(re.findall(r"expr: (.*(?:\n {10}.*)*)", (MONITORING / "alerts.yml").read_text())))


@pytest.mark.long
def test_the_dashboard_and_the_alerts_ask_for_metrics_that_prometheus_has_scraped(tmp_path, port, monkeypatch):
    pytest.importorskip("prometheus_client", reason="the extra 'metrics' is not installed")
    prometheus, promtool = shutil.which("prometheus"), shutil.which("promtool")
    scraped: set[str] = set()
    answers: dict[str, Any] = {}

    def look() -> None:
        kill_from_outside(tmp_path)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            content = response.read()
        scraped.update(re.findall(r"^(recycle_\w+)", content.decode(), re.M))
        if promtool is not None:
            done = subprocess.run([promtool, "check", "metrics"], input=content, capture_output=True, timeout=30)
            answers["promtool"] = done.stderr.decode() + done.stdout.decode()
        if prometheus is not None:
            answers.update(scraped_by(prometheus, port, tmp_path))

    monkeypatch.setenv("RECYCLE_HTTP", str(port))
    trained_while(look, tmp_path)
    # What is known of this run: the batches of its loader are counted, so samples are known, too.
    assert dashboards() - scraped == set()
    assert len(dashboards()) > 10
    if promtool is not None:
        assert "error" not in answers["promtool"], answers["promtool"]
    if prometheus is not None:
        assert answers["recycle_step"] == ["12"]
        assert answers["recycle_failures_total"] == ["1"]
        assert answers['recycle_workers{state="lost"}'] == ["1"]
        assert len(answers["sum by (cause) (recycle_worker_seconds_total)"]) == 6


def scraped_by(prometheus: str, port: int, folder: Path) -> dict[str, list[str]]:
    """The answers of a Prometheus of this test's own that scrapes the run."""
    own = free_port("127.0.0.1")
    config = folder / "prometheus.yml"
    text = (MONITORING / "prometheus.yml").read_text()
    text = text.replace("localhost:8265", f"127.0.0.1:{port}").replace("interval: 5s", "interval: 200ms")
    config.write_text(text.replace("alerts.yml", str(MONITORING / "alerts.yml")))
    command = [prometheus, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{own}"], stderr=subprocess.PIPE, text=True)

    def ask(query: str) -> list[str]:
        url = f"http://127.0.0.1:{own}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return [sample["value"][1] for sample in json.load(response)["data"]["result"]]
        except (urllib.error.URLError, ConnectionError):  # it does not listen yet
            return []

    try:
        assert wait_for(lambda: ask("recycle_step"), 40, pause=0.2), "nothing was scraped"
        queries = ["recycle_step", "recycle_failures_total", 'recycle_workers{state="lost"}']
        return {query: ask(query) for query in [*queries, "sum by (cause) (recycle_worker_seconds_total)"]}
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)
