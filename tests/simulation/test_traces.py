"""The traces that ship with the package, and their loader."""

import doctest
from importlib import import_module, resources

import pytest

from lightning_recycle.callbacks import FaultInjectionCallback
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.traces import NodeEvent, available_traces, load_trace


@pytest.mark.parametrize(
    ("name", "hours", "ups", "downs", "peak", "mean"),
    [("aws-p3", 11.4, 177, 167, 32, 24.0), ("aws-g4dn", 10.8, 79, 74, 24, 12.6), ("aws-p2", 88.7, 186, 172, 16, 15.5)],
)
def test_aws_traces_are_what_their_readme_says(name, hours, ups, downs, peak, mean):
    trace = load_trace(name)
    assert round(trace.duration / 3600, 1) == hours
    assert [sum(event.up is up for event in trace.events) for up in (True, False)] == [ups, downs]
    assert trace.peak == peak
    assert round(trace.mean, 1) == mean


@pytest.mark.parametrize(("name", "least", "most", "hours"), [("gcp-a100", 17, 64, 27), ("gcp-v100", 30, 80, 24.2)])
def test_gcp_traces_are_what_their_readme_says(name, least, most, hours):
    trace = load_trace(name)
    counts = [count for _, count in trace.availability]
    assert (min(counts), trace.peak) == (least, most)
    assert trace.duration / 3600 == pytest.approx(hours, abs=0.1)


@pytest.mark.parametrize("name", available_traces())
def test_nodes_come_and_go_in_turn_and_in_order(name):
    trace = load_trace(name)
    up: set[int] = set()
    for before, event in zip((NodeEvent(0.0, 0, False), *trace.events), trace.events, strict=False):
        assert before.time <= event.time <= trace.duration
        assert (event.node in up) is not event.up
        (up.add if event.up else up.remove)(event.node)
    assert {event.node for event in trace.events} == set(range(trace.peak))


def test_rows_out_of_order_do_not_make_instances_flicker():
    # The first rows of this file go 80, 80, 80, 70 at times 0, 60, 120, 60.
    assert load_trace("gcp-v100").availability[:2] == ((0.0, 80), (180.0, 70))


def test_unknown_trace_is_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"^trace='azure': .*aws-p3"):
        load_trace("azure")
    with pytest.raises(ConfigurationError, match=r"^FaultInjectionCallback\(trace='aws-p4'\): .* mean 'aws-p3'"):
        FaultInjectionCallback(trace="aws-p4")


def test_files_of_the_same_formats_are_read(tmp_path):
    named, counted, timed = (tmp_path / name for name in ("named.csv", "counted.txt", "timed.csv"))
    named.write_text("0,add,a\n0,add,b\n5000,remove,a\n7000,add,c\n")
    counted.write_text("2024-01-01, 00:00:07, 2\n2024-01-01, 00:00:00, 2\n2024-01-01, 00:00:05, 1\n")
    timed.write_text("0.0,2\n0.001,2\n0.001,1\n0.002,1\n0.002,2\n")  # both ends of each change
    for path in (named, str(counted)):
        assert load_trace(path).availability == ((0.0, 2), (5.0, 1), (7.0, 2))
    assert load_trace(timed).availability == ((0.0, 2), (3.6, 1), (7.2, 2))


@pytest.mark.parametrize("text", ["", "one row", "0,add", "1.5,many", "2024-01-01, noon, 3"])
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path, text):
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"wrong\.csv cannot be parsed"):
        load_trace(path)


def test_licence_and_origin_ship_with_the_data():
    folder = resources.files("lightning_recycle.traces")
    assert "MIT License" in folder.joinpath("LICENSE").read_text()
    assert "Bamboo" in folder.joinpath("README.md").read_text()


@pytest.mark.parametrize("package", ["lightning_recycle.traces", "lightning_recycle.simulation"])
def test_the_examples_in_the_documentation_are_true(package):
    found = doctest.testmod(import_module(package))
    assert found.attempted
    assert not found.failed
