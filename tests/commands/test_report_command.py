"""``recycle-report``: one self-contained page, whose numbers are those of the results."""

import importlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command_driver import run, run_all

from lightning_recycle import __version__
from lightning_recycle.traces import load_trace
from lightning_recycle.visualize.report import load_results, render_report
from lightning_recycle.visualize.report.names import duration_text, number
from lightning_recycle.visualize.report.paper import paper_slots, paper_throughput
from lightning_recycle.visualize.report.scales import linear, logarithmic
from lightning_recycle.visualize.report.sections.chosen_ways import choices
from lightning_recycle.visualize.report.sections.trace_results import averaged

pytestmark = pytest.mark.long

SECTIONS = [
    "same",
    "intervals",
    "causes",
    "traces",
    "modes",
    "choices",
    "fractions",
    "ablation",
    "planner",
    "spares",
    "restart",
    "layers",
]
SECTIONS += ["others", "runs"]
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Elements of a page; fails where they are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None], str | None]] = []  # tag, attributes, section
        self.section: str | None = None
        self.rows: dict[str | None, list[list[dict[str, Any]]]] = {}
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
        if self.open and self.open[-1] == "td":
            self.rows[self.section][-1][-1]["text"] += data

    def values(self, section: str, key: str) -> list[float]:
        cells = [cell for row in self.rows[section] for cell in row if cell.get("data-key") == key]
        return [float(cell["data-value"]) for cell in cells]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the quick experiment, and a sweep with other failures."""
    directory = tmp_path_factory.mktemp("sweep")
    calls = [
        ["experiment=quick", "output=results/quick"],
        ["-m", "model=gpt3_medium", "failures=llama3,rsc1", "failures.repair=1h", "policy=restart", "seeds=2",
         "output=results/others"],
    ]  # fmt: skip
    answers = run_all("recycle-simulate", directory, *calls)
    assert [(code, err) for code, _, err in answers] == [(0, "")] * 2
    assert "wrote 83 results" in answers[0][1]
    assert run("recycle-report", directory, "results", "-o", "out/report.html").startswith("wrote out/report.html: 85")
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


def of(records: list[dict[str, Any]], section: str) -> list[dict[str, Any]]:
    return [each for each in records if each["section"] == section and each["task"] == "training"]


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
    # Models, or models x failures; traces x models; fractions; grids and runs.
    assert pictures == {
        "same": 4, "intervals": 2, "causes": 6, "traces": 1, "modes": 2, "choices": 1, "fractions": 3, "ablation": 2,
        "planner": 1, "spares": 1, "restart": 1, "layers": 1,
    }  # fmt: skip
    for tag, attributes, section in page.elements:
        if tag == "svg" and "aria-hidden" not in attributes:
            assert attributes["role"] == "img", section
            assert attributes["aria-label"], section


@pytest.mark.parametrize("section", ["intervals", "fractions", "ablation", "traces", "layers", "others"])
def test_every_result_stands_in_its_section(page: Page, records: list[dict[str, Any]], section: str) -> None:
    expected = of(records, section) or [each for each in records if each["section"] is None]
    shown = set(page.values(section, "ratio"))
    assert shown == {each["ratio"] for each in expected if each["throughput"]}


def test_throughput_and_its_difference_from_the_paper(page: Page, records: list[dict[str, Any]]) -> None:
    found = {
        (each["model"]["name"], each["policy"]["name"], each["failures"]["settings"]["mtbf"]): each
        for each in of(records, "intervals")
    }
    rows = {(row[0]["text"], row[1]["text"]): row for row in page.rows["intervals"] if len(row) == 8}
    recycle = rows["GPT-3 Medium", "ReCycle (planned, 1F1B first)"]
    for place, mtbf, paper in ((2, 21600.0, 27.27), (5, 7200.0, 25.42)):
        result = found["gpt3_medium", "Recycle", mtbf]
        assert recycle[place]["text"] == f"{paper}"
        assert float(recycle[place + 1]["data-value"]) == result["throughput"]
        assert recycle[place + 1]["text"] == f"{result['throughput']:.2f}"
        points = 100 * (result["throughput"] - paper) / 27.58
        assert float(recycle[place + 2]["data-value"]) == pytest.approx(points, abs=1e-4)
        assert (recycle[place + 2]["class"] == "num off") == (abs(points) > 5)
    bamboo = rows["GPT-3 6.7B", "Bamboo (1F1B)"]
    assert [cell["text"] for cell in bamboo[2:]] == ["out of memory", "out of memory", "\N{EN DASH}"] * 2


def kinds(records: list[dict[str, Any]], failures: str) -> list[dict[str, Any]]:
    return [each for each in records if each["failures"]["name"] == failures]


def test_the_conclusion_is_made_from_the_results_with_the_same_schedule(
    page: Page, records: list[dict[str, Any]], text: str
) -> None:
    ratios = {
        (each["model"]["name"], each["failures"]["settings"]["mtbf"], each["policy"]["settings"]["schedule"],
         each["policy"]["name"]): each["ratio"]
        for each in kinds(of(records, "same"), "Poisson")
    }  # fmt: skip
    scenes = {key[:3] for key in ratios}
    assert len(scenes) == 8
    wins = Counter(max(("Recycle", "Merge", "Oobleck"), key=lambda name: ratios[(*scene, name)]) for scene in scenes)
    trace = {each["policy"]["name"]: each["ratio"] for each in of(records, "traces")}
    assert len(trace) == 3  # also with one schedule
    wins[max(trace, key=lambda name: trace[name])] += 1
    found = re.search(r'<p class="conclusion".*?</p>', text, re.DOTALL)
    assert found
    shown = found[0]
    entered = Counter(name for *_, name in ratios) + Counter(trace.keys())
    for name, count in wins.items():
        some = "" if entered[name] == 9 else f" of the {entered[name]} with it"
        assert re.search(f"{name.replace('Recycle', 'ReCycle')} in {count}{some}[,;]", shown)
    gains = [
        100 * (ratios[(*scene, "Recycle")] - ratios[(*scene, "Merge")]) for scene in scenes if scene[2] == "planned"
    ]
    assert number(sum(gains) / len(gains), 1) in shown
    planned = [
        100 * (ratios[(*scene, name)] - ratios[scene[0], scene[1], "1f1b", name])
        for scene in scenes
        if scene[2] == "planned"
        for name in ("Merge", "Oobleck")
    ]
    replayed = {
        (each["policy"]["name"], each["policy"]["settings"]["schedule"]): each["ratio"]
        for each in kinds(of(records, "same"), "TraceReplay")
    }
    planned += [100 * (replayed[name, "planned"] - replayed[name, "1f1b"]) for name in ("Merge", "Oobleck")]
    assert re.search(r"in [0-9]+ of them by less than half a point", shown)
    assert f"is worth +{number(sum(planned) / len(planned), 1)} points" in shown
    assert shown.count(". ") == 2


def test_all_runs_show_what_the_time_was_worth(page: Page, records: list[dict[str, Any]]) -> None:
    runs = [each for each in records if each["task"] == "training"]
    for key in ("goodput", "ettr", "mfu", "fraction_of_ideal"):
        assert sorted(page.values("runs", key)) == sorted(each[key] for each in runs)
    costs = [each["cost"]["on_demand"]["per_thousand_samples"] for each in runs]
    assert sorted(page.values("runs", "cost")) == sorted(cost for cost in costs if cost is not None)


def test_rows_of_the_same_schedule_name_it_once(page: Page) -> None:
    rows = [[cell["text"] for cell in row] for row in page.rows["same"] if row]
    assert len([row for row in rows if len(row) == 8]) == 12  # two intervals, two numbers each
    assert len([row for row in rows if len(row) == 5]) == 4  # one trace
    assert {row[2] for row in rows} == {"1F1B", "planned"}
    assert {row[3] for row in rows} == {"ReCycle", "Merge", "Oobleck"}


def test_what_was_chosen_is_shown_with_its_time(page: Page, records: list[dict[str, Any]]) -> None:
    (run,) = of(records, "choices")
    changes = choices(run)
    assert (changes[0].text, changes[0].gpus) == ("all workers there", 32)
    assert {each.text for each in changes} - {"all workers there"}
    failures = {event["time"] for event in run["timeline"]["events"] if event["kind"] in ("failure", "repair")}
    assert all(any(0 <= each.begin - time < 60 for time in failures) for each in changes[1:])
    rows = [[cell["text"] for cell in row] for row in page.rows["choices"] if len(row) == 8]
    assert [(row[3], row[4], row[6]) for row in rows] == [
        (number(each.begin / 3600, 2), each.text, str(each.gpus)) for each in changes
    ]
    (parts,) = (row for row in page.rows["choices"] if len(row) > 8)
    assert sum(float(cell["data-value"]) for cell in parts[3:-2]) == pytest.approx(1.0)
    for each in records:
        if each["task"] == "training" and each["policy"]["name"] != "Auto":
            assert choices(each) == []


def test_charts_whose_axis_is_cut_say_so(page: Page) -> None:
    """The throughput of intervals begins at 0; the others do not, and are marked."""
    cut = Counter(section for tag, attributes, section in page.elements if attributes.get("class") == "tick cut")
    assert "intervals" not in cut
    assert (cut["same"], cut["layers"]) == (4, 1)
    bands = Counter(section for _, each, section in page.elements if str(each.get("class")).startswith("band"))
    assert bands["same"] == 12
    assert bands["intervals"] >= 4


def test_gpu_seconds_by_cause_add_up_to_all_of_them(page: Page, records: list[dict[str, Any]]) -> None:
    rows = [row for row in page.rows["causes"] if row]
    assert len(rows) == len([each for each in of(records, "intervals") if each["throughput"]]) + 2
    for row in rows:
        *parts, whole = [float(cell["data-value"]) for cell in row if "data-value" in cell]
        assert len(parts) == 6
        assert sum(parts) == pytest.approx(whole)
        assert whole in (pytest.approx(32 * 6 * 3600), pytest.approx(32 * 86400))


def test_slots_seconds_and_spares_are_those_of_the_results(page: Page, records: list[dict[str, Any]]) -> None:
    assert page.values("ablation", "staggered") == [27]
    assert "36 (paper 36)" in page.text["ablation"]
    seconds = [each["seconds"] for each in records if each["task"] == "planner"]
    assert page.values("planner", "seconds") == seconds
    (recycle,) = [each for each in of(records, "spares") if each["policy"]["name"] == "Recycle"]
    spares = {e["policy"]["settings"]["spares"]: e for e in of(records, "spares") if e["policy"]["name"] == "Spares"}
    enough = min(count for count, each in spares.items() if each["ratio"] >= recycle["ratio"] - 0.001)
    (row,) = [row for row in page.rows["spares"] if row]
    assert row[1]["text"] == "planned"
    assert row[4]["text"] == str(enough)
    best = max(spares.values(), key=lambda each: each["ratio_per_gpu"])
    assert float(row[6]["data-value"]) == best["ratio_per_gpu"]


def test_restart_is_shown_with_its_best_checkpoint_interval(page: Page, records: list[dict[str, Any]]) -> None:
    rows = {row[1]["text"]: row for row in page.rows["restart"] if row}
    for hours in (24, 6):
        runs = [
            each
            for each in of(records, "restart")
            if each["failures"]["settings"]["mtbf"] == hours * 3600 and each["policy"]["name"] == "Restart"
        ]
        best = max(runs, key=lambda each: each["ratio"])
        row = rows[f"{hours} h"]
        assert float(row[3]["data-value"]) == best["ratio"]
        assert row[4]["text"] == duration_text(best["policy"]["settings"]["checkpoint_every"])


def test_shown_numbers_are_the_exact_ones_rounded(page: Page) -> None:
    checked = 0
    for row in (row for rows in page.rows.values() for row in rows):
        for cell in row:
            shown = re.fullmatch(r"[+]?([\u2212]?[0-9,]+(\.[0-9]+)?)( %)?( \(paper .*)?", cell["text"])
            if "data-value" in cell:
                assert shown, cell
                value = float(cell["data-value"]) * (100 if shown[3] else 1)
                assert shown[1] == number(value, len(shown[2] or ".") - 1), cell
                checked += 1
    assert checked > 300


def test_every_training_run_is_listed_with_its_command(page: Page, records: list[dict[str, Any]]) -> None:
    listed = [row[-1]["text"] for row in page.rows["runs"] if row]
    assert sorted(listed) == sorted(each["command"] for each in records if each["task"] == "training")


def test_throughput_of_a_replay_is_averaged_without_loss(folder: Path, records: list[dict[str, Any]]) -> None:
    trace = load_trace("aws-p3")
    for each in of(records, "traces"):
        means = averaged(each, 50)
        assert sum(means) / 50 == pytest.approx(each["runs"][0]["throughput"])
        available = 32 * (1 - each["fractions"]["failed"])
        assert available == pytest.approx(trace.mean, abs=1)


def test_light_and_dark_define_the_same_colours_and_every_colour_is_defined(text: str, page: Page) -> None:
    style = text[text.index("<style>") : text.index("</style>")]
    blocks = re.findall(r":root[^{]*\{([^{}]*--ground[^{}]*)\}", style)
    light, dark, chosen = (dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block)) for block in blocks)
    assert "prefers-color-scheme: dark" in style
    assert dark == chosen
    assert set(light) == set(dark)
    assert light["ground"] > "#eeeeee" > "#333333" > dark["ground"]
    used = {
        name
        for _, attributes, _ in page.elements
        for name in (attributes.get("class") or "").split()
        if re.match(r"[pcuq]-", name)
    }
    assert {name for name in used if f".{name}" not in style} == set()
    assert set(re.findall(r"var\(--([a-z0-9-]+)\)", style)) <= set(light)


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


def test_sections_without_results_say_how_to_make_them(tmp_path: Path) -> None:
    run("recycle-simulate", tmp_path, "task=techniques", "output=results")
    page = Page(render_report(load_results(tmp_path / "results")))
    commands = {}
    for name in SECTIONS:
        found = re.search(r"To make some: (recycle-simulate.*)", page.text[name])
        commands[name] = found[1].split() if found else []
    assert [name for name, command in commands.items() if not command] == ["ablation"]
    conf = Path(__file__).parents[2] / "conf" / "simulation"
    for name, command in commands.items():
        assert command[-1:] in ([], ["output=results"]), "without it nothing is kept"
        for word in command[1:-1]:
            key, _, values = word.partition("=")
            for value in values.split(",") if values else ():
                assert (conf / key / f"{value}.yaml").is_file(), (name, word)


def written(folder: Path, *records: dict[str, Any]) -> Path:
    for place, record in enumerate(records):
        (folder / str(place)).mkdir(parents=True)
        (folder / str(place) / "result.json").write_text(json.dumps(record))
    return folder


def test_results_of_any_sweep_are_shown_by_their_kind_of_failures(
    tmp_path: Path, records: list[dict[str, Any]]
) -> None:
    kinds = {"Poisson": "intervals", "TraceReplay": "traces", "FailedFraction": "fractions", "FailureRate": "others"}
    for kind, section in kinds.items():
        found = next(each for each in records if each["task"] == "training" and each["failures"]["name"] == kind)
        page = Page(render_report(load_results(written(tmp_path / kind, {**found, "section": None}))))
        shown = {name for name in SECTIONS if "To make some" not in page.text[name]}
        assert shown == {section, "runs"} | ({"causes"} if section in ("intervals", "others") else set())
        assert found["ratio"] in page.values(section, "ratio")


def test_each_result_alone_makes_a_page(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    for place, record in enumerate(records):
        page = Page(render_report(load_results(written(tmp_path / str(place), record))))
        assert len(page.rows) >= 1


def test_names_are_text_whatever_is_in_them(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    strange = "</svg><script>alert('&amp;')</script>\""
    found = [{**each, "model": {**each["model"], "name": strange}} for each in of(records, "intervals")]
    page = Page(render_report(load_results(written(tmp_path, *found)), title=strange))
    assert Counter(tag for tag, _, _ in page.elements)["script"] == 1
    assert strange in page.text["intervals"]
    assert any(attributes.get("aria-label") == strange for tag, attributes, _ in page.elements if tag == "svg")


def test_what_the_paper_does_not_report_is_not_shown_as_its_figure() -> None:
    record: dict[str, Any] = {
        "model": {"name": "gpt3_6_7b"},
        "policy": {"name": "Recycle", "settings": {"adaptive": True, "decoupled": True, "staggered": True}},
        "failures": {"name": "Poisson", "settings": {"mtbf": 1800.0}},
        "fault_free_throughput": 5.33,
    }
    assert paper_throughput(record) == 3.53
    for name, schedule, value in (("Recycle", "1f1b", None), ("Oobleck", "planned", None), ("Oobleck", "1f1b", 2.78)):
        policy = {"name": name, "settings": {"schedule": schedule}}
        assert paper_throughput({**record, "policy": policy}) == value
    assert paper_throughput({**record, "fault_free_throughput": 6.0}) is None
    assert paper_throughput({**record, "failures": {"name": "Poisson", "settings": {"mtbf": 3600.0}}}) is None
    off = {"name": "Recycle", "settings": {"adaptive": True, "decoupled": False, "staggered": False}}
    assert paper_throughput({**record, "policy": off}) is None
    assert paper_throughput({**record, "policy": {"name": "Bamboo", "settings": {}}}) == 0
    assert paper_throughput({**record, "policy": {"name": "Varuna", "settings": {}}}) is None
    running = {"grid": {"pipelines": 3, "stages": 4, "microbatches": 6}, "failed": [[1, 2]]}
    assert paper_slots(running)["adaptive"] == 36
    assert paper_slots({**running, "failed": [[1, 1]]}) == {}


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
    axis = logarithmic("", [0.02, 6.7])
    assert [text for _, text in axis.ticks] == ["0.01", "0.1", "1", "10"]
    assert 0 < axis.part(0.02) < axis.part(6.7) < 1


def test_bad_input_ends_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for name, content in (("broken", "{"), ("new", '{"schema": 7}'), ("part", '{"schema": 2, "task": "planner"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(content)
    (tmp_path / "empty").mkdir()
    run("recycle-simulate", tmp_path, "task=techniques", "output=good")
    bad = [
        (["nowhere"], "there is no folder nowhere"),
        (["empty"], "there is no result.json in empty"),
        (["broken"], "cannot read broken/result.json"),
        (["new"], "new/result.json is not a result of this version"),
        (["part"], "part/result.json is incomplete (grid, workers,"),
        (["good", "-o", "good/result.json/page.html"], "cannot write good/result.json/page.html"),
    ]
    answers = run_all("recycle-report", tmp_path, *(arguments for arguments, _ in bad))
    for (_, message), (code, _, err) in zip(bad, answers, strict=True):
        assert (code, err.count("\n")) == (2, 1), err
        assert err.startswith(f"recycle-report: {message}"), err


@pytest.mark.parametrize(
    ("command", "parser"),
    [
        ("recycle-coordinator", "lightning_recycle.control.coordinator.standalone"),
        ("recycle-report", "lightning_recycle.commands.make_report"),
        ("recycle-run", "lightning_recycle.engines.recycle_run"),
        ("recycle-status", "lightning_recycle.control.monitoring.status_command"),
    ],
)
def test_every_command_says_its_version_and_gives_examples(
    command: str, parser: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = importlib.import_module(parser).main
    shown = {}
    for option in ("--version", "--help"):
        monkeypatch.setattr("sys.argv", [command, option])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
        shown[option] = capsys.readouterr().out
    assert shown["--version"] == f"{command} {__version__}\n"
    assert shown["--help"].startswith(f"usage: {command} ")
    assert shown["--help"].count(f"\n  {command}") + shown["--help"].count(f"\n  srun {command}") >= 2
