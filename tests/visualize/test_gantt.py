"""Gantt charts: complete and well-formed."""

from xml.etree import ElementTree

import pytest

from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import Costs, Grid, Problem, Schedule, Technique, Worker, one_f_one_b, plan
from lightning_recycle.visualize import gantt_svg, save_gantt

GRID = Grid(3, 4, 6)
SVG = "{http://www.w3.org/2000/svg}"


def rerouted() -> Schedule:
    return plan(Problem(GRID, Costs.uniform(4), frozenset({Worker(1, 2)})))


def fault_free() -> Schedule:
    return one_f_one_b(Problem(GRID, Costs.uniform(4), technique=Technique(False, False)))


def groups(svg: str) -> dict[str, list[ElementTree.Element]]:
    found: dict[str, list[ElementTree.Element]] = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        found.setdefault(group.attrib["data-name"], []).append(group)
    return found


def texts(element: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in element.iter(f"{SVG}text")]


def test_every_worker_has_a_row_with_all_its_operations():
    schedule = rerouted()
    rows = groups(gantt_svg(schedule))
    for worker in GRID.workers():
        (row,) = rows[f"worker {worker}"]
        tips = {tip.text for tip in row.iter(f"{SVG}title")}
        assert len(tips) == len(schedule.workers.get(worker, ()))


def test_the_dead_worker_and_adopted_microbatches_are_marked():
    rows = groups(gantt_svg(rerouted()))
    assert texts(rows["worker (1, 2)"][0]) == ["stage 2", "failed"]
    labels = texts(rows["worker (0, 2)"][0])
    assert [label for label in labels if "." in label].count("1.2") == 3  # F, B and W of micro-batch 2 of pipeline 1
    assert "failed" not in texts(rows["worker (1, 1)"][0])
    assert any("adopted" in text for text in texts(rows["legend"][0]))


def test_several_schedules_are_stacked_on_one_time_scale():
    svg = gantt_svg([fault_free(), rerouted()], ["Before <&>", "After"])
    rows = groups(svg)
    assert len(rows["worker (0, 0)"]) == 2
    assert [texts(title)[0] for title in rows["title"]] == ["Before <&>", "After"]
    assert texts(rows["title"][1])[1] == "makespan 29, period 27 slots"
    widths = {
        float(rect.attrib["width"])
        for row in rows["worker (0, 0)"]
        for rect in row.iter(f"{SVG}rect")
        if (tip := rect.find(f"{SVG}title")) is not None and (tip.text or "").startswith("F")
    }
    assert len(widths) == 1


def test_nothing_lies_outside_the_picture():
    for width in (500.0, 1200.0):
        svg = gantt_svg([fault_free(), rerouted()], iterations=2, unit="ms", width=width)
        root = ElementTree.fromstring(svg)
        height = float(root.attrib["height"])
        assert float(root.attrib["width"]) == width
        for rect in root.iter(f"{SVG}rect"):
            x, y = float(rect.attrib.get("x", 0)), float(rect.attrib.get("y", 0))
            assert 0 <= x <= x + float(rect.attrib["width"]) <= width
            assert 0 <= y <= y + float(rect.attrib["height"]) <= height
        for text in root.iter(f"{SVG}text"):
            assert 0 <= float(text.attrib["y"]) <= height
            letters = 0.75 * float(text.attrib["font-size"]) * len(text.text)  # at most as wide
            assert float(text.attrib["x"]) - letters * (text.attrib.get("text-anchor") == "end") >= 0, text.text


def test_names_of_pipelines_end_before_those_of_stages_begin():
    texts = list(ElementTree.fromstring(gantt_svg(fault_free())).iter(f"{SVG}text"))
    ends = [float(one.attrib["x"]) + 7 * len(one.text) for one in texts if one.text.startswith("pipeline ")]
    begins = [float(one.attrib["x"]) - 7 * len(one.text) for one in texts if one.text.startswith("stage ")]
    assert len(ends) >= 2
    assert max(ends) < min(begins)


def test_consecutive_iterations_follow_at_the_period():
    schedule = rerouted()
    once, twice = groups(gantt_svg(schedule)), groups(gantt_svg(schedule, iterations=2))
    name = "worker (2, 3)"
    assert len(list(twice[name][0].iter(f"{SVG}title"))) == 2 * len(list(once[name][0].iter(f"{SVG}title")))


def test_files(tmp_path):
    ElementTree.parse(save_gantt(tmp_path / "new" / "plan.svg", rerouted()))


def test_bad_input(tmp_path):
    schedule = rerouted()
    with pytest.raises(ConfigurationError, match=r"plan\.pdf.*ends with \.svg"):
        save_gantt(tmp_path / "plan.pdf", schedule)
    with pytest.raises(ConfigurationError, match="no schedule"):
        gantt_svg([])
    with pytest.raises(ConfigurationError, match="2 titles for 1 schedules"):
        gantt_svg(schedule, ["a", "b"])
    with pytest.raises(ConfigurationError, match="iterations=0"):
        gantt_svg(schedule, iterations=0)


def test_instant_schedules_can_be_drawn():
    schedule = plan(Problem(Grid(1, 1, 1), Costs.uniform(1, 0.0, 0.0, 0.0)))
    assert "worker (0, 0)" in groups(gantt_svg(schedule))
