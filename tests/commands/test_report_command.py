"""``recycle-report``: one self-contained page, whose numbers are those of the results."""

import importlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command_driver import check_refused, run, run_all

from lightning_recycle import __version__
from lightning_recycle.commands.report import render_report
from lightning_recycle.traces import load_trace
from lightning_recycle.visualize.charts import linear, logarithmic
from lightning_recycle.visualize.sections import averaged
from lightning_recycle.visualize.simulation_results import POLICIES, half_interval, load_results, number, schedule_of

pytestmark = pytest.mark.long

SECTIONS = ["intervals", "causes", "traces", "costs", "fractions", "runs"]
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Elements of a page; fails where they are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None], str | None]] = []  # tag, attributes, section
        self.section: str | None = None
        self.rows: dict[str | None, list[list[dict[str, Any]]]] = {}
        self.heads: list[tuple[str | None, list[str]]] = []  # section, columns of each of its tables
        self.text: dict[str | None, str] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        assert len(attributes) == len(attrs), f"an attribute twice: {attrs}"
        if tag == "section":
            self.section = attributes["id"]
        self.elements.append((tag, attributes, self.section))
        if tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        if tag == "thead":
            self.heads.append((self.section, []))
        if tag == "th":
            self.heads[-1][1].append("")
        if tag == "td":
            self.rows[self.section][-1].append({**attributes, "text": ""})
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), self.section))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a beginning"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()
        if tag == "section":
            self.section = None

    def handle_data(self, data: str) -> None:
        self.text[self.section] = self.text.get(self.section, "") + data
        if self.open and self.open[-1] == "th":
            self.heads[-1][1][-1] += data
        if self.open and self.open[-1] == "td":
            self.rows[self.section][-1][-1]["text"] += data

    def values(self, section: str, key: str) -> list[float]:
        cells = [cell for row in self.rows[section] for cell in row if cell.get("data-key") == key]
        return [float(cell["data-value"]) for cell in cells]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of some sweeps."""
    directory = tmp_path_factory.mktemp("sweep")
    quick = ["policy.effort=0", "duration=6h", "seeds=3"]
    for name in ("results/quick", "out"):  # commands make no folder beside what they are asked for
        (directory / name).mkdir(parents=True)
    calls = [
        ["-m", "model=gpt3_medium,gpt3_6_7b", "policy=recycle,merge,oobleck,bamboo", *quick, "schedule=1f1b,planned",
         "failures=mtbf", "failures.mtbf=2h,6h", "output=results/quick/same"],
        ["-m", "model=gpt3_medium", "policy=recycle,merge,oobleck,restart", "policy.effort=0", "schedule=planned",
         "failures=trace", "failures.trace=aws-p3,aws-g4dn", "failures.start=10min", "cluster.price=0.3",
         "output=results/quick/traces"],
        ["-m", "model=gpt3_medium,gpt3_6_7b", "policy=recycle,oobleck", "policy.effort=0", "schedule=planned",
         "failures=fraction", "failures.part=0.01,0.05,0.1", "duration=1h", "seeds=1",
         "output=results/quick/fractions"],
        ["-m", "model=gpt3_medium", "failures=llama3,rsc1", "failures.repair=1h", "policy=restart", "seeds=2",
         "output=results/others"],
    ]  # fmt: skip
    answers = run_all("recycle-simulate", directory, *calls)
    assert [code for code, *_ in answers] == [0] * 4, answers
    assert run("recycle-report", directory, "results", "-o", "out/report.html").startswith("wrote out/report.html: 54")
    assert f"wrote 2 results to {directory}/results/others, each in a folder" in answers[3][1]
    return directory


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return (folder / "out" / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


@pytest.fixture(scope="module")
def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted((folder / "results").rglob("result.json"))]


def with_failures(records: list[dict[str, Any]], *sources: str) -> list[dict[str, Any]]:
    return [each for each in records if each["failures"]["name"] in sources]


def test_the_page_needs_nothing_but_itself(text: str, page: Page) -> None:
    for outside in ("http:", "https:", "url(", "@import", "fetch(", "XMLHttpRequest", "import("):
        assert outside not in text, outside
    for tag, attributes, _ in page.elements:
        assert tag not in {"link", "iframe", "object", "embed", "img", "base"}
        assert not {"src", "srcset", "data", "xlink:href"} & set(attributes), (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#")


def test_links_lead_to_sections_and_every_section_has_its_charts(page: Page) -> None:
    identities = [attributes["id"] for tag, attributes, _ in page.elements if tag == "section"]
    assert identities == SECTIONS
    links = {attributes["href"] for tag, attributes, _ in page.elements if tag == "a"}
    assert links == {f"#{name}" for name in SECTIONS}
    pictures = Counter(section for tag, _, section in page.elements if tag == "figure")
    # Models x schedules; models x failures, and others; traces; runs; models.
    assert pictures == {"intervals": 4, "causes": 6, "traces": 2, "fractions": 2}
    for tag, attributes, section in page.elements:
        if tag == "svg" and "aria-hidden" not in attributes:
            assert attributes["role"] == "img", section
            assert attributes["aria-label"], section


@pytest.mark.parametrize(
    ("section", "source"), [("intervals", "Poisson"), ("fractions", "FailedFraction"), ("traces", "TraceReplay")]
)
def test_every_result_stands_in_its_section(
    page: Page, records: list[dict[str, Any]], section: str, source: str
) -> None:
    expected = with_failures(records, source)
    assert set(page.values(section, "ratio")) == {each["ratio"] for each in expected if each["throughput"]}


def test_all_runs_show_what_the_time_was_worth(page: Page, records: list[dict[str, Any]]) -> None:
    for key in ("goodput", "ettr", "mfu", "fraction_of_ideal"):
        assert sorted(page.values("runs", key)) == sorted(each[key] for each in records)


def test_policies_have_one_order_everywhere(page: Page) -> None:
    shown = [name for name, _ in POLICIES.values()]
    firsts = [row[0]["text"].partition(" (")[0] for row in page.rows["runs"] if row]
    tables = [firsts[: len(firsts) // 2], firsts[len(firsts) // 2 :]]  # results, commands
    for table in tables:
        assert table == sorted(table, key=shown.index)


def test_failures_have_one_order_everywhere(page: Page) -> None:
    """Fewer first, as in the charts, in whatever order the folder has them."""
    for section in ("causes", "runs"):
        firsts = [row[0]["text"] + row[2]["text"] for row in page.rows[section] if row]
        found = [text for text in firsts if text.startswith("Oobleck (planned") and "failure\N{NO-BREAK SPACE}" in text]
        assert [re.findall(r"(\d)\N{NO-BREAK SPACE}h", text)[0] for text in found[:2]] == ["6", "2"], section


def test_every_policy_has_a_marker_of_its_own() -> None:
    markers = [marker for _, marker in POLICIES.values()]
    assert len({*markers}) == len(markers)


def test_a_legend_speaks_of_dotted_lines_where_there_are_some(page: Page) -> None:
    dotted = {section for tag, found, section in page.elements if " along " in f" {found.get('class')} "}
    assert {name for name, said in page.text.items() if "Dotted: along another line" in said} == dotted


def test_pictures_are_by_schedule_where_all_policies_have_both(page: Page) -> None:
    rows = [[cell["text"] for cell in row] for row in page.rows["intervals"] if len(row) == 6]
    assert len(rows) == 16  # two models, two schedules, four policies; two intervals with two numbers each
    assert {row[1].rpartition(", ")[2] for row in rows} == {"1F1B", "planned"}
    assert {row[0] for row in rows} == {"ReCycle", "Merge", "Oobleck", "Bamboo"}
    assert [row[2:] for row in rows if row[1].startswith("gpt3_6_7b") and row[0] == "Bamboo"] == [
        ["out of memory", "\N{EN DASH}"] * 2
    ] * 2
    assert {row[0]["text"] for row in page.rows["traces"] if row} == {"ReCycle", "Oobleck", "Merge", "Restart"}


def test_a_setting_that_all_rows_share_is_said_once_above_the_table(page: Page) -> None:
    heads = {section: columns for section, columns in page.heads if section != "runs"}
    assert heads["traces"] == ["policy", "aws-g4dn", "aws-p3"]
    assert heads["causes"][:3] == ["policy, failures", "model", "useful"]
    assert "model: gpt3_medium, batch 128, planned" in page.text["traces"]
    assert "batch: 128" in page.text["causes"]


def test_schedules_that_differ_between_policies_are_named(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    found = with_failures(records, "Poisson")
    mixed = [each for each in found if (each["policy"]["name"] == "Recycle") == (schedule_of(each) == "planned")]
    for some, sections in ((found, []), (mixed, ["intervals"])):
        page = Page(render_report(load_results(written(tmp_path / str(len(sections)), *some))))
        said = [name for name, text in page.text.items() for _ in re.findall("The schedules differ between", text)]
        assert said == sections, "once"


def test_pictures_tables_and_their_columns_have_names_of_their_own(
    tmp_path: Path, records: list[dict[str, Any]]
) -> None:
    """Also where runs differ in nothing but their length, or in when nodes are back."""
    first = [{**each, "cost": 1.0} for each in with_failures(records, "Poisson")]
    longer = [{**each, "duration": 24 * 3600.0} for each in first]
    back = [
        {**each, "failures": {**each["failures"], "settings": {**each["failures"]["settings"], "repair": 3600.0}}}
        for each in first
    ]
    page = Page(render_report(load_results(written(tmp_path, *first, *longer, *back))))
    for kind in ("svg", "div"):
        names = Counter(each.get("aria-label") for tag, each, _ in page.elements if tag == kind)
        assert {names[name] for name in names if name} == {1}, names
    titles = [str(attributes.get("aria-label")) for tag, attributes, _ in page.elements if tag == "svg"]
    assert "gpt3_medium, failure every 6 h, runs of 24 h" in titles
    assert "gpt3_medium, batch 128, 1F1B, runs of 6 h, back after 1 h" in titles
    heads = [head for _, heads in page.heads for head in heads]
    assert {"6 h: of ideal", "2 h: of ideal", "failure every 2 h, runs of 6 h"} <= set(heads)
    for section, heads in page.heads:
        assert len(set(heads)) == len(heads), section


def test_a_failure_is_broken_behind_its_commas_alone(page: Page) -> None:
    """Else a phone shows "failure every 6 h" in three lines."""
    cells = {cell["text"] for section in ("causes", "runs") for row in page.rows[section] for cell in row}
    assert "ReCycle (planned)\nfailure\N{NO-BREAK SPACE}every\N{NO-BREAK SPACE}6\N{NO-BREAK SPACE}h" in cells
    assert not {cell for cell in cells if "failure every" in cell}


def test_charts_whose_axis_is_cut_say_so(page: Page) -> None:
    cut = Counter(section for tag, attributes, section in page.elements if attributes.get("class") == "tick cut")
    assert cut == {"intervals": 4, "fractions": 2}


def test_a_sample_costs_what_the_nodes_cost_while_they_were_up(page: Page, records: list[dict[str, Any]]) -> None:
    expected = []
    for record in records:
        if record["cluster"]["price"]:
            up = sum(record["gpu_seconds"].values()) - record["gpu_seconds"]["failed"]
            expected.append(1000 * 0.3 * up / 3600 / (record["throughput"] * record["duration"]))
    assert len(expected) == 8
    assert sorted(page.values("costs", "cost")) == pytest.approx(sorted(expected))


def test_bands_are_drawn_from_ten_runs_on(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    found = [each for each in with_failures(records, "Poisson") if each["policy"]["name"] == "Merge"]
    assert {half_interval(each) for each in found} == {0.0}
    many = [{**each, "runs": each["runs"] * 4} for each in found]
    assert half_interval(many[0]) == pytest.approx(2.201 * many[0]["deviation"] / 12**0.5, rel=2e-3)
    for some, bands in ((found, 0), (many, 4)):
        text = render_report(load_results(written(tmp_path / str(bands), *some)))
        assert text.count('class="band ') == bands


def test_gpu_time_by_cause_adds_up_to_all_of_it(page: Page, records: list[dict[str, Any]]) -> None:
    rows = [row for row in page.rows["causes"] if row]
    assert len(rows) == len([r for r in with_failures(records, "Poisson", "FailureRate") if r["throughput"]])
    for row in rows:
        *parts, whole = [float(cell["data-value"]) for cell in row if "data-value" in cell]
        assert len(parts) == 6
        assert sum(parts) == pytest.approx(100)
        assert whole in [pytest.approx(32 * hours) for hours in (6, 24)]


def test_shown_numbers_are_the_exact_ones_rounded(page: Page) -> None:
    checked = 0
    for row in (row for rows in page.rows.values() for row in rows):
        for cell in row:
            shown = re.fullmatch(r"[\u2212]?[0-9,]+(\.[0-9]+)?", cell["text"])
            if "data-value" in cell:
                assert shown, cell
                assert shown[0] == number(float(cell["data-value"]), len(shown[1] or ".") - 1), cell
                checked += 1
    assert checked > 300


def test_every_training_run_is_listed_with_its_command(page: Page, records: list[dict[str, Any]]) -> None:
    listed = [row[-1]["text"] for row in page.rows["runs"] if len(row) == 3]
    assert sorted(listed) == sorted(each["command"] for each in records)


def test_throughput_of_a_replay_is_averaged_without_loss(folder: Path, records: list[dict[str, Any]]) -> None:
    for each in with_failures(records, "TraceReplay"):
        trace = load_trace(each["failures"]["settings"]["trace"])
        means = averaged(each, 50)
        assert sum(means) / 50 == pytest.approx(each["runs"][0]["throughput"])
        available = 32 * (1 - each["fractions"]["failed"])
        assert available == pytest.approx(trace.mean * 32 / trace.peak, abs=1)


def test_every_colour_is_defined_for_light_and_dark(text: str, page: Page) -> None:
    style = text[text.index("<style>") : text.index("</style>")]
    colours = {
        name: (light, dark)
        for name, light, dark in re.findall(r"--([a-z-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", style)
    }
    light, dark = colours["ground"]
    assert light > "#eeeeee" > "#333333" > dark
    used = {
        name
        for _, attributes, _ in page.elements
        for name in (attributes.get("class") or "").split()
        if re.match(r"[pcu]-", name)
    }
    assert {name for name in used if f".{name}" not in style} == set()
    assert set(re.findall(r"var\(--([a-z0-9-]+)\)", style)) == set(colours)


def test_legends_switch_series_that_are_there(page: Page) -> None:
    legends: dict[str | None, set[str]] = {}
    series: dict[str | None, set[str]] = {}
    for tag, attributes, section in page.elements:
        if tag == "button" and "data-series" in attributes:
            legends.setdefault(section, set()).add(str(attributes["data-series"]))
        names = (attributes.get("class") or "").split()
        if "series" in names:
            series.setdefault(section, set()).update(name[2:] for name in names if name.startswith("s-"))
    for section, keys in legends.items():
        missing = keys - series[section]
        # Nothing of these two can be seen: out of memory, and no GPU is ever idle.
        assert missing <= {"idle"}, section


def test_shapes_lie_within_their_pictures(page: Page) -> None:
    width = height = 0.0
    for tag, attributes, section in page.elements:
        if tag == "svg":
            width, height = (float(part) for part in str(attributes["viewbox"]).split()[2:])
        elif tag == "rect":
            x, y, w, h = (float(str(attributes[name])) for name in ("x", "y", "width", "height"))
            assert x >= 0, section
            assert y >= 0, section
            assert x + w <= width + 0.1, section
            assert y + h <= height + 0.1, section
        elif tag == "path" and "transform" in attributes:
            x, y = (float(part) for part in re.findall(r"[-0-9.]+", str(attributes["transform"])))
            assert 0 < x < width, section
            assert 0 < y < height, section


def written(folder: Path, *records: dict[str, Any]) -> Path:
    for place, record in enumerate(records):
        (folder / str(place)).mkdir(parents=True)
        (folder / str(place) / "result.json").write_text(json.dumps(record))
    return folder


def test_each_result_alone_is_shown_by_its_kind_of_failures(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    kinds = {
        "Poisson": ["intervals", "causes", "runs"],
        "TraceReplay": ["traces", "costs", "runs"],
        "FailedFraction": ["fractions", "runs"],
        "FailureRate": ["causes", "runs"],
    }
    for place, found in enumerate(records):
        page = Page(render_report(load_results(written(tmp_path / str(place), found))))
        shown = [attributes["id"] for tag, attributes, _ in page.elements if tag == "section"]
        if found["throughput"]:
            assert shown == kinds[found["failures"]["name"]]
            assert found["ratio"] in page.values("runs", "ratio")


def test_names_are_text_whatever_is_in_them(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    strange = "</svg><script>alert('&amp;')</script>\""
    found = [{**each, "model": {**each["model"], "name": strange}} for each in with_failures(records, "Poisson")]
    page = Page(render_report(load_results(written(tmp_path, *found)), title=strange))
    assert Counter(tag for tag, _, _ in page.elements)["script"] == 1
    assert strange in page.text["intervals"]
    assert any(strange in str(attributes.get("aria-label")) for tag, attributes, _ in page.elements if tag == "svg")


@pytest.mark.parametrize(
    ("most", "least", "ticks"),
    [
        (27.58, 0.0, ["0", "10", "20", "30"]),
        (1.0, 0.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (1.3, 0.62, ["0.6", "0.8", "1.0", "1.2", "1.4"]),
        (17.5, 5.0, ["5.0", "7.5", "10.0", "12.5", "15.0", "17.5"]),
        (1500.0, 0.0, ["0", "500", "1,000", "1,500"]),
        (0.004, 0.0, ["0.000", "0.001", "0.002", "0.003", "0.004"]),
    ],
)
def test_ticks_are_round(most: float, least: float, ticks: list[str]) -> None:
    axis = linear("", most, least=least)
    assert [text for _, text in axis.ticks] == ticks
    assert axis.low <= least < most <= axis.high


def test_a_logarithmic_axis_holds_its_values() -> None:
    axis = logarithmic("", [0.02, 6.7], ["6 h", "2 h"])
    assert axis.ticks == ((0.02, "6 h"), (6.7, "2 h"))
    assert 0 < axis.part(0.02) < axis.part(6.7) < 1


def test_bad_input_ends_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for name, content in (("broken", "{"), ("new", '{"schema": 7}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(content)
    (tmp_path / "empty").mkdir()
    run("recycle-simulate", tmp_path, "model=gpt3_medium", "policy=fault_free", "duration=1h", "output=good")
    bad = [
        (["nowhere"], "there is no folder nowhere"),
        (["empty"], "there is no result.json in empty"),
        (["broken"], "the result broken/result.json is damaged, it is not JSON"),
        (["new"], "new/result.json is not a result of this version's recycle-simulate (schema 1): make it again"),
        (
            ["good", "-o", "good/result.json/page.html"],
            "--output=good/result.json/page.html: good/result.json is a file",
        ),
        (["good", "-o", "page.pdf"], "--output=page.pdf: give a name that ends with .html, or - for standard output."),
    ]
    answers = check_refused("recycle-report", tmp_path, bad)
    assert answers[2][2].endswith(": make it again with recycle-simulate.\n")


def test_a_page_is_written_to_standard_output(tmp_path: Path) -> None:
    run("recycle-simulate", tmp_path, "model=gpt3_medium", "policy=fault_free", "duration=1h", "output=good")
    ((code, out, err),) = run_all("recycle-report", tmp_path, ["good", "-o", "-"])
    assert code == 0
    assert out.startswith("<!DOCTYPE html>")
    assert out.endswith("</html>\n")
    assert err.startswith("wrote to standard output: 1 result, ")


PARSERS = {
    "recycle-coordinator": "lightning_recycle.control.coordinator.standalone",
    "recycle-report": "lightning_recycle.commands.report",
    "recycle-run": "lightning_recycle.engines.recycle_run",
    "recycle-status": "lightning_recycle.control.monitoring.status_command",
}


@pytest.mark.parametrize("command", PARSERS)
def test_every_command_says_its_version_and_exit_statuses_and_gives_examples(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = importlib.import_module(PARSERS[command]).main
    shown = {}
    for option in ("--version", "--help"):
        monkeypatch.setattr("sys.argv", [command, option])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
        shown[option] = capsys.readouterr().out
    assert shown["--version"] == f"{command} {__version__}\n"
    assert shown["--help"].startswith(f"usage: {command} ")
    assert "\nexit status:\n  0    " in shown["--help"]
    assert "\n  130  Ctrl-C\n" in shown["--help"]
    assert ("\n  RECYCLE_KEY " in shown["--help"]) == (command in ("recycle-coordinator", "recycle-run"))
    assert shown["--help"].count(f"\n  {command}") + shown["--help"].count(f"\n  srun {command}") >= 2


def test_ctrl_c_ends_it_without_a_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    report = importlib.import_module("lightning_recycle.commands.report")
    monkeypatch.setattr(report, "load_results", interrupted)
    with pytest.raises(SystemExit) as end:
        report.main([str(tmp_path), "-o", "-"])
    assert end.value.code == 130


@pytest.mark.parametrize(
    ("command", "flag", "meant"),
    [
        ("recycle-coordinator", "--timout", "--timeout"),
        ("recycle-report", "--titel", "--title"),
        ("recycle-run", "--nproc-per-nod", "--nproc-per-node"),
        ("recycle-run", "--nproc", "--nproc-per-node"),
        ("recycle-status", "--whatch", "--watch"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_nearest(
    command: str, flag: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"recycle-coordinator": ["--listen", "127.0.0.1:0"], "recycle-report": ["folder"]}.get(command, [])
    for text in ([flag, "3"], [f"{flag}=3"]):
        with pytest.raises(SystemExit) as end:
            importlib.import_module(PARSERS[command]).main([*given, *text])
        assert end.value.code == 2
        answer = capsys.readouterr().err
        assert answer.startswith(f"{command}: unrecognized arguments: {text[0]}")
        assert answer.endswith(f"; see {command} --help. Did you mean '{meant}'?\n")
