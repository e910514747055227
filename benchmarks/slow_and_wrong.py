"""Slow nodes, wrong results and shared links under all policies with the same schedule.

Sections ``slow``, ``wrong`` and ``links`` of ``simulation.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rich.table import Table
from same_schedule import POLICIES, assumptions, new_table, policy_of

from lightning_recycle.simulation import (
    Cluster,
    CommonPolicy,
    CorruptNodes,
    FailureSource,
    Poisson,
    SlowNodes,
    Topology,
    get_model,
    repeat,
)

__all__ = ["links_table", "slow_table", "wrong_table"]

MODEL = "gpt3_6_7b"
SEEDS = range(5)


def _ratio(policy: CommonPolicy, source: FailureSource, topology: Topology | None = None) -> float:
    model = get_model(MODEL)
    cluster = Cluster.of(model, extra_nodes=getattr(policy, "spares", 0), topology=topology)
    return repeat(model, cluster, policy, source, "1d", SEEDS).ratio_per_gpu


def _table(title: str, columns: dict[str, tuple[FailureSource, dict, Topology | None]]) -> Iterable[Table]:
    for schedule in ("1f1b", "planned"):
        heading = f"{title}. Schedule {schedule}; runs of a day, {len(SEEDS)} seeds; {assumptions(get_model(MODEL))}"
        table = new_table(heading, "policy", *columns)
        for label, kind in POLICIES.items():
            if label == "Bamboo":  # out of memory
                continue
            usual = policy_of(kind, schedule)
            found = (_ratio(replace(usual, **more), source, links) for source, more, links in columns.values())
            table.add_row(label, *(f"{value:.3f}" for value in found))
        yield table


def slow_table() -> Iterable[Table]:
    """Slow nodes: all wait, or the policy does what it can."""
    wait: dict = {"slow_after": None}
    cases = {
        "50 %, 10 min, every 2 h": SlowNodes("2h", 0.5, "10min"),
        "50 %, 6 h, every 6 h": SlowNodes("6h", 0.5, "6h"),
        "10 %, 6 h, every 6 h": SlowNodes("6h", 0.1, "6h"),
    }
    columns = {}
    for name, source in cases.items():
        columns[f"{name}: wait"] = (source, wait, None)
        columns[f"{name}: act"] = (source, {}, None)
    return _table("Slow nodes, ratio to fault-free 1F1B", columns)


def wrong_table() -> Iterable[Table]:
    """Wrong results every 6 h: found after a while, by checks now and then, or in their step."""
    columns = {
        "noticed after 1 h": (CorruptNodes("6h"), {}, None),
        "checked every 10 min": (CorruptNodes("6h"), {"check_every": "10min"}, None),
        "every step, 1 % of it": (CorruptNodes("6h"), {"check_every": 0.0, "check_cost": 0.01}, None),
        "a failure instead": (Poisson("6h", repair="4h"), {}, None),
    }
    return _table("A node computes wrong results every 6 h, back after 4 h; ratio to fault-free 1F1B", columns)


def links_table() -> Iterable[Table]:
    """A failure every 2 h in racks of 4 nodes."""
    columns = {
        name: (Poisson("2h", repair="4h"), {}, topology)
        for name, topology in {
            "no shared links": None,
            "4:1": Topology(rack=4, oversubscription=4.0),
            "16:1": Topology(rack=4, oversubscription=16.0),
            "8 nodes, 16:1": Topology(rack=8, oversubscription=16.0),
        }.items()
    }
    return _table("A failure every 2 h, back after 4 h, racks of 4 nodes; ratio to fault-free 1F1B", columns)
