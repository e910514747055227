"""The paper's 21 cells, the order of the systems and their speed-ups; and Oobleck's published table.

``OURS`` is the result of 400 seeds (``benchmarks/calibration.py``, benchmarks/SIMULATED.md); 20 seeds must agree
with it here.
"""

import math
import statistics

import calibration
import pytest

pytestmark = pytest.mark.long

SEEDS = 20
OURS = {
    ("gpt3_medium", "Bamboo"): (0.721, 0.684, 0.585),
    ("gpt3_medium", "Oobleck"): (0.960, 0.920, 0.787),
    ("gpt3_medium", "Recycle"): (0.997, 0.976, 0.848),
    ("gpt3_3_35b", "Bamboo"): (0.0, 0.0, 0.0),
    ("gpt3_3_35b", "Oobleck"): (0.975, 0.938, 0.803),
    ("gpt3_3_35b", "Recycle"): (1.000, 0.992, 0.866),
    ("gpt3_6_7b", "Bamboo"): (0.0, 0.0, 0.0),
    ("gpt3_6_7b", "Oobleck"): (0.974, 0.932, 0.785),
    ("gpt3_6_7b", "Recycle"): (0.964, 0.933, 0.815),
}
MEANS = {
    (*key, when): value
    for key, values in OURS.items()
    for when, value in zip(calibration.INTERVALS, values, strict=True)
}
# Further than 5 points from the paper; benchmarks/SIMULATED.md says what would have to be assumed.
DEVIATIONS = {
    ("gpt3_medium", "Oobleck", "30min"),
    ("gpt3_medium", "Recycle", "2h"),
    ("gpt3_3_35b", "Oobleck", "30min"),
    ("gpt3_6_7b", "Oobleck", "2h"),
    ("gpt3_6_7b", "Oobleck", "30min"),
    ("gpt3_6_7b", "Recycle", "30min"),
}
# Nodes of Oobleck's own table where we are further than 3 points from it: always below, see benchmarks/SIMULATED.md.
PUBLISHED_DEVIATIONS = {
    "GPT-3 Medium": set(),
    "GPT-3 2.7B": {15, 16, 17, 18, 20, 23},
    "GPT-3 6.7B": {16, 18, 19, 20, 25},
}
OTHER_ORDER = {("gpt3_6_7b", "6h")}
CELLS = sorted(key for key, value in calibration.paper_ratios().items() if value)


@pytest.fixture(scope="module")
def found():
    return calibration.measured(range(SEEDS), effort=0)


@pytest.mark.parametrize("key", CELLS, ids=lambda key: "-".join(key))
def test_a_cell_is_within_five_points_of_the_papers_or_a_listed_deviation(key, found):
    points = 100 * abs(MEANS[key] - calibration.paper_ratios()[key])
    assert (points > 5) == (key in DEVIATIONS)
    # Four standard errors; and a plan without effort is up to a hundredth slower.
    assert statistics.fmean(found[key]) == pytest.approx(
        MEANS[key], abs=4 * statistics.stdev(found[key]) / math.sqrt(SEEDS) + 0.012
    )


def test_there_are_21_cells_and_bamboo_runs_out_of_memory_where_the_paper_says(found):
    assert len(CELLS) == 21
    for key, value in calibration.paper_ratios().items():
        assert (statistics.fmean(found[key]) == 0.0) == (value == 0.0)


def test_systems_are_in_the_papers_order_with_listed_exceptions():
    paper = calibration.paper_ratios()
    for name in calibration.THROUGHPUT:
        for when in calibration.INTERVALS:
            orders = [
                calibration.order_of({label: values[name, label, when] for label in calibration.THROUGHPUT[name]})
                for values in (paper, MEANS)
            ]
            assert (orders[0] == orders[1]) == ((name, when) not in OTHER_ORDER)


def pairs(keys):
    paper, null = calibration.paper_ratios(), calibration.null_model(calibration.paper_ratios())
    return [(MEANS[key], paper[key]) for key in keys], [(null[key[2]], paper[key]) for key in keys]


def test_all_cells_are_nearer_to_the_paper_than_a_null_model():
    ours, null = pairs(CELLS)
    assert calibration.error(ours) < calibration.error(null)


@pytest.mark.xfail(
    strict=True, reason="the paper's figures at 30 min need pauses of minutes; see benchmarks/SIMULATED.md"
)
def test_oobleck_and_recycle_are_nearer_to_the_paper_than_a_null_model():
    ours, null = pairs([key for key in CELLS if key[1] != "Bamboo"])
    assert calibration.error(ours) < calibration.error(null)


def test_speed_ups_are_nearer_to_the_papers_than_none_at_all(found):
    paper = calibration.paper_ratios()
    ours, null = [], []
    for name in calibration.THROUGHPUT:
        for when in calibration.INTERVALS:
            claimed = paper[name, "Recycle", when] / paper[name, "Oobleck", when]
            ratio, width = calibration.ratio_interval(found[name, "Recycle", when], found[name, "Oobleck", when])
            assert ratio == pytest.approx(
                MEANS[name, "Recycle", when] / MEANS[name, "Oobleck", when], abs=2 * width + 0.015
            )
            ours.append((ratio, claimed))
            null.append((1.0, claimed))
    assert calibration.error(ours) < calibration.error(null)


def test_the_interval_of_a_ratio_holds_the_true_one_and_narrows():
    import random

    draw = random.Random(1)
    theirs = [draw.gauss(0.8, 0.1) for _ in range(400)]
    mine = [1.1 * value + draw.gauss(0.0, 0.02) for value in theirs]
    ratio, width = calibration.ratio_interval(mine, theirs)
    assert abs(ratio - 1.1) < width < 0.004
    assert calibration.ratio_interval(mine[:50], theirs[:50])[1] > 2 * width


def test_ooblecks_published_table_is_met_with_listed_exceptions():
    """Throughput on 29 to 15 nodes relative to 30, within 3 points but for what benchmarks/SIMULATED.md lists."""
    for name, rows in calibration.published_rows().items():
        far = {nodes for nodes, published, ours in rows if abs(published - ours) > 0.03}
        assert far == PUBLISHED_DEVIATIONS[name], name


def test_ooblecks_controlled_failures_are_those_of_its_artifact_for_oobleck_itself():
    rows = calibration.controlled_rows()
    ratios = {key: [ours / theirs for theirs, ours in row if theirs] for key, row in rows.items()}
    assert all(0.9 <= ratio <= 1.01 for (_, label), row in ratios.items() if label == "Oobleck" for ratio in row)
    # Listed: Varuna always recomputes here and writes checkpoints in the background; Bamboo is two to four times as
    # fast here, and has memory for GPT-3 Medium.
    assert all(0.4 <= ratio <= 1.5 for (_, label), row in ratios.items() if label == "Varuna" for ratio in row)
    bamboo = {name: row for (name, label), row in ratios.items() if label == "Bamboo" and row}
    assert {name: round(min(row), 1) for name, row in bamboo.items()} == {"BERT-Large": 2.7, "GPT-2": 3.6}
    assert [ours > 0 for _, ours in rows["GPT-3 Medium", "Bamboo"]] == [True] * 3
