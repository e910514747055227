"""Strips of the report."""

import itertools

import pytest

from lightning_recycle.visualize.report.charts import Series
from lightning_recycle.visualize.report.strips import Segment, columns

TRAIN, PAUSE = Series("training", "training", "u-useful"), Series("pause", "pause", "u-idle")


def test_a_column_shows_what_takes_most_of_it_at_the_mean_height() -> None:
    segments = [
        Segment(0.0, 2.2, 1.0, TRAIN, "all"),
        Segment(2.2, 2.4, 0.0, PAUSE, "detect"),
        Segment(2.4, 4.0, 0.5, TRAIN, "1 failed"),
    ]
    found = columns(segments, 4.0, 4)
    assert [(each.begin, each.end, each.label) for each in found] == [(0.0, 2.0, "all"), (2.0, 4.0, "1 failed")]
    assert [each.value for each in found] == pytest.approx([1.0, (0.2 + 0.6 * 0.5 + 0.5) / 2])


def test_nothing_is_shown_where_there_is_nothing() -> None:
    assert columns([Segment(1.0, 2.0, 1.0, PAUSE, "wait")], 4.0, 4) == [Segment(1.0, 2.0, 1.0, PAUSE, "wait")]
    assert columns([], 4.0, 4) == []


def test_the_area_is_that_of_the_segments() -> None:
    edges = [0.0, 0.31, 0.7, 1.9, 2.05, 3.3, 5.0]
    segments = [Segment(a, b, a + 0.5, (TRAIN, PAUSE)[a > 1], str(a)) for a, b in itertools.pairwise(edges)]
    found = columns(segments, 5.0, 13)
    area = sum((each.end - each.begin) * each.value for each in found)
    assert area == pytest.approx(sum((each.end - each.begin) * each.value for each in segments))
