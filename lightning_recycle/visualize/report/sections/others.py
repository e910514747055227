"""Training runs with other failures, and the list of all runs."""

from __future__ import annotations

from lightning_recycle.visualize.report.grouping import models_of, protocol_text
from lightning_recycle.visualize.report.markup import Cell, Markup, join, num, table
from lightning_recycle.visualize.report.names import duration_text, failures_text, model_text, policy_text
from lightning_recycle.visualize.report.records import Record, Results
from lightning_recycle.visualize.report.sections.section import Section, note

__all__ = ["others_section", "runs_section"]


def others_section(results: Results) -> Section:
    """Runs whose failure sources have no section of their own."""
    found = results.section("others")
    return Section(
        "others",
        "Other failures",
        "Published failure rates, slow and wrong nodes, and outages given one by one.",
        _others(found) if found else None,
        "recycle-simulate -m failures=llama3,rsc1 policy=recycle,restart output=results",
    )


def _others(records: list[Record]) -> Markup:
    order = models_of(records)
    rows: list[list[Cell | str]] = []
    for record in sorted(records, key=lambda record: order.index(record["model"]["name"])):
        parts = [num(100 * part, 1) for part in record["fractions"].values()]
        rows.append(
            [model_text(record["model"]["name"]), failures_text(record), policy_text(record), *_numbers(record)]
        )
        rows[-1] += parts
    columns = ["model", "failures", "policy", "samples/s", "of fault-free", "spread", "node failures"]
    columns += [f"{cause}, %" for cause in records[0]["fractions"]]
    return join((table(columns, rows, left=3, caption="Runs"), note(f"Protocol: {protocol_text(records)}.")))


def _numbers(record: Record) -> list[Cell | str]:
    return [
        num(record["throughput"], 2, key="throughput"),
        num(record["ratio"], key="ratio"),
        num(record["deviation"], key="deviation"),
        num(record["node_failures"], 1, key="node_failures"),
    ]


def _worth(record: Record) -> list[Cell | str]:
    """What the time of the GPUs was worth; dollars at the first of the prices."""
    cost = next(iter(record["cost"].values()), None)
    return [
        num(record["fraction_of_ideal"], key="fraction_of_ideal"),
        num(record["goodput"], key="goodput"),
        num(record["ettr"], key="ettr"),
        num(record["mfu"], key="mfu"),
        num(cost and cost["per_thousand_samples"], 2, key="cost"),
    ]


def runs_section(results: Results) -> Section:
    """Every training run, with the command that repeats it."""
    return Section(
        "runs",
        "All training runs",
        "Spread: standard deviation of the ratio from run to run. Of ideal: of what the live GPUs could do. Goodput: "
        "part of all GPU time spent on samples that count. ETTR: part of the time in which kept steps were trained.",
        _runs(results.training) if results.training else None,
        "recycle-simulate output=results",
    )


def _runs(records: list[Record]) -> Markup:
    rows: list[list[Cell | str]] = [
        [
            model_text(record["model"]["name"]),
            policy_text(record),
            failures_text(record),
            duration_text(record["duration"]),
            num(len(record["runs"]), 0),
            *_numbers(record),
            *_worth(record),
            record["command"],
        ]
        for record in records
    ]
    columns = ["model", "policy", "failures", "length", "runs", "samples/s", "of fault-free", "spread", "node failures"]
    columns += ["of ideal", "goodput", "ETTR", "MFU", "$ per 1,000 samples"]
    return table([*columns, "command"], rows, left=3, caption="Results, each with the command that repeats it")
